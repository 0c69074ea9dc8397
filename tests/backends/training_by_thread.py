"""A script: kernels of training, each thread a thread of Python. It prints, for each result, what
it is and its error. Blocks have a warp each.
"""

import numpy as np
from by_thread import rounded, run_block, run_cluster, show, widened

from pyggml.backends.cuda.ops.lora import gated, gated_sums, norm_rows, thin_sums, wide

RNG = np.random.default_rng(3)
gated_sums._WARPS = norm_rows._WARPS = 1
thin_sums._WARPS, gated_sums._WIDTH = 2, 32


def numbers(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def halves(*shape):
    bits = rounded(RNG.standard_normal(shape))
    return bits.reshape(-1), widened(bits).astype(np.float64).reshape(shape)


def show_gated_sums():
    m, k, ranks, scales, n = 37, 72, (5, 8, 7), (0.5, 3.0), 8
    step, blocks, n_rows = 2 * k + 24, (3, 2, 1), 32
    (gate, g), (up, u), (dy, y) = (halves(m, k) for _ in range(3))
    b, (x, of_x), (v, of_v) = [numbers(k, r) for r in ranks[:2]], halves(m, 16), halves(m, 24)
    d, parts, sums = (
        np.full(m * step, 0xFFFF, "u2"),
        np.zeros(blocks[0] * m * 2 * n, "f4"),
        np.zeros(2 * 3 * k * n, "f4"),
    )
    factors = tuple(
        (f.reshape(-1), f.shape[1], np.float32(s)) for f, s in zip(b, scales, strict=True)
    )
    of_parts = (d, parts, sums, gate, up, dy, factors, ((x, 16), (x[8:], 16), (v[16:], 24)))
    run = gated_sums._kernel(1)
    for at in np.ndindex(*blocks):
        run_block(run, (*of_parts, (m, k, n_rows, step)), at, blocks, 32)
    found = [np.ones(k * r, "f4") for r in ranks]
    sizes = m, k, n, blocks[0], blocks[1], step
    add = gated_sums._add_parts
    run_block(add, (d, *found, parts, sums, sizes, ranks), (0, 0, 0), (1, 1, 1), 32)
    s = 1 / (1 + np.exp(-g))
    each = [widened(rounded(e)) for e in (y * u * s * (1 + g * (1 - s)), y * g * s, g * s * u)]
    d = widened(d).reshape(m, step)
    for i, name in enumerate(("gate", "up")):
        show(f"gradient of {name}", d[:, i * k : (i + 1) * k], each[i])
        thin = d[:, 2 * k + i * n :][:, : ranks[i]]
        show(f"its product with B of {name}", thin, each[i] @ b[i] * scales[i])
        wanted = each[i].T @ of_x[:, i * n :][:, : ranks[i]] + 1
        show(f"gradient of B of {name}", found[i].reshape(k, -1), wanted)
    show("gradient of A", found[2].reshape(-1, k), of_v[:, 16:23].T @ each[2] + 1)


def show_thin_sums():
    """Of B, of more columns than a block has, and of A."""
    m, n, k = 53, 40, 72
    (d_bits, d), (u_bits, u), (x_bits, x) = halves(m, 128), halves(m, 24), halves(m, k)
    of_b, of_a = np.ones((n, 5), "f4"), np.ones((7, k), "f4")
    forms = (n, 5, 128, 24, 5, 1), (k, 7, k, 128, 1, k)
    outs, places = (of_b.reshape(-1), of_a.reshape(-1)), ((64, 8), (0, 112))
    arguments = outs, (d_bits, x_bits), (u_bits, d_bits), places, forms, m
    for x_block, y in np.ndindex(3, 2):
        run_block(thin_sums._kernel(1), arguments, (x_block, y, 0), (3, 2, 1), 64)
    show("gradient of a thin B", of_b, d[:, 64 : 64 + n].T @ u[:, 8:13] + 1)
    show("gradient of a thin A", of_a, d[:, 112:119].T @ x + 1)


def show_wide(what, found, row, factors, scales):
    """A wide row, and its products with factors (rank, k)."""
    k, found = row.shape[1], widened(found).reshape(len(row), -1)
    show(what, found[:, :k], row)
    for i, (f, scale) in enumerate(zip(factors, scales, strict=True)):
        thin = found[:, k + 8 * i :][:, : len(f)]
        show(f"product {i} of {what}", thin, found[:, :k].astype(float) @ f.T * scale)


def show_norm_rows(m=37, k=296, scales=(0.5, 2.0)):
    share, steps, eps = norm_rows._share(k), norm_rows._steps(k), np.float32(1e-3)
    (b, b_exact), a, w, factors = (
        halves(m, k),
        numbers(m, k),
        numbers(k),
        [numbers(5, k), numbers(8, k)],
    )
    step = wide.width(k + 16)
    total, copy, out, thin = (
        np.zeros(m * n, t) for n, t in ((k, "f4"), (k, "u2"), (step, "u2"), (16, "u2"))
    )
    tiles = wide.tiles_of([f.reshape(-1) for f in factors], [5, 8], scales, (k, 1))
    run = norm_rows._rows_kernel(norm_rows._ClusterForm(steps, 2, 1), True, True)
    arguments = (
        total,
        copy,
        out,
        thin,
        a.reshape(-1),
        b,
        w,
        tiles,
        m,
        k,
        share,
        eps,
        step,
        (True, True),
    )
    for y in range(3):
        run_cluster(run, arguments, y, (8, 3, 1), 32)
    exact = a + b_exact
    show("sum before a norm", total.reshape(m, k), exact)
    show("its copy", widened(copy).reshape(m, k), exact)
    rate = 1 / np.sqrt((exact * exact).mean(1, keepdims=True) + 1e-3)
    show_wide("norm", out, exact * rate * w, factors, scales)
    show(
        "copy of products", widened(thin), widened(out).reshape(m, step)[:, k : k + 16].reshape(-1)
    )


def show_norm_gradient(m=21, k=296):
    share, steps, eps = norm_rows._share(k), norm_rows._steps(k), np.float32(1e-3)
    (x_bits, x), (dy_bits, dy), y, w, b = (
        halves(m, k),
        halves(m, k),
        numbers(m, k),
        numbers(k),
        numbers(k, 5),
    )
    total, step = y.reshape(-1).copy(), wide.width(k + 8)
    norm, out = np.zeros(m * k, np.uint16), np.zeros(m * step, np.uint16)
    tiles = wide.tiles_of([b.reshape(-1)], [5], (0.5,), (1, 5))
    run = norm_rows._gradient_kernel(norm_rows._ClusterForm(steps, 1, 2), (True, True))
    arguments = (
        total,
        norm,
        out,
        x_bits,
        w,
        dy_bits,
        total,
        tiles,
        m,
        k,
        share,
        eps,
        step,
        (True, True),
    )
    for row in range(2):
        run_cluster(run, arguments, row, (8, 2, 1), 32)
    rate = 1 / np.sqrt((x * x).mean(1, keepdims=True) + 1e-3)
    n, g = x * rate, dy * w
    exact = y + rate * (g - n * (g * n).mean(1, keepdims=True))
    show("sum after a norm's gradient", total.reshape(m, k), exact)
    show("norm once more", widened(norm).reshape(m, k), n * w)
    show_wide("sum", out, exact, [b.T], (0.5,))


FORM = wide.BlockForm(1, 1, 2, 2, in_cluster=True)  # a warp of a cluster takes two steps at once


def show_wide_rows(m=21, k=296, ranks=(5, 8)):
    (bits, x), factors, step = halves(m, k), [numbers(r, k) for r in ranks], wide.width(k + 16)
    out, thin = np.zeros(m * step, np.uint16), np.zeros(m * 16, np.uint16)
    tiles = wide.tiles_of([f.reshape(-1) for f in factors], ranks, (0.5, 2.0), (k, 1))
    none = np.zeros(1, np.float32)
    run = wide._kernel(2, FORM, "", (True,), True)
    for y in range(2):
        arguments = out, thin, True, none, none, bits, bits, bits, tiles, m, k, step
        run_cluster(run, arguments, y, (8, 2, 1), 32)
    show_wide("rows", out, x, factors, (0.5, 2.0))
    rows = widened(out).reshape(m, step)
    show("copy of their products", widened(thin), rows[:, k : k + 16].reshape(-1))


def show_gated_gradients(m=21, k=296, ranks=(5, 8)):
    (gate, g), (up, u), (dy, y) = (halves(m, k) for _ in range(3))
    b, step = [numbers(k, r) for r in ranks], wide.width(2 * k + 16)
    out, h, none = np.zeros(m * step, "u2"), np.zeros(m * k, "u2"), np.zeros(1, "f4")
    tiles = [
        wide.tiles_of([f.reshape(-1)], [r], [s], (1, r))
        for f, r, s in zip(b, ranks, (0.5, 3.0), strict=True)
    ]
    places = m, k, (2 * k, k + 8), (step, step)
    arguments = out, out[k:], h, none, none, none, gate, up, dy, *tiles, *places
    for row in range(2):
        run_cluster(gated._kernel(1, 1, FORM), arguments, row, (8, 2, 1), 32)
    s = 1 / (1 + np.exp(-g))
    each = [widened(rounded(e)) for e in (y * u * s * (1 + g * (1 - s)), y * g * s)]
    d = widened(out).reshape(m, step)
    for i, name in enumerate(("gate", "up")):
        show(f"gradient of {name} by a cluster", d[:, i * k : (i + 1) * k], each[i])
        thin = d[:, 2 * k + 8 * i :][:, : ranks[i]]
        show(f"by a cluster its product with B of {name}", thin, each[i] @ b[i] * (0.5, 3.0)[i])
    show("the unit", widened(h).reshape(m, k), g * s * u)


for _show in (
    show_gated_sums, show_thin_sums, show_norm_rows, show_norm_gradient, show_wide_rows,
    show_gated_gradients,
):  # fmt: skip
    _show()
