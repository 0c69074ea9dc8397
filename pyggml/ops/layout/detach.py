"""detach: a tensor that counts as a constant, so that no gradient passes through it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NO_SETTINGS, Detached, Memory, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.ops.expect import expect_type


def detach(x: Tensor) -> Tensor:
    """x, F32, as a constant of the loss (no op of ggml; PyTorch's detach)."""
    return DETACH(x)


def _detach_spec(x: Tensor) -> Spec:
    expect_type("detach", "x", x)
    return Spec(x.shape)


def _detach_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 1), (3, 8), (2, 3, 5)]:
        yield Sample((rng.standard_normal(shape),))


DETACH = op(
    name="detach",
    ggml=GGMLOp.CUSTOM,
    spec=_detach_spec,
    ref=np.asarray,
    grad=Detached("its result counts as fixed, which is what it is for"),
    samples=_detach_samples,
    refuses=NO_SETTINGS,
    memory=Memory.VIEW,
)
