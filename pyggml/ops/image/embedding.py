"""Number ranges, and the sines and cosines of time steps (Ho et al. 2020).

arange               start, start + step, … below stop
timestep_embedding   cos(t·f_0) … cos(t·f_(h−1)), sin(t·f_0) …; f_j = max_period^(−j/h), h = dim/2
"""

from collections.abc import Iterator
from math import ceil, isfinite

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor, leaf
from pyggml.jit import kernel
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.arithmetic.arith import mul, neg
from pyggml.ops.arithmetic.reduce import sum_rows
from pyggml.ops.expect import INF, NAN, expect_axes, expect_type
from pyggml.ops.layout.layout import reshape
from pyggml.ops.layout.narrow import concat, narrow


def arange(start: float, stop: float, step: float = 1.0) -> Tensor:
    """(ceil((stop − start)/step),) F32: start, start + step, … (ggml's ARANGE).

    Raises ShapeError if the range is empty or infinite.
    """
    return ARANGE(start=float(start), stop=float(stop), step=float(step))


def timestep_embedding(t: Tensor, dim: int, max_period: int = 10000) -> Tensor:
    """(n, dim) F32 of times t (n,) F32; an odd dim ends in 0 (ggml's TIMESTEP_EMBEDDING).

    Raises ShapeError if dim or max_period is below 1.
    """
    return TIMESTEP_EMBEDDING(t, dim=dim, max_period=max_period)


# -- arange -------------------------------------------------------------------------------------


def _arange_spec(start: float, stop: float, step: float) -> Spec:
    length = (stop - start) / step if step else 0.0
    n = ceil(length) if isfinite(length) else 0
    if n < 1:
        raise ShapeError(f"arange: {start} to {stop} by {step} holds no number, or no end")
    return Spec((n,))


@kernel
def _arange(out, start, step):
    for i in range(out.size):
        out[i] = start + step * i


def _arange_run(site: Site) -> Call:
    p = site.node.params
    return Call(_arange, site.out, p["start"], p["step"])


def _arange_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for start, stop, step in [(0.0, 1.0, 1.0), (3.0, -2.0, -0.75), (-1.5, 40.0, 0.5)]:
        yield Sample((), {"start": start, "stop": stop, "step": step})


ARANGE = op(
    name="arange",
    ggml=GGMLOp.ARANGE,
    spec=_arange_spec,
    ref=lambda start, stop, step: start + step * np.arange(ceil((stop - start) / step)),
    grad=NoGrad("it has no sources to differentiate by"),
    samples=_arange_samples,
    refuses={"start": (NAN, INF), "stop": (NAN, INF), "step": (0.0, NAN, INF)},
)
cpu_kernel(ARANGE, _arange_run)

# -- timestep_embedding -------------------------------------------------------------------------


def _timestep_spec(t: Tensor, dim: int, max_period: int) -> Spec:
    expect_type("timestep_embedding", "t", t)
    expect_axes("timestep_embedding", "t", t, 1)
    if dim < 1 or max_period < 1:
        raise ShapeError(f"timestep_embedding: dim {dim}, max_period {max_period}, wanted 1 on")
    return Spec((t.shape[0], dim))


def _timestep_frequencies(dim: int, max_period: int) -> np.ndarray:
    half = dim // 2
    return np.asarray(float(max_period) ** (-np.arange(half) / max(half, 1)))


@kernel
def _timestep(out, t, frequencies):
    half = frequencies.size
    out[:] = 0
    for i in range(t.size):
        for j in range(half):
            angle = t[i] * frequencies[j]
            out[i, j] = np.cos(angle)
            out[i, half + j] = np.sin(angle)


def _timestep_run(site: Site) -> Call:
    return Call(_timestep, site.out, site.src[0], _timestep_frequencies(**site.node.params))


def _timestep_ref(t: np.ndarray, dim: int, max_period: int) -> np.ndarray:
    out = np.zeros((len(t), dim))
    for j in range(dim // 2):
        angle = t * np.exp(-np.log(max_period) * j / (dim // 2))
        out[:, j], out[:, j + dim // 2] = np.cos(angle), np.sin(angle)
    return out


def _timestep_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dt = Σ_i f_i · (dy_sin,i · cos(f_i·t) - dy_cos,i · sin(f_i·t))

    Sines and cosines are those of the result.
    """
    half = node.params["dim"] // 2
    if half == 0:
        return (mul(reshape(dy, node.src[0].shape), leaf(np.zeros(1, np.float32))),)
    cos, sin = narrow(node, 1, 0, half), narrow(node, 1, half, half)
    slopes = concat(neg(sin), cos, 1)
    f = np.tile(_timestep_frequencies(**node.params), 2).astype(np.float32)
    dt = sum_rows(mul(narrow(dy, 1, 0, 2 * half), mul(slopes, leaf(f))))
    return (reshape(dt, node.src[0].shape),)


def _timestep_samples(rng: np.random.Generator) -> Iterator[Sample]:
    drawn = (5, int(rng.integers(1, 20)), int(rng.integers(1, 1000)))
    for n, dim, max_period in [(1, 1, 10), (3, 8, 10000), (4, 7, 100), drawn]:
        params = {"dim": dim, "max_period": max_period}
        yield Sample((rng.uniform(0, 9, n),), params)


TIMESTEP_EMBEDDING = op(
    name="timestep_embedding",
    ggml=GGMLOp.TIMESTEP_EMBEDDING,
    spec=_timestep_spec,
    ref=_timestep_ref,
    grad=_timestep_grad,
    samples=_timestep_samples,
    refuses={"dim": (0, -1), "max_period": (0, -1)},
)
cpu_kernel(TIMESTEP_EMBEDDING, _timestep_run)
