"""Gradients through weights of few bits by NumPy, rounded as pyggml.kernels.gemm.few_bits does."""

import numpy as np

from pyggml.graph.dtypes import dtype
from pyggml.kernels.gemm import few_bits, few_bits_pack
from pyggml.quants import dequantize


def with_scales_in_dy(dy, w, kind):
    """dy · w of bytes dy · s, for the columns of each scale s, and of the weights as they are."""
    each, (half, _), n_in = few_bits.columns_of(kind), few_bits.centre(kind), w.shape[1]
    n_in = n_in // dtype(kind).block_bytes * dtype(kind).block
    rows = np.zeros((len(w), few_bits_pack.ROW_WORDS), np.float32)
    for row, packed in zip(rows, w, strict=True):
        few_bits._UNPACK[kind, True](row, packed, n_in // dtype(kind).block)
    s, m, q = np.split(rows, [few_bits_pack.SCALES, 2 * few_bits_pack.SCALES], axis=1)
    s, m = (v.repeat(each, 1)[:, :n_in] for v in (s, m))
    q = np.ascontiguousarray(q).view(np.int8)[:, :n_in].astype(np.float64)
    assert np.abs(q).max() <= half
    m = m + s * few_bits.move(kind, True)
    np.testing.assert_allclose(q * s + m, dequantize(w, kind), atol=1e-5 * np.abs(s).max() * half)
    dx = np.zeros((len(dy), n_in))
    for n in range(0, len(w), 32):
        here, scales = dy[:, n : n + 32], s[n : n + 32]
        unit = np.abs(here).max(1, keepdims=True) / np.float32(127 << 5)
        step = np.abs(scales).max(0) / np.float32(1 << 10)
        whole, factors = np.rint(here / unit), np.rint(scales / np.where(step == 0, 1, step))
        for k in range(0, n_in, each):
            columns = np.s_[n : n + 32, k : k + each]
            in_bytes = np.floor(whole * factors[:, k] / (1 << 15) + 0.5)
            part = in_bytes @ q[columns] * step[k] * (1 << 15) + whole @ m[columns]
            dx[:, k : k + each] += part * unit
    return dx
