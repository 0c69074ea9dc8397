"""Ops whose numbers are rounded where they are read, and so are written in bfloat16."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.op import NoGrad, Op, Sample, Spec
from pyggml.graph.tensor import Tensor
from pyggml.ops.layout.cpy import leaf_of

NO_GRAD = NoGrad("a device's own ops enter a graph that has its gradients")


@cache
def bf16_op(op: Op, reads: tuple[int, ...], writes: tuple[int, ...]) -> Op:
    """The op as a device has it where numbers are rounded: sources `reads` may be BF16 in place of
    F32, and of its result and those that it saves, `writes` are."""

    def in_f32(src: Sequence[Tensor]) -> list[Tensor]:
        is_half = [i in reads and s.dtype is BF16 for i, s in enumerate(src)]
        return [_f32_leaf_like(s) if half else s for s, half in zip(src, is_half, strict=True)]

    def spec(*src: Tensor, **params: Any) -> Spec:
        plain = op.spec(*in_f32(src), **params)
        return replace(plain, dtype=BF16) if 0 in writes else plain

    def saved(*src: Tensor, **params: Any) -> tuple[Spec, ...]:
        plain = op.saved(*in_f32(src), **params)
        return tuple(replace(s, dtype=BF16) if i in writes else s for i, s in enumerate(plain, 1))

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for sample in op.samples(rng):
            arrays = [leaf_of(a, "BF16") if i in reads else a for i, a in enumerate(sample.arrays)]
            yield replace(sample, arrays=tuple(arrays))

    return replace(op, spec=spec, saved=saved, samples=samples, grad=NO_GRAD, halves=False)


def _f32_leaf_like(t: Tensor) -> Tensor:
    """An F32 leaf that lies in memory as t does, so that a view of rows as columns stays one."""
    return Tensor(t.shape, F32, strides=tuple(2 * step for step in t.strides))
