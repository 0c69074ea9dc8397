"""The paths of attention, in order: the first that takes a problem serves it.

| forward     | problem                                        | keys read as       |
|-------------|------------------------------------------------|--------------------|
| by sequence | keys of several sequences                      | as its parts do    |
| decode      | few queries, no extras                         | what they are      |
| amx         | queries that fill a tile register, no extras,  | float32            |
|             | values as long as keys                         |                    |
| flash in    | queries that fill a tile, no extras, if        | float32            |
| pairs       | factors may be rounded                         |                    |
| flash       | queries that fill a tile, no extras            | float32            |
| plain       | no extras                                      | float32            |
| rows        | few queries                                    | what they are      |
| unfused     | any                                            | float32            |

A path that does not read a type has a second row, which makes keys and values float32 first. The
backward pass has amx, flash, plain and unfused. `amx` needs a CPU with tile registers and a compute
type that may round, `flash in pairs` a CPU that multiplies pairs of bfloat16. Without the JIT there
are neither decode, amx nor flash.

A faster path for some CPUs is one more row, above those that it replaces.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache

from pyggml.jit.isa import CHOSEN
from pyggml.kernels.attention import amx, decode, flash, plain, rows, unfused
from pyggml.kernels.attention.by_sequence import by_sequence
from pyggml.kernels.attention.path import (
    PROBLEMS,
    Arrays,
    AttentionPath,
    AttentionProblem,
    Backward,
    Forward,
)
from pyggml.kernels.attention.widen import after_widening


def _runnable(paths: Iterable[AttentionPath[Arrays]]) -> tuple[AttentionPath[Arrays], ...]:
    """The paths that this process can run."""
    return tuple(path for path in paths if CHOSEN.compiled or not path.compiled)


def _reading_all(*paths: AttentionPath[Forward]) -> Iterator[AttentionPath[Forward]]:
    """Each path as it is, then for keys and values of all other types."""
    return (form for path in paths for form in (path, after_widening(path)))


_ALONE: tuple[AttentionPath[Forward], ...] = _runnable(
    (
        decode.FORWARD,
        *(_reading_all(amx.FORWARD) if CHOSEN.tiles else ()),
        *_reading_all(flash.IN_PAIRS, flash.FORWARD, plain.FORWARD, rows.FORWARD, unfused.FORWARD),
    )
)
FORWARD = (by_sequence(_ALONE), *_ALONE)
BACKWARD: tuple[AttentionPath[Backward], ...] = _runnable(
    (
        *((amx.BACKWARD,) if CHOSEN.tiles else ()),
        flash.BACKWARD,
        plain.BACKWARD,
        unfused.BACKWARD,
    )
)


@lru_cache(PROBLEMS)
def forward_path(problem: AttentionProblem) -> AttentionPath[Forward]:
    """The path that serves this forward pass."""
    return next(path for path in FORWARD if path.takes(problem))


@lru_cache(PROBLEMS)
def backward_path(problem: AttentionProblem) -> AttentionPath[Backward]:
    """The path that serves this backward pass."""
    return next(path for path in BACKWARD if path.takes(problem))
