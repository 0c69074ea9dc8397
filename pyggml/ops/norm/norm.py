"""Normalisation of each row (the last axis), or of groups of channels (arXiv:1803.08494).

F16 and BF16 are computed as F32, and the result is of x's type (Op.halves). A back op takes F32,
its forward op's sources, then dy. An eps below 0 is refused. With eps = 0, a row of
zeros gives NaN; with norm, any constant row does.

rms_norm        y  = x·r,  r = 1/sqrt(mean(x²) + eps)
rms_norm_back   dx = r·(dy − x·r²·mean(x·dy))
norm            y  = (x − mean(x))·r,  r = 1/sqrt(var(x) + eps), var over n, not n − 1
norm_back       dx = r·(dy − mean(dy) − y·mean(y·dy))
l2_norm         y  = x / max(‖x‖, eps)
l2_norm_back    dx = (dy − y·Σ y·dy) / ‖x‖ where ‖x‖ > eps, else dy / eps
group_norm      norm of each group of channels; group_norm_back is as norm_back
"""

from collections.abc import Callable, Iterator

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call, one_by_one
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel, parallel, prange
from pyggml.jit.simd import dot
from pyggml.kernels.kernel import Site, cpu_kernel, rows
from pyggml.ops.expect import NONE_FROM_ZERO, expect, expect_axes, expect_number, expect_type

_SECOND_ORDER = NoGrad("second derivatives are out of scope")
_ONE = np.float32(1)


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Each row of x (..., n) F32 divided by its root mean square (ggml's RMS_NORM)."""
    return RMS_NORM(x, eps=float(eps))


def rms_norm_back(x: Tensor, dy: Tensor, eps: float = 1e-6) -> Tensor:
    """d(loss)/dx of rms_norm, given dy = d(loss)/dy; all of one shape."""
    return RMS_NORM_BACK(x, dy, eps=float(eps))


def norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    """Each row of x (..., n) F32 less its mean, over its deviation (ggml's NORM, LayerNorm)."""
    return NORM(x, eps=float(eps))


def norm_back(x: Tensor, dy: Tensor, eps: float = 1e-5) -> Tensor:
    """d(loss)/dx of norm, given dy = d(loss)/dy; all of one shape."""
    return NORM_BACK(x, dy, eps=float(eps))


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Each row of x (..., n) F32 divided by its length, or by eps if that is more (L2_NORM)."""
    return L2_NORM(x, eps=float(eps))


def l2_norm_back(x: Tensor, dy: Tensor, eps: float = 1e-6) -> Tensor:
    """d(loss)/dx of l2_norm, given dy = d(loss)/dy; all of one shape."""
    return L2_NORM_BACK(x, dy, eps=float(eps))


def _one(name: str) -> Callable[..., Spec]:
    def spec(x: Tensor, eps: float) -> Spec:
        expect_type(name, "x", x)
        expect_number(name, "eps", eps)
        return Spec(x.shape)

    return spec


def _two(name: str) -> Callable[..., Spec]:
    def spec(x: Tensor, dy: Tensor, eps: float) -> Spec:
        expect_type(name, "x", x)
        expect(name, "dy", dy, x.shape)
        expect_number(name, "eps", eps)
        return Spec(x.shape)

    return spec


def _one_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 3), (3, 8), (2, 5, 33)]:
        yield Sample((rng.standard_normal(shape),), {"eps": 1e-5})


def _two_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _one_samples(rng):
        yield Sample((*s.arrays, rng.standard_normal(s.arrays[0].shape)), s.params)


def _mean(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.mean(x, axis=-1, keepdims=True))


@kernel
def _scale(out, x, factor):
    for j in range(x.size):
        out[j] = x[j] * factor


@kernel
def _combine(out, a, x, b, y):
    for j in range(x.size):
        out[j] = a * x[j] + b * y[j]


# -- rms_norm -----------------------------------------------------------------------------------


@parallel
def _rms_norm(out, x, eps):
    n = np.float32(x.shape[1])
    for i in prange(x.shape[0]):
        _scale(out[i], x[i], _ONE / np.sqrt(dot(x[i], x[i]) / n + eps))


def _rms_norm_ref(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(_mean(x * x) + eps)


def _rms_norm_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = r · (dy - y · mean(dy · y)), r = 1 / √(mean x² + eps)"""
    return (RMS_NORM_BACK(node.src[0], dy, **node.params),)


RMS_NORM = op(
    name="rms_norm",
    ggml=GGMLOp.RMS_NORM,
    spec=_one("rms_norm"),
    ref=_rms_norm_ref,
    grad=_rms_norm_grad,
    samples=_one_samples,
    refuses={"eps": NONE_FROM_ZERO},
    memory=Memory.INPLACE,
    halves=True,
)
cpu_kernel(RMS_NORM, rows(_rms_norm))


@parallel
def _rms_norm_back(dx, x, dy, eps):
    n = np.float32(x.shape[1])
    for i in prange(x.shape[0]):
        r = _ONE / np.sqrt(dot(x[i], x[i]) / n + eps)
        _combine(dx[i], r, dy[i], -r * r * r * dot(x[i], dy[i]) / n, x[i])


def _rms_norm_back_ref(x: np.ndarray, dy: np.ndarray, eps: float) -> np.ndarray:
    r = 1 / np.sqrt(_mean(x * x) + eps)
    return np.asarray(r * (dy - x * r * r * _mean(x * dy)))


RMS_NORM_BACK = op(
    name="rms_norm_back",
    ggml=GGMLOp.RMS_NORM_BACK,
    spec=_two("rms_norm_back"),
    ref=_rms_norm_back_ref,
    grad=_SECOND_ORDER,
    samples=_two_samples,
    refuses={"eps": NONE_FROM_ZERO},
    memory=Memory.FRESH,
)
cpu_kernel(RMS_NORM_BACK, rows(_rms_norm_back))

# -- norm ---------------------------------------------------------------------------------------


@kernel
def _mean_and_rate(x, eps):
    """(mean, 1/sqrt(var + eps)) of a row; var is the mean of (x − mean)²."""
    n = np.float32(x.size)
    total = np.float32(0)
    for j in range(x.size):
        total += x[j]
    mean = total / n
    squares = np.float32(0)
    for j in range(x.size):
        squares += (x[j] - mean) * (x[j] - mean)
    return mean, _ONE / np.sqrt(squares / n + eps)


@kernel
def _centre(out, x, mean, r):
    for j in range(x.size):
        out[j] = (x[j] - mean) * r


@parallel
def norm_rows(out, x, eps):
    for i in prange(x.shape[0]):
        mean, r = _mean_and_rate(x[i], eps)
        _centre(out[i], x[i], mean, r)


def _norm_ref(x: np.ndarray, eps: float) -> np.ndarray:
    centred = x - _mean(x)
    return np.asarray(centred / np.sqrt(_mean(centred * centred) + eps))


def _norm_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = r · (dy - mean dy - y · mean(dy · y)), r = 1 / √(variance + eps)"""
    return (NORM_BACK(node.src[0], dy, **node.params),)


NORM = op(
    name="norm",
    ggml=GGMLOp.NORM,
    spec=_one("norm"),
    ref=_norm_ref,
    grad=_norm_grad,
    samples=_one_samples,
    refuses={"eps": NONE_FROM_ZERO},
    memory=Memory.INPLACE,
    halves=True,
)
cpu_kernel(NORM, rows(norm_rows))


@kernel
def _norm_back_row(dx, x, dy, mean, r):
    n = np.float32(x.size)
    total = np.float32(0)
    along = np.float32(0)
    for j in range(x.size):
        total += dy[j]
        along += dy[j] * (x[j] - mean)
    for j in range(x.size):
        dx[j] = r * (dy[j] - total / n - (x[j] - mean) * r * r * along / n)


@parallel
def norm_back_rows(dx, x, dy, eps):
    for i in prange(x.shape[0]):
        mean, r = _mean_and_rate(x[i], eps)
        _norm_back_row(dx[i], x[i], dy[i], mean, r)


def _norm_back_ref(x: np.ndarray, dy: np.ndarray, eps: float) -> np.ndarray:
    centred = x - _mean(x)
    r = 1 / np.sqrt(_mean(centred * centred) + eps)
    y = centred * r
    return np.asarray(r * (dy - _mean(dy) - y * _mean(y * dy)))


NORM_BACK = op(
    name="norm_back",
    ggml=GGMLOp.CUSTOM,
    spec=_two("norm_back"),
    ref=_norm_back_ref,
    grad=_SECOND_ORDER,
    samples=_two_samples,
    refuses={"eps": NONE_FROM_ZERO},
    memory=Memory.FRESH,
)
cpu_kernel(NORM_BACK, rows(norm_back_rows))

# -- l2_norm ------------------------------------------------------------------------------------


@kernel
def _l2_norm(out, x, eps):
    for i in range(x.shape[0]):
        _scale(out[i], x[i], _ONE / max(np.sqrt(dot(x[i], x[i])), eps))


def _l2_norm_ref(x: np.ndarray, eps: float) -> np.ndarray:
    return np.asarray(x / np.maximum(np.sqrt(np.sum(x * x, axis=-1, keepdims=True)), eps))


def _l2_norm_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = (dy - y · Σ dy · y) / |x|, and dy / eps where |x| < eps"""
    return (L2_NORM_BACK(node.src[0], dy, **node.params),)


def _l2_norm_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _one_samples(rng)
    yield Sample((rng.standard_normal((3, 8)),), {"eps": 100.0})  # every row is shorter than eps


L2_NORM = op(
    name="l2_norm",
    ggml=GGMLOp.L2_NORM,
    spec=_one("l2_norm"),
    ref=_l2_norm_ref,
    grad=_l2_norm_grad,
    samples=_l2_norm_samples,
    refuses={"eps": NONE_FROM_ZERO},
    memory=Memory.INPLACE,
    halves=True,
)
cpu_kernel(L2_NORM, rows(_l2_norm))


@kernel
def _l2_norm_back(dx, x, dy, eps):
    for i in range(x.shape[0]):
        length = np.sqrt(dot(x[i], x[i]))
        if length > eps:
            along = dot(x[i], dy[i]) / (length * length)
            _combine(dx[i], _ONE / length, dy[i], -along / length, x[i])
        else:
            _scale(dx[i], dy[i], _ONE / eps)


def _l2_norm_back_ref(x: np.ndarray, dy: np.ndarray, eps: float) -> np.ndarray:
    length = np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
    y = x / length
    long = (dy - y * np.sum(y * dy, axis=-1, keepdims=True)) / length
    return np.where(length > eps, long, dy / eps)


def _l2_norm_back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _l2_norm_samples(rng):
        yield Sample((*s.arrays, rng.standard_normal(s.arrays[0].shape)), s.params)


L2_NORM_BACK = op(
    name="l2_norm_back",
    ggml=GGMLOp.CUSTOM,
    spec=_two("l2_norm_back"),
    ref=_l2_norm_back_ref,
    grad=_SECOND_ORDER,
    samples=_l2_norm_back_samples,
    refuses={"eps": NONE_FROM_ZERO},
    memory=Memory.FRESH,
)
cpu_kernel(L2_NORM_BACK, rows(_l2_norm_back))

# -- group_norm -----------------------------------------------------------------------------------


def group_norm(x: Tensor, n_groups: int, eps: float = 1e-6) -> Tensor:
    """x ([n_batch,] n_channels, height, width) F32, normalised in n_groups runs of channels.

    ggml's GROUP_NORM: the last group is smaller where n_groups does not divide the channels. Raises
    ShapeError if a group would be empty; ggml divides by its 0 channels.
    """
    return GROUP_NORM(x, n_groups=n_groups, eps=float(eps))


def group_norm_back(x: Tensor, dy: Tensor, n_groups: int, eps: float = 1e-6) -> Tensor:
    """d(loss)/dx of group_norm, given dy = d(loss)/dy; all of one shape."""
    return GROUP_NORM_BACK(x, dy, n_groups=n_groups, eps=float(eps))


def _spec(x: Tensor, *dy: Tensor, n_groups: int, eps: float) -> Spec:
    expect_type("group_norm", "x", x)
    expect_axes("group_norm", "x", x, 3, 4)
    for t in dy:
        expect("group_norm_back", "dy", t, x.shape)
    expect_number("group_norm", "eps", eps)
    n = x.shape[-3]
    if n_groups < 1 or (n and (n_groups - 1) * -(-n // n_groups) >= n):
        raise ShapeError(
            f"group_norm: {n_groups} groups of the channels of {x!r}, wanted none empty"
        )
    return Spec(x.shape)


def _in_groups(a: np.ndarray, n_groups: int) -> Iterator[np.ndarray]:
    """One row per group, in one array if all are as large, else in two for each batch."""
    if a.shape[-3] % n_groups == 0:
        yield a.reshape((a.shape[0] if a.ndim == 4 else 1) * n_groups, -1)
        return
    last = (n_groups - 1) * -(-a.shape[-3] // n_groups)
    for batch in a if a.ndim == 4 else a[None]:
        yield batch[:last].reshape(n_groups - 1, -1)
        yield batch[last:].reshape(1, -1)


def _run(code: Callable[..., None]) -> Callable[[Site], Call]:
    def run(site: Site) -> Call:
        p = site.node.params
        parts = zip(*(_in_groups(a, p["n_groups"]) for a in (site.out, *site.src)), strict=True)
        first, *others = (Call(code, *arrays, np.float32(p["eps"])) for arrays in parts)
        return Call(one_by_one, [first, *others]) if others else first

    return run


def _by_group(of_rows: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def ref(*arrays: np.ndarray, n_groups: int, eps: float) -> np.ndarray:
        """Each group as one row, batch by batch."""
        y, n_channels = np.empty(arrays[0].shape), arrays[0].shape[-3]
        each = -(-n_channels // n_groups)
        for start in range(0, n_channels, each):
            group = (..., slice(start, start + each), slice(None), slice(None))
            shape = y[group].shape
            rows = (a[group].reshape(*shape[:-3], -1) for a in arrays)
            y[group] = of_rows(*rows, eps).reshape(shape)
        return y

    return ref


def _grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = r · (dy - mean dy - y · mean(dy · y)) in each group, r = 1 / √(variance + eps)"""
    return (GROUP_NORM_BACK(node.src[0], dy, **node.params),)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    groups, each = rng.integers(1, 5, 2).tolist()
    cases = [((4, 2, 3), 2), ((6, 3, 5), 3), ((2, 4, 3, 2), 1), ((3, 5, 2, 7), 5)]
    cases += [((5, 2, 3), 3), ((2, 7, 2, 2), 2)]
    for shape, n_groups in [*cases, ((2, groups * each, 3, 3), groups)]:
        yield Sample((rng.standard_normal(shape),), {"n_groups": n_groups, "eps": 1e-5})


def _back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in _samples(rng):
        yield Sample((*s.arrays, rng.standard_normal(s.arrays[0].shape)), s.params)


GROUP_NORM = op(
    name="group_norm",
    ggml=GGMLOp.GROUP_NORM,
    spec=_spec,
    ref=_by_group(NORM.ref),
    grad=_grad,
    samples=_samples,
    refuses={"n_groups": (0, -1, 999), "eps": NONE_FROM_ZERO},
    memory=Memory.INPLACE,
    halves=True,
)
cpu_kernel(GROUP_NORM, _run(norm_rows))
GROUP_NORM_BACK = op(
    name="group_norm_back",
    ggml=GGMLOp.CUSTOM,
    spec=_spec,
    ref=_by_group(NORM_BACK.ref),
    grad=NoGrad("second derivatives are out of scope"),
    samples=_back_samples,
    refuses={"n_groups": (0, -1, 999), "eps": NONE_FROM_ZERO},
    memory=Memory.FRESH,
)
cpu_kernel(GROUP_NORM_BACK, _run(norm_back_rows))
