"""Keys and values of a cache, made float32 for paths that read that."""

from dataclasses import replace

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32, DType
from pyggml.jit import JIT, parallel, prange
from pyggml.jit.scratch import Array, Layout, Scratch
from pyggml.kernels.attention.path import AttentionPath, AttentionProblem, Forward
from pyggml.kernels.gemm.microkernel import call_block
from pyggml.quants import UNPACK

_Copy = tuple[DType, np.ndarray, np.ndarray]  # the type, rows of float32, rows of its bytes


def as_bits(a: np.ndarray) -> np.ndarray:
    """float16 as uint16, since Numba knows no float16; other arrays as they are."""
    return a.view(np.uint16) if JIT and a.dtype == np.float16 else a


def as_bytes(a: np.ndarray) -> np.ndarray:
    """(S, …) of any type as the bytes of S rows."""
    return a.reshape(len(a), -1).view(np.uint8)


def after_widening(path: AttentionPath[Forward]) -> AttentionPath[Forward]:
    """A path that makes keys and values float32 where they are not, then runs `path`."""

    def widened_problem(problem: AttentionProblem) -> AttentionProblem:
        return replace(problem, key_type=F32, value_type=F32)

    def takes(problem: AttentionProblem) -> bool:
        return not problem.reads_floats and path.takes(widened_problem(problem))

    def layout(problem: AttentionProblem) -> Layout:
        keys, p = (problem.n_keys, problem.n_key_heads), problem
        wide = {
            name: Array((*keys, size))
            for name, kind, size in (
                ("k32", p.key_type, p.head_size), ("v32", p.value_type, p.value_size)
            )
            if kind is not F32
        }  # fmt: skip
        return path.layout(widened_problem(problem)).followed_by(**wide)

    def bind(problem: AttentionProblem, a: Forward, scratch: Scratch) -> Call:
        k, v = scratch.pop("k32", a.k), scratch.pop("v32", a.v)
        call = path.bind(widened_problem(problem), replace(a, k=k, v=v), scratch)
        kinds = (k, a.k, problem.key_type), (v, a.v, problem.value_type)
        copies = [
            (kind, to.reshape(len(to), -1), as_bytes(of)) for to, of, kind in kinds if to is not of
        ]
        return Call(_widen_seen, a.span, copies, call)

    return AttentionPath(f"{path.name}, widened", path.compiled, takes, layout, bind)


def _widen_seen(span: np.ndarray, copies: list[_Copy], call: Call) -> None:
    """Widen keys up to the last that any query sees: the rest of a cache is empty."""
    n_seen = int(span[:, 1].max(initial=0))
    for kind, floats, rows in copies:
        code, n_blocks = UNPACK[kind.name], floats.shape[1] // kind.block
        if JIT:
            _unpack_rows(floats[:n_seen], rows[:n_seen], code.address, n_blocks)
        else:
            code(floats[:n_seen], rows[:n_seen], n_seen * n_blocks)
    call()


@parallel
def _unpack_rows(floats, rows, unpack, n_blocks):
    for i in prange(floats.shape[0]):
        call_block(unpack, floats[i].ctypes.data, rows[i].ctypes.data, n_blocks)
