"""Ops that are linear along each axis by itself: padding, rolling, resizing.

    y[a, b, …] = Σ w0[a, p]·w1[b, q]·… · x[i0[a, p], i1[b, q], …]  over p, q, …

pyggml/ops/image/sample_points.py says what an axis (i, w) is. The transpose uses the same pairs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import OPS, Op, Refused, Sample, Spec, op
from pyggml.graph.tensor import Shape, Tensor
from pyggml.jit import kernel
from pyggml.kernels.kernel import Site, as_four, cpu_kernel
from pyggml.ops.expect import expect, expect_axes, expect_type
from pyggml.ops.image.sample_points import AXES, Axes, Axis, axis_of_indices, shape_of


@kernel
def _add_row(out, x, index, weight, factor):
    for j in range(out.size):
        for s in range(index.shape[1]):
            if weight[j, s] != 0:
                out[j] += factor * weight[j, s] * x[index[j, s]]


@kernel
def _add_row_back(dx, dy, index, weight, factor):
    for j in range(dy.size):
        for s in range(index.shape[1]):
            if weight[j, s] != 0:
                dx[index[j, s]] += factor * weight[j, s] * dy[j]


@kernel
def _resample(out, x, i0, w0, i1, w1, i2, w2, i3, w3, transposed):
    """out = the resampled x. If transposed, out is the gradient of x, and x that of the result."""
    out[:] = 0
    taps = i0.shape[1] * i1.shape[1] * i2.shape[1]
    for a in range(i0.shape[0]):
        for b in range(i1.shape[0]):
            for c in range(i2.shape[0]):
                for tap in range(taps):
                    p, q = tap // i2.shape[1] // i1.shape[1], tap // i2.shape[1] % i1.shape[1]
                    r = tap % i2.shape[1]
                    factor = w0[a, p] * w1[b, q] * w2[c, r]
                    if factor != 0 and transposed:
                        to = out[i0[a, p], i1[b, q], i2[c, r]]
                        _add_row_back(to, x[a, b, c], i3, w3, factor)
                    elif factor != 0:
                        source = x[i0[a, p], i1[b, q], i2[c, r]]
                        _add_row(out[a, b, c], source, i3, w3, factor)


def _call(out: np.ndarray, x: np.ndarray, axes: list[Axis], transposed: bool) -> Call:
    whole = [axis_of_indices(np.zeros(1, np.int64))] * (4 - len(axes))
    tables = [array for axis in (*whole, *axes) for array in axis]
    return Call(_resample, as_four(out), as_four(x), *tables, transposed)


def _matrix(axis: Axis, n: int) -> np.ndarray:
    """The matrix (n_out, n) that an axis stands for."""
    index, weight = axis
    dense = np.zeros((len(index), n))
    np.add.at(dense, (np.arange(len(index))[:, None], index), weight)
    return dense


def resampling_op(
    name: str,
    ggml: GGMLOp,
    axes: Axes,
    ref: Callable[..., np.ndarray],
    samples: Callable[[np.random.Generator], Iterator[Sample]],
    refuses: Refused,
) -> Op:
    """Declare the F32 op with these axes, and its transpose name_back: each the other's gradient.

    name_back has the op's parameters and one more, `of`: the shape of the op's source.
    """
    rules = _ResampleRules(name, axes, samples)
    AXES[name] = axes
    forth = op(
        name=name,
        ggml=ggml,
        spec=rules.spec,
        ref=ref,
        grad=rules.grad,
        samples=samples,
        refuses=refuses,
    )
    cpu_kernel(forth, rules.run)
    back = op(
        name=f"{name}_back",
        spec=rules.back_spec,
        ref=rules.back_ref,
        grad=rules.back_grad,
        samples=rules.back_samples,
        refuses={"of": ((9999,),), **refuses},
    )
    cpu_kernel(back, rules.back_run)
    return forth


@dataclass(frozen=True, slots=True)
class _ResampleRules:
    """The rules of an op and its transpose."""

    name: str
    axes: Axes
    samples: Callable[[np.random.Generator], Iterator[Sample]]

    def _shape(self, of: Shape, **params: Any) -> Shape:
        return shape_of(self.axes(of, **params))

    def spec(self, x: Tensor, **params: Any) -> Spec:
        expect_type(self.name, "x", x)
        expect_axes(self.name, "x", x, 1, 2, 3, 4)
        if 0 in x.shape:
            raise ShapeError(f"{self.name}: x is {x!r}, wanted no empty axis")
        return Spec(self._shape(x.shape, **params))

    def run(self, site: Site) -> Call:
        (x,) = site.src
        return _call(site.out, x, self.axes(x.shape, **site.node.params), False)

    def grad(self, node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dx = Mᵀ·dy, where y = M·x"""
        return (OPS[f"{self.name}_back"](dy, of=node.src[0].shape, **node.params),)

    def back_spec(self, dy: Tensor, of: Shape, **params: Any) -> Spec:
        expect(f"{self.name}_back", "dy", dy, self._shape(of, **params))
        return Spec(of)

    def back_run(self, site: Site) -> Call:
        params = dict(site.node.params)
        return _call(site.out, site.src[0], self.axes(params.pop("of"), **params), True)

    def back_ref(self, dy: np.ndarray, of: Shape, **params: Any) -> np.ndarray:
        for i, axis in enumerate(self.axes(of, **params)):
            dy = np.moveaxis(np.tensordot(_matrix(axis, of[i]), dy, (0, i)), 0, i)
        return dy

    def back_grad(self, node: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
        """ddy = M·g"""
        params = dict(node.params)
        del params["of"]
        return (OPS[self.name](g, **params),)

    def back_samples(self, rng: np.random.Generator) -> Iterator[Sample]:
        for s in self.samples(rng):
            of = s.arrays[0].shape
            dy = rng.standard_normal(self._shape(of, **s.params))
            yield Sample((dy,), {"of": of, **s.params})
