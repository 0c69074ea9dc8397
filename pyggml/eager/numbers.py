"""The numbers of a graph's tensors, computed one node at a time as values need them.

A small node is computed by its op's reference in float64 and rounded to float32, which compiles
nothing. A large one is computed by the backend's kernel, once that is compiled.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from weakref import WeakKeyDictionary

import numpy as np

from pyggml.backends.cpu import CPU
from pyggml.errors import NoGradientError
from pyggml.graph import Graph, arrays
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.op import SAVED
from pyggml.graph.tensor import Tensor, leaf
from pyggml.kernels.reference import result_of
from pyggml.look.check import in_float64
from pyggml.runtime import results, run

SMALL = 1 << 18  # numbers in a node and its sources: above, kernels are worth their compilation

_moments = count()


@dataclass(frozen=True, slots=True)
class _Known:
    """Numbers, and when they were computed."""

    numbers: np.ndarray
    moment: int


_known: WeakKeyDictionary[Tensor, _Known] = WeakKeyDictionary()
_written: WeakKeyDictionary[Tensor, int] = WeakKeyDictionary()  # a leaf → when it last changed


def numbers(t: Tensor) -> np.ndarray:
    """The numbers of a tensor, computed if they are not known: float32 or integers.

    Those of a leaf are a copy. Raises NoGradientError for a tensor that only a kernel can
    make, and PyggmlError for numbers that an op refuses.
    """
    for node in _unknown(t):
        _known[node] = _Known(_compute(node), next(_moments))
    return _numbers(t)


def gradients(graph: Graph) -> list[np.ndarray]:
    """The numbers of the gradients of `build_backward`'s graph.

    Rules that read what a forward kernel saved have no reference: such a graph is run by kernels.
    """
    if any(s.op is SAVED for node in graph.nodes for s in node.src):
        return results(graph)[1:]
    return [numbers(t) for t in graph.outputs_of("grad").values()]


def write(t: Tensor, values: np.ndarray) -> None:
    """Change the numbers of a leaf; what was computed from it is out of date from now on."""
    arrays.write(t, values)
    _written[t] = next(_moments)


def refuse_outdated(nodes: Iterable[Tensor]) -> None:
    """NoGradientError if a leaf was changed after one of the nodes was computed from it."""
    for node in nodes:
        for s in node.src:
            if node in _known and _written.get(s, -1) > _known[node].moment:
                raise NoGradientError(
                    f"{s.name or repr(s)} was changed after {node.name or repr(node)} was computed "
                    "from it: compute the loss anew"
                )


def _unknown(t: Tensor) -> Iterator[Tensor]:
    """The nodes to compute for t, each after its sources."""
    stack = [t]
    while stack:
        node = stack[-1]
        if node.op is None or node in _known:
            stack.pop()
        elif missing := [s for s in node.src if s.op is not None and s not in _known]:
            stack += missing
        else:
            yield node
            stack.pop()


def _numbers(t: Tensor) -> np.ndarray:
    if t in _known:
        return _known[t].numbers
    if t.dtype in (F32, I32):
        return arrays.read(t)
    return _round(in_float64(t))


def _compute(node: Tensor) -> np.ndarray:
    assert node.op is not None
    if node.op is SAVED:
        raise NoGradientError(f"{node!r} is written by a kernel, not by a reference")
    sources = [_numbers(s) for s in node.src]
    n_numbers = node.n_elements + sum(s.size for s in sources)
    if n_numbers > SMALL and CPU().refusal(node) is None:
        leaves = (_as_leaf(s, a) for s, a in zip(node.src, sources, strict=True))
        (computed,) = run(node.op(*leaves, **node.params))
        return _round(computed)
    exact = (a.astype(np.float64) if a.dtype.kind == "f" else a for a in sources)
    return _round(result_of(node, exact))


def _as_leaf(t: Tensor, value: np.ndarray) -> Tensor:
    """A source of a node, as a leaf of the same type."""
    return t if t.op is None else leaf(np.ascontiguousarray(value.astype(t.dtype.numpy)))


def _round(a: np.ndarray) -> np.ndarray:
    return np.asarray(a, np.float32) if a.dtype.kind == "f" else np.asarray(a)
