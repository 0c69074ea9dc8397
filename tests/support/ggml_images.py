"""How ggml builds convolutions and pools, and samples of what it has as one op."""

from ctypes import c_int64

from ggml_cpu import sizes

from pyggml.graph.dtypes import F32
from pyggml.graph.op import Sample


def geometry(stride, padding, dilation):
    return [pair[i] for pair in (stride, padding, dilation) for i in (1, 0)]


def conv_2d_direct(g, w, x, stride, padding, dilation, groups):
    if groups == 1:
        return g.conv_2d_direct(w, x, *geometry(stride, padding, dilation))
    if groups == x.contents.ne[2] == w.contents.ne[3]:
        return g.conv_2d_dw_direct(w, x, *geometry(stride, padding, dilation))
    return None


def transposed_1d(g, w, x, stride):
    """ggml's x has no batches."""
    if x.contents.ne[2] * x.contents.ne[3] > 1:
        return None
    return g.conv_transpose_1d(w, x, stride, 0, 1)


def conv_transpose_2d_samples(rng):
    for n_in, n_out, kernel, image, stride in [
        (1, 1, (1, 1), (1, 1), 1),
        (3, 4, (2, 3), (5, 6), 1),
        (2, 3, (3, 2), (4, 7), 2),
        (4, 2, (4, 4), (3, 3), 3),
    ]:
        arrays = rng.standard_normal((n_in, n_out, *kernel)), rng.standard_normal((1, n_in, *image))
        yield Sample(arrays, {"stride": stride})


def conv_transpose_1d_samples(rng):
    for sample in conv_transpose_2d_samples(rng):
        yield Sample(tuple(a[:, :, 0] for a in sample.arrays), sample.params)


def im2col(g, x, size, stride, padding, dilation):
    w = g.new(F32, (1, x.contents.ne[2], *size))
    return g.im2col(w, x, *geometry(stride, padding, dilation), True, F32.number)


def im2col_back(g, dy, of, size, stride, padding, dilation):
    w, shape = g.new(F32, (1, of[1], *size)), (c_int64 * 4)(*sizes(of))
    return g.im2col_back(dy, w, shape, *geometry(stride, padding, dilation), True)


def pool(number):
    def build(g, x, size, stride, padding, whole=True):
        if not whole:
            flat = size[0] == stride[0] == x.contents.ne[1] == 1
            return g.pool_1d(x, number, size[1], stride[1], padding[1]) if flat else None
        return g.pool_2d(x, number, *size[::-1], *stride[::-1], *map(float, padding[::-1]))

    return build
