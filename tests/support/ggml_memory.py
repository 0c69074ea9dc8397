"""How ggml builds what moves numbers: views, pads, and rows by their numbers."""

from math import prod

from ggml_cpu import Long, longs, sizes

from pyggml.graph.dtypes import F32


def inner(g, axis):
    """The node's axis, counted from the innermost as in ggml."""
    return len(g.node.shape) - 1 - axis


def rows(g, x):
    return g.reshape(x, -1, x.contents.ne[0])


def narrow(g, x, axis, start, size):
    ne, nb, dim = [*x.contents.ne], x.contents.nb, inner(g, axis)
    ne[dim] = size
    return g.view_4d(x, *map(Long, (*ne, *nb[1:], start * nb[dim])))


def permute(g, x, axes):
    to = {
        3 - a: 3 - i
        for i, a in enumerate((*range(4 - len(axes)), *(4 - len(axes) + a for a in axes)))
    }
    return g.permute(x, *(to[i] for i in range(4)))


def window(g, x, shape, strides, offset):
    """ggml's nb1, nb2, nb3 and offset of a window in elements, None if its rows have gaps."""
    if strides and strides[-1] != 1 and shape[-1] > 1:
        return None
    nb = [4 * s for s in reversed(strides)][1:]
    while len(nb) < 3:
        nb.append((nb[-1] if nb else 4) * sizes(shape)[len(nb)])
    return [Long(n) for n in (*nb, 4 * offset)]


def view(g, x, shape, strides, offset):
    at = window(g, x, shape, strides, offset)
    return at and g.view_4d(x, *longs(shape), *at)


def write_window(name):
    """Where rows of the window lie on one another, ggml adds the last alone."""

    def build(g, a, b, strides, offset):
        shape = g.node.src[1].shape
        at = window(g, a, shape, strides, offset)
        spans = sorted(zip(strides, shape, strict=True))
        if any(s < m * k for (s, _), (m, k) in zip(spans[1:], spans, strict=False)):
            return None
        return at and getattr(g, name)(a, b, *at)

    return build


def pad(g, x, widths, circular):
    """Where more is put before an axis than it has, ggml's circle reads before x."""
    if circular and any(
        before > n for (before, _), n in zip(widths, g.node.src[0].shape, strict=True)
    ):
        return None
    ends = [n for pair in sizes(widths)[: len(widths)] for n in pair]
    ends += [0] * (8 - len(ends))
    return (g.pad_ext_circular if circular else g.pad_ext)(x, *ends)


def roll(g, x, shifts):
    ne = x.contents.ne
    return g.roll(
        x,
        *(s % n for s, n in zip(sizes(shifts)[: len(shifts)], ne, strict=False)),
        *[0] * (4 - len(shifts)),
    )


def upscale(g, x, sizes, mode, align_corners, antialias):
    number = ("nearest", "bilinear", "bicubic").index(mode) | align_corners << 8 | antialias << 9
    return g.interpolate(x, *longs(sizes), number)


def get_rows(g, table, ids):
    batch = g.node.src[0].shape[:-2]
    if g.node.src[1].shape[: len(batch)] != batch:
        return None
    return g.get_rows(table, g.reshape(ids, *batch, -1))


def get_rows_back(g, dy, ids, n_rows, batch):
    n = dy.contents.ne[0]
    return (
        None if batch else g.get_rows_back(rows(g, dy), g.reshape(ids, -1), g.new(F32, (n_rows, n)))
    )


def set_rows(g, dst, src, ids):
    if g.node.dtype.name == "IQ4_NL":  # ggml looks less long for the scale than its quantize does
        return None
    d, _, i = (t.shape for t in g.node.src)
    batch, row = d[: len(i) - 1], prod(d[len(i) :])
    dst = g.reshape_4d(dst, *longs((*batch, d[len(batch)], row)))
    return g.set_rows(dst, g.reshape(src, *batch, i[-1], row), ids)
