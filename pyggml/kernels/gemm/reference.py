"""The reference: unpack the whole matrix, let NumPy multiply. Tests compare all paths with it."""

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.dtypes import DType
from pyggml.jit.scratch import Layout
from pyggml.kernels.gemm import int8
from pyggml.kernels.gemm.path import Operands, Problem, ProductPath
from pyggml.quants import dequantize


def forward(
    y: np.ndarray, x: np.ndarray, w: np.ndarray, dtype: DType, accumulate: bool, pairs: bool,
    in_bytes: bool = False,
) -> None:  # fmt: skip
    """y (+)= x · wᵀ; `pairs` rounds both factors to bfloat16, `in_bytes` rounds x to bytes."""
    plain = dequantize(w, dtype.name)
    if in_bytes:
        _put(y, _in_bytes(x) @ plain.T, accumulate)
    else:
        _put(y, _factor(x, pairs) @ _factor(plain, pairs).T, accumulate)


def backward(
    dx: np.ndarray, dy: np.ndarray, w: np.ndarray, dtype: DType, accumulate: bool, pairs: bool,
    in_bytes: bool = False,
) -> None:  # fmt: skip
    """dx (+)= dy · w; `pairs` rounds both factors to bfloat16, `in_bytes` both to bytes along N."""
    plain = dequantize(w, dtype.name)
    if in_bytes:
        _put(dx, _in_bytes(dy) @ _in_bytes(np.ascontiguousarray(plain.T)).T, accumulate)
    else:
        _put(dx, _factor(dy, pairs) @ _factor(plain, pairs), accumulate)


def _factor(x: np.ndarray, pairs: bool) -> np.ndarray:
    """x, or the nearest bfloat16 (ties to even) as float32."""
    if not pairs:
        return x
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32))


def _in_bytes(x: np.ndarray) -> np.ndarray:
    """x, rounded as pyggml.kernels.gemm.activations rounds it."""
    blocks = x.reshape(-1, 32)
    most = np.abs(blocks).max(axis=1, keepdims=True)
    scale, usual = most / np.float32(127), np.isfinite(most) & (most > 1e-30)
    per_scale = np.divide(np.float32(127), most, out=np.zeros_like(most), where=usual)
    whole = np.rint(blocks * per_scale)  # the same products, so the same edges between bytes
    return np.where(np.isfinite(scale), whole * scale, np.nan).reshape(x.shape)


def strided(c: np.ndarray, a: np.ndarray, b: np.ndarray, accumulate: bool) -> None:
    """c (+)= a · bᵀ for every batch; a and b may have fewer batches, repeated as in ggml."""
    left = np.repeat(a, c.shape[0] // a.shape[0], axis=0)
    right = np.repeat(b, c.shape[0] // b.shape[0], axis=0)
    _put(c, left @ right.swapaxes(1, 2), accumulate)


def _put(out: np.ndarray, value: np.ndarray, accumulate: bool) -> None:
    if accumulate:
        out += value
    else:
        out[...] = value


def _bind(p: Problem, o: Operands) -> Call:
    if p.form == "strided":
        return Call(strided, o.c, o.a, o.b, o.accumulate)
    multiply = forward if p.form == "mul_mat" else backward
    return Call(multiply, o.c, o.a, o.b, p.weight_type, o.accumulate, p.rounds, int8.takes(p))


NUMPY = ProductPath(name="numpy", takes=lambda p: True, layout=lambda p: Layout(), bind=_bind)
