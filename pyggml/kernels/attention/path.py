"""AttentionProblem: what attention is asked for. AttentionPath: a row of the table of paths.

Sizes: T queries of H heads, S keys of HK heads, D numbers to a head of queries and keys, DV to one
of values and results. Query head h uses key head h // (H / HK).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32, DType
from pyggml.jit.scratch import Layout, Scratch
from pyggml.jit.tasks import TaskStage
from pyggml.kernels.kernel import Compute


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """All that decides which path serves. It is known before there is memory."""

    n_queries: int  # T
    n_heads: int  # H
    n_keys: int  # S
    n_key_heads: int  # HK
    head_size: int  # D
    value_size: int  # DV
    key_type: DType
    value_type: DType
    has_extras: bool  # a cap, a mask, sinks or ALiBi
    compute: Compute
    may_round: bool = False  # whether rounding compute types may round factors
    longest: int = 0  # keys from the first to the last that queries of one sequence see; 0: all

    @property
    def n_seen(self) -> int:
        """The most keys that one query can see."""
        return self.longest or self.n_keys

    @property
    def reads_floats(self) -> bool:
        """Whether keys and values are float32."""
        return self.key_type is self.value_type is F32

    @property
    def repeats(self) -> int:
        """Query heads to a key head."""
        return self.n_heads // self.n_key_heads


@dataclass(frozen=True, slots=True)
class Forward:
    """The arrays of a forward pass. An absent extra has a neutral value."""

    q: np.ndarray  # (T, H, D) float32
    k: np.ndarray  # (S, HK, D) float32 or float16, the bits of BF16, or the bytes of blocks
    v: np.ndarray  # (S, HK, DV) likewise
    span: np.ndarray  # (T, 2) int32: the first key that a query sees, and the one past the last
    scale: np.float32
    cap: np.float32  # 0 for none
    mask: np.ndarray  # (n, T, S), n dividing H; (1, 1, 0) for none
    sinks: np.ndarray  # (H,); −inf for none
    slopes: np.ndarray  # (H,); 0 for none
    o: np.ndarray  # (T, H, DV): the result
    lse: np.ndarray  # (H, T): log Σ e^score; NO_KEYS for a query that sees no key


@dataclass(frozen=True, slots=True)
class Backward(Forward):
    """The arrays of a backward pass: given o and lse, it computes dq, dk, dv and dsinks."""

    do: np.ndarray  # (T, H, DV)
    dq: np.ndarray  # (T, H, D)
    dk: np.ndarray  # (S, HK, D)
    dv: np.ndarray  # (S, HK, DV)
    dsinks: np.ndarray  # (H,), or (0,) without sinks


class SomeQueries(NamedTuple):
    """Queries that an earlier stage of the launch chooses.

    numbers  (m,) int32: the first of them are the queries
    counts   (4,) int64: how many these are, and what the path keeps there
    """

    numbers: np.ndarray
    counts: np.ndarray


PROBLEMS = 1024  # whose paths and layouts are remembered
Arrays = TypeVar("Arrays", bound=Forward)


@dataclass(frozen=True, slots=True)
class AttentionPath(Generic[Arrays]):
    """One way to compute attention; see pyggml.kernels.attention.table.

    compiled  whether it needs the JIT
    takes     (problem) -> whether it can, and should, compute this
    layout    (problem) -> its scratch: every array that one call needs besides its arguments
    bind      (problem, arrays, scratch by name) -> the call; the arrays stay where they are
    of_some   the same, and queries -> the stages for these alone, whose scratch is that of a
              problem of so many; None: the path has none
    """

    name: str
    compiled: bool
    takes: Callable[[AttentionProblem], bool]
    layout: Callable[[AttentionProblem], Layout]
    bind: Callable[[AttentionProblem, Arrays, Scratch], Call]
    of_some: Callable[..., Sequence[TaskStage]] | None = None

    def n_bytes(self, problem: AttentionProblem) -> int:
        """Scratch of one call."""
        return layout_of(self, problem).n_bytes

    def call(self, problem: AttentionProblem, arrays: Arrays, memory: np.ndarray) -> Call:
        """Bind to uint8 `memory` of n_bytes or more, 64-byte aligned."""
        return self.bind(problem, arrays, layout_of(self, problem).cut(memory))


@lru_cache(PROBLEMS)
def layout_of(path: AttentionPath[Arrays], problem: AttentionProblem) -> Layout:
    """The scratch of a problem on a path. Layers ask for the same ones again and again."""
    return path.layout(problem)


def no_scratch(problem: AttentionProblem) -> Layout:
    """For paths that need none."""
    return Layout()
