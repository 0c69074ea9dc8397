"""Sorting: the results are indices.

argsort    the indices that put a row in rising or falling order
top_k      the indices of its k largest numbers, the largest first

Equal numbers keep their order. argsort puts NaN last; top_k takes a NaN only from the first k
numbers. An order does not change smoothly, so gradients end here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import I32
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel
from pyggml.kernels.kernel import Site, cpu_kernel, rows
from pyggml.ops.expect import expect_type

_NO_GRADIENT = NoGrad("the order of numbers does not change smoothly")


def argsort(x: Tensor, descending: bool = False) -> Tensor:
    """Indices (..., n) I32 that put each row of x (..., n) F32 in order (ggml's ARGSORT)."""
    return ARGSORT(x, descending=descending)


def top_k(x: Tensor, k: int) -> Tensor:
    """Indices (..., k) I32 of the k largest numbers in each row of x (..., n) F32, largest first.

    ggml's TOP_K promises no order; its argsort_top_k does. Raises ShapeError unless 1 <= k <= n.
    """
    return TOP_K(x, k=k)


# -- argsort ------------------------------------------------------------------------------------


def _argsort_spec(x: Tensor, descending: bool) -> Spec:
    expect_type("argsort", "x", x)
    return Spec(x.shape, I32)


def _argsort(out: np.ndarray, x: np.ndarray, descending: bool) -> None:
    out[...] = np.argsort(-x if descending else x, axis=-1, kind="stable")


def _argsort_ref(x: np.ndarray, descending: bool) -> np.ndarray:
    """By Python's sort, which is stable too."""
    indices = range(x.shape[-1])
    rows = (-x if descending else x).reshape(-1, x.shape[-1])
    return np.array([sorted(indices, key=row.__getitem__) for row in rows]).reshape(x.shape)


def _argsort_run(site: Site) -> Call:
    return Call(_argsort, site.out, site.src[0], site.node.params["descending"])


def _argsort_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, descending in [((1, 1), False), ((3, 40), True), ((2, 3, 5), False)]:
        yield Sample((rng.standard_normal(shape),), {"descending": descending})
    yield Sample((np.array([[2.0, 1.0, 2.0, 1.0]]),), {"descending": True})


ARGSORT = op(
    name="argsort",
    ggml=GGMLOp.ARGSORT,
    spec=_argsort_spec,
    ref=_argsort_ref,
    grad=_NO_GRADIENT,
    samples=_argsort_samples,
    refuses={"descending": ()},
    memory=Memory.FRESH,
)
cpu_kernel(ARGSORT, _argsort_run)

# -- top_k --------------------------------------------------------------------------------------


def _top_k_spec(x: Tensor, k: int) -> Spec:
    expect_type("top_k", "x", x)
    n = x.shape[-1] if x.shape else 0
    if not 1 <= k <= n:
        raise ShapeError(f"top_k: k is {k}, wanted 1 to the {n} numbers of a row of {x!r}")
    return Spec((*x.shape[:-1], k), I32)


@kernel
def _top_k(out, x, k):
    """Insertion: each number moves before the smaller of the k largest so far."""
    for r in range(x.shape[0]):
        row, chosen = x[r], out[r]
        for j in range(row.size):
            at = min(j, k)
            while at > 0 and row[j] > row[chosen[at - 1]]:
                if at < k:
                    chosen[at] = chosen[at - 1]
                at -= 1
            if at < k:
                chosen[at] = j


def _top_k_ref(x: np.ndarray, k: int) -> np.ndarray:
    return _argsort_ref(x, True)[..., :k]


def _top_k_samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases = [((1, 1), 1), ((7, 40), 4), ((2, 3, 5), 5), ((6, 9), 1)]
    for shape, k in [*cases, ((5, 33), int(rng.integers(1, 34)))]:
        yield Sample((rng.standard_normal(shape),), {"k": k})
    yield Sample((np.array([[1.0, 2.0, 2.0, 2.0, 0.0]]),), {"k": 2})


TOP_K = op(
    name="top_k",
    ggml=GGMLOp.TOP_K,
    spec=_top_k_spec,
    ref=_top_k_ref,
    grad=_NO_GRADIENT,
    samples=_top_k_samples,
    refuses={"k": (0, -1, 999)},
    memory=Memory.FRESH,
)
cpu_kernel(TOP_K, rows(_top_k))
