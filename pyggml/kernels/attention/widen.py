"""Keys and values of a cache, made float32 for paths that read that."""

from dataclasses import replace

import numpy as np

from pyggml.graph.call import Call, one_by_one
from pyggml.graph.dtypes import F32, DType
from pyggml.jit import JIT, kernel
from pyggml.jit.scratch import Array, Layout, Scratch
from pyggml.jit.tasks import TaskStage, code_for, launch, pieces, tuple_stage, whole
from pyggml.kernels.attention.path import AttentionPath, AttentionProblem, Forward
from pyggml.kernels.gemm.microkernel import call_block
from pyggml.quants import UNPACK

_Copy = tuple[DType, np.ndarray, np.ndarray]  # the type, rows of float32, rows of its bytes
_ROWS = 16  # of a task


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
        if not JIT:
            return Call(_widen_seen, a.span, copies, call)
        stages = [_widening(a.span, *copy) for copy in copies]
        if call.kernel is launch:
            return Call(launch, *stages, *call.arguments)
        return Call(one_by_one, (Call(launch, *stages), call))

    return AttentionPath(f"{path.name}, widened", path.compiled, takes, layout, bind)


@kernel
def _last_seen(span):
    """The end of the keys that any query sees: the rest of a cache is empty."""
    last = 0
    for i in range(span.shape[0]):
        last = max(last, span[i, 1])
    return last


def _widen_task(arguments, task, thread):
    span, floats, rows, unpack, n_blocks = arguments[0]
    for i in range(task * _ROWS, min(task * _ROWS + _ROWS, _last_seen(span))):
        call_block(unpack, floats[i].ctypes.data, rows[i].ctypes.data, n_blocks)


def _widening(span: np.ndarray, kind: DType, floats: np.ndarray, rows: np.ndarray) -> TaskStage:
    """The stage that widens keys up to the last that any query sees."""
    values = span, floats, rows, UNPACK[kind.name].address, floats.shape[1] // kind.block
    touches = whole(span), pieces(floats, _ROWS), pieces(rows, _ROWS, is_read=True)
    n_tasks = -(-len(rows) // _ROWS)
    return tuple_stage(code_for(_widen_task, values), values, n_tasks, touches=touches)


def _widen_seen(span: np.ndarray, copies: list[_Copy], call: Call) -> None:
    """The same without tasks, then the path."""
    n_seen = int(_last_seen(span))
    for kind, floats, rows in copies:
        UNPACK[kind.name](floats[:n_seen], rows[:n_seen], n_seen * (floats.shape[1] // kind.block))
    call()
