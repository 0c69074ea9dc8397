"""Order without data: a tensor computed after others, which it does not read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NO_SETTINGS, Memory, Sample, Spec, op
from pyggml.graph.tensor import Tensor


def after(x: Tensor, *done: Tensor) -> Tensor:
    """A view of x, computed after the tensors `done`, such as writes into a cache.

    ggml has no such op: there, ggml_build_forward_expand is called for what must be done.
    """
    return AFTER(x, *done)


def _after_spec(x: Tensor, *done: Tensor) -> Spec:
    return Spec(x.shape, x.dtype, x.strides)


def _after_ref(x: np.ndarray, *done: np.ndarray) -> np.ndarray:
    return x


def _after_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy"""
    return (dy, *(None for _ in node.src[1:]))


def _after_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shapes in [((1,),), ((3, 8), (2, 2)), ((2, 3, 5), (1,), (4, 2))]:
        yield Sample(tuple(rng.standard_normal(s) for s in shapes))


AFTER = op(
    name="after",
    ggml=GGMLOp.VIEW,
    spec=_after_spec,
    ref=_after_ref,
    grad=_after_grad,
    samples=_after_samples,
    refuses=NO_SETTINGS,
    memory=Memory.VIEW,
    strided=True,
)
