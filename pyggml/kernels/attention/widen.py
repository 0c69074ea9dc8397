"""float16 and Q8_0 keys and values of a cache, made float32 for paths that read that."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.dtypes import F16, F32, Q8_0
from pyggml.jit import JIT, parallel, prange
from pyggml.jit.scratch import Array, Layout, Scratch
from pyggml.kernels.attention.path import Forward, Path, Problem
from pyggml.kernels.gemm.microkernel import call_block
from pyggml.quants import UNPACK
from pyggml.quants.bits import f16_to_float

_UNPACK = UNPACK["Q8_0"]


def as_bits(a: np.ndarray) -> np.ndarray:
    """float16 as uint16, since Numba knows no float16; other arrays as they are."""
    return a.view(np.uint16) if JIT and a.dtype == np.float16 else a


def after_widening(path: Path[Forward]) -> Path[Forward]:
    """A path that widens float16 keys and values, then runs `path` on float32."""

    def widened_problem(problem: Problem) -> Problem:
        return replace(problem, key_type=F32)

    def takes(problem: Problem) -> bool:
        return problem.key_type is not F32 and path.takes(widened_problem(problem))

    def layout(problem: Problem) -> Layout:
        keys = Array((problem.n_keys, problem.n_key_heads, problem.head_size))
        return path.layout(widened_problem(problem)).followed_by(k32=keys, v32=keys)

    def bind(problem: Problem, a: Forward, scratch: Scratch) -> Call:
        k, v = scratch.pop("k32"), scratch.pop("v32")
        call = path.bind(widened_problem(problem), replace(a, k=k, v=v), scratch)
        widen = _widen if problem.key_type is F16 else _unpack
        copies = [(to.reshape(len(to), -1), _bits(of)) for to, of in ((k, a.k), (v, a.v))]
        return Call(_widen_seen, widen, a.span, copies, call)

    return Path(f"{path.name}, widened", path.compiled, takes, layout, bind)


def _bits(a: np.ndarray) -> np.ndarray:
    rows = a.reshape(len(a), -1)
    return rows if a.dtype == np.uint8 else rows.view(np.uint16)


def _widen_seen(
    widen: Callable[..., None],
    span: np.ndarray,
    copies: list[tuple[np.ndarray, np.ndarray]],
    call: Call,
) -> None:
    """Widen keys up to the last that any query sees: the rest of a cache is empty."""
    n_seen = int(span[:, 1].max(initial=0))
    for floats, bits in copies:
        widen(floats[:n_seen], bits[:n_seen])
    call()


@parallel
def _widen(floats, bits):
    for i in prange(floats.shape[0]):
        for j in range(floats.shape[1]):
            floats[i, j] = f16_to_float(bits[i, j])


def _unpack(floats: np.ndarray, rows: np.ndarray) -> None:
    if JIT:
        _unpack_rows(floats, rows, _UNPACK.address)
    else:
        _UNPACK(floats, rows, floats.size // Q8_0.block)


@parallel
def _unpack_rows(floats, rows, unpack):
    for i in prange(floats.shape[0]):
        call_block(unpack, floats[i].ctypes.data, rows[i].ctypes.data, floats.shape[1] // 32)
