"""Padding, rolling, resizing and mean pools: see pyggml/ops/image/resample.py."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.axes import sizes, steps_of
from pyggml.backends.cuda.code.formulas import ONE, ZERO
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Kernel, Site
from pyggml.backends.cuda.runtime.launches import per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.tensor import MAX_AXES, Shape
from pyggml.ops.image.sample_points import AXES, Axis, axis_of_indices, transposed_axis


@kernel
def _resample(out, x, index, weight, firsts, taps, shape, steps):
    """out_i = Σ x · its four weights, over all combinations of taps.

    The tables of the four axes lie one after the other, from `firsts` on, with so many `taps`.
    """
    n_taps = taps[0] * taps[1] * taps[2] * taps[3]
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        total = ZERO
        for tap in range(n_taps):
            factor, at, rest_of_i, rest_of_tap = ONE, 0, i, tap
            for j in range(4):
                axis = 3 - j
                k = firsts[axis] + rest_of_i % shape[axis] * taps[axis] + rest_of_tap % taps[axis]
                factor *= weight[k]
                at += index[k] * steps[axis]
                rest_of_i //= shape[axis]
                rest_of_tap //= taps[axis]
            if factor != ZERO:
                total += factor * x[at]
        out[i] = total


def _bind(site: Site, axes: list[Axis], source: Shape) -> Call:
    axes = [axis_of_indices(np.zeros(1, np.int64))] * (MAX_AXES - len(axes)) + axes
    indices, weights = (
        [table.reshape(-1) for table in tables] for tables in zip(*axes, strict=True)
    )
    taps = tuple(np.int64(index.shape[1]) for index, _ in axes)
    firsts = tuple(np.cumsum([0, *(len(i) for i in indices[:-1])]))
    tables = site.constant(np.concatenate(indices)), site.constant(np.concatenate(weights))
    x_steps = steps_of(tuple(prod(source[i + 1 :]) for i in range(len(source))))
    rest = *tables, firsts, taps, sizes(site.node.shape), x_steps
    return per_element(_resample, site.out.size, site.stream, site.out, *site.src, *rest)


def _forward(name: str) -> Callable[[Site], Call]:
    def bind(site: Site) -> Call:
        (x,) = site.node.src
        return _bind(site, AXES[name](x.shape, **site.node.params), x.shape)

    return bind


def _backward(name: str) -> Callable[[Site], Call]:
    def bind(site: Site) -> Call:
        params: dict[str, Any] = dict(site.node.params)
        of = params.pop("of")
        axes = zip(AXES[name](of, **params), of, strict=True)
        return _bind(site, [transposed_axis(axis, n) for axis, n in axes], site.node.src[0].shape)

    return bind


for _name in ("pad", "pad_reflect_1d", "roll", "upscale", "pool_avg"):
    declare(_name, Kernel(_forward(_name)))
    declare(f"{_name}_back", Kernel(_backward(_name)))
