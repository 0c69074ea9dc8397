"""gradcheck: an op's or a function's gradient against finite differences, with a verdict.

    print(gradcheck(lambda a, b: (a @ b).tanh(), a, b))

    the gradient is right: worst error 2.3e-10, wanted at most 1e-05
      a  (3, 4)   Jacobian 6 x 12   error 2.3e-10
      b  (4, 2)   Jacobian 6 x 8    error 1.1e-10

Numeric derivatives are (f(x + h) - f(x - h)) / 2h of the float64 references. A small Jacobian is
compared element by element; of a large one, u·J·v along random directions u and v.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml.eager.value import Value, apply, tensor
from pyggml.errors import ConfigError
from pyggml.graph.op import Op
from pyggml.graph.tensor import Tensor
from pyggml.look.check import CheckedOutput, in_float64

EXACT, ROUNDED = 1e-5, 1e-3  # tolerances for references in float64, and for kernels in float32
MOST_EVALUATIONS = 2000  # of the graph, for a whole Jacobian
N_DIRECTIONS = 8
_SEARCHED = 256  # elements among which the worst is sought

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Worst:
    """Where a derivative is furthest from the numeric one.

    d(output[of]) / d(input[by]); `of` is None where the output is weighted by random numbers and
    summed. kink: the slopes to the left and to the right, where they differ.
    """

    of: Index | None
    by: Index
    analytic: float
    numeric: float
    kink: tuple[float, float] | None = None

    def __str__(self) -> str:
        of = "the weighted sum" if self.of is None else f"the output at {list(self.of)}"
        text = (
            f"d({of}) / d(input at {list(self.by)}) is {self.analytic:.6g} by the rule, "
            f"{self.numeric:.6g} by differences"
        )
        if self.kink:
            left, right = self.kink
            text += f"; the slopes left and right of it are {left:.6g} and {right:.6g}, a kink"
        return text


@dataclass(frozen=True, slots=True)
class InputCheck:
    """The comparison for one input. error: in units of the largest derivative."""

    name: str
    shape: Index
    method: str
    error: float
    worst: Worst | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What gradcheck found; true if every gradient is right."""

    inputs: tuple[InputCheck, ...]
    tolerance: float

    def __bool__(self) -> bool:
        return all(c.error <= self.tolerance for c in self.inputs)

    def __str__(self) -> str:
        most = max(c.error for c in self.inputs)
        word = "right" if self else "wrong"
        lines = [
            f"the gradient is {word}: worst error {most:.1e}, wanted at most {self.tolerance:.0e}"
        ]
        width = max(len(c.name) for c in self.inputs)
        for c in self.inputs:
            mark = "" if c.error <= self.tolerance else "   <- wrong"
            lines.append(f"  {c.name:<{width}}  {c.shape}   {c.method}   error {c.error:.1e}{mark}")
            if mark and c.worst:
                lines.append(f"    {c.worst}")
        return "\n".join(lines)


def gradcheck(
    what: Callable[..., Any] | Op | Value,
    *inputs: Any,
    tolerance: float | None = None,
    kernels: bool = False,
    seed: int = 0,
    **settings: Any,
) -> Verdict:
    """Compare the gradient of a function, an op or a value with finite differences.

    what       a function of Values; one of `pyggml.ops` or another of Tensors, which says so by its
               annotation `-> Tensor`; an op of the registry; or a Value, which is differentiated by
               its leaves with requires_grad
    inputs     Values, arrays or lists; gradients are checked for those of floats
    settings   keywords of the function or the op: gradcheck(ops.rms_norm, x, eps=1e-6)
    kernels    take the gradient from the compiled kernels, in float32, instead of the references
    tolerance  the most that a derivative may be off, in units of the largest; 1e-5, or 1e-3 for
               kernels and for rules that read what kernels leave

    Raises ConfigError if there is no float input, and NoGradientError as `backward` does.
    """
    out, leaves = _graph_of(what, inputs, settings)
    output = CheckedOutput.of(out, leaves, kernels)
    rng = np.random.default_rng(seed)
    limit = tolerance or (ROUNDED if output.kernels else EXACT)
    return Verdict(tuple(_check(output, i, rng, limit) for i in range(len(leaves))), limit)


def _graph_of(
    what: Any, inputs: Sequence[Any], settings: Mapping[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """The output, and the leaves to differentiate by."""
    if isinstance(what, Value):
        if inputs or settings:
            raise ConfigError("gradcheck: a Value takes no inputs or settings, as it is computed")
        nodes = [v.node for v in what.sources() if v.node.op is None]
        return what.node, nodes
    values = [v if isinstance(v, Value) else tensor(v) for v in inputs]
    floats = [i for i, v in enumerate(values) if v.dtype.kind == "f"]
    if not floats:
        raise ConfigError("gradcheck: no input of floats, wanted one at least")
    for i in floats:  # a fresh leaf each: an input may be given twice, or be computed
        values[i] = tensor(values[i], requires_grad=True, name=values[i].name or f"input {i}")
    of_tensors = isinstance(what, Op) or _gives_a_tensor(what)
    out = apply(what, *values, **settings) if of_tensors else what(*values, **settings)
    if not isinstance(out, Value):
        raise ConfigError(f"gradcheck: the function gave {type(out).__name__}, wanted a Value")
    return out.node, [values[i].node for i in floats]


def _gives_a_tensor(function: Callable[..., Any]) -> bool:
    """Whether a function builds a node of Tensors, by its annotation, which may be a word."""
    return getattr(function, "__annotations__", {}).get("return") in (Tensor, Tensor.__name__)


def _check(f: CheckedOutput, i: int, rng: np.random.Generator, tolerance: float) -> InputCheck:
    t, m = f.leaves[i], f.out.n_elements
    n = t.n_elements
    if m + 2 * n <= MOST_EVALUATIONS:
        method = f"Jacobian {m} x {n}"
        error, worst = _by_jacobian(f, i)
    else:
        method = f"{N_DIRECTIONS} directions"
        error, worst = _by_directions(f, i, rng, tolerance)
    return InputCheck(t.name or f"input {i}", t.shape, method, error, worst)


def _by_jacobian(f: CheckedOutput, i: int) -> tuple[float, Worst | None]:
    t, m = f.leaves[i], f.out.n_elements
    x = in_float64(t)
    if not m or not t.n_elements:
        return 0.0, None
    numeric = np.array([f.slope(i, x, v).reshape(-1) for v in _units(t.shape)]).T
    analytic = np.array([f.gradient(i, u).reshape(-1) for u in _units(f.out.shape)])
    error = np.nan_to_num(np.abs(analytic - numeric), nan=np.inf)
    a, b = np.unravel_index(int(error.argmax()), error.shape)
    of = tuple(map(int, np.unravel_index(int(a), f.out.shape)))
    by = tuple(map(int, np.unravel_index(int(b), t.shape)))
    left, right = (s[of] for s in f.slopes(i, x, _unit(t.shape, by)))
    worst = _worst(of, by, analytic[a, b], numeric[a, b], left, right)
    return float(error[a, b] / _scale(f, i, x, analytic, numeric)), worst


def _by_directions(
    f: CheckedOutput, i: int, rng: np.random.Generator, tolerance: float
) -> tuple[float, Worst | None]:
    t = f.leaves[i]
    x, most, at = in_float64(t), 0.0, None
    for _ in range(N_DIRECTIONS):
        u, v = rng.standard_normal(f.out.shape), rng.standard_normal(t.shape)
        g = f.gradient(i, u)
        slope, expected = float(np.sum(g * v)), float(np.sum(u * f.slope(i, x, v)))
        error = abs(slope - expected) / (float(np.linalg.norm(g)) or 1.0)
        if not error <= most:
            most, at = error, (u, g)
    return most, _worst_of_some(f, i, x, *at, rng) if at and not most <= tolerance else None


def _worst_of_some(
    f: CheckedOutput, i: int, x: np.ndarray, u: np.ndarray, g: np.ndarray, rng: np.random.Generator
) -> Worst:
    """The worst of some elements of the input."""
    chosen = rng.permutation(x.size)[:_SEARCHED]
    places = [tuple(map(int, np.unravel_index(int(k), x.shape))) for k in chosen]
    numeric = [float(np.sum(u * f.slope(i, x, _unit(x.shape, p)))) for p in places]
    k = int(np.argmax([abs(g[p] - d) for p, d in zip(places, numeric, strict=True)]))
    by = places[k]
    left, right = (float(np.sum(u * s)) for s in f.slopes(i, x, _unit(x.shape, by)))
    return _worst(None, by, g[by], numeric[k], left, right)


def _worst(
    of: Index | None, by: Index, analytic: float, numeric: float, left: float, right: float
) -> Worst:
    kink = abs(left - right) > 1e-2 * max(abs(left), abs(right))
    pair = (float(left), float(right)) if kink else None
    return Worst(of, by, float(analytic), float(numeric), pair)


def _scale(f: CheckedOutput, i: int, x: np.ndarray, *derivatives: np.ndarray) -> float:
    """The largest derivative, but no less than the noise of differences allows to tell from 0."""
    value = f.value(i, x)
    noise = 1e-6 * float(np.abs(value[np.isfinite(value)]).max(initial=0.0))
    largest = max(float(np.abs(d[np.isfinite(d)]).max(initial=0.0)) for d in derivatives)
    return max(largest, noise) or 1.0


def _units(shape: Index) -> Iterator[np.ndarray]:
    for index in np.ndindex(shape):
        yield _unit(shape, index)


def _unit(shape: Index, index: Index) -> np.ndarray:
    v = np.zeros(shape)
    v[index] = 1.0
    return v
