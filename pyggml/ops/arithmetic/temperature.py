"""The factor that sharpens attention far from the start of a text.

log_temperature    y = 1 + strength · ln(1 + floor((position + first) / every))
"""

from collections.abc import Iterator

import numpy as np

from pyggml.errors import PyggmlError, ShapeError
from pyggml.graph.dtypes import I32
from pyggml.graph.op import NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel
from pyggml.kernels.kernel import cpu_kernel, flat
from pyggml.ops.expect import expect_axes, expect_type


def log_temperature(positions: Tensor, strength: float, every: int, first: int = 0) -> Tensor:
    """The factors (T,) F32 of queries at positions (T,) I32, none below 0.

    first is the number of the first token, 0 or 1.

    ggml has no such op: llama.cpp computes the factors outside the graph. Raises ShapeError for
    another shape or type, or if `every` is below 1 or `first` below 0. The kernel raises
    PyggmlError for a position below 0.
    """
    return LOG_TEMPERATURE(positions, strength=float(strength), every=every, first=first)


def _spec(positions: Tensor, strength: float, every: int, first: int) -> Spec:
    expect_type("log_temperature", "positions", positions, I32)
    expect_axes("log_temperature", "positions", positions, 1)
    if every < 1 or first < 0:
        raise ShapeError(
            f"log_temperature: every is {every}, wanted 1 or more; first {first}, wanted 0 or more"
        )
    return Spec(positions.shape)


@kernel
def _log_temperature(out, positions, strength, every, first):
    for i in range(out.size):
        steps = np.float32((positions[i] + first) // every)
        out[i] = np.float32(1) + strength * np.log(np.float32(1) + steps)


def _check_then_run(
    out: np.ndarray, positions: np.ndarray, strength: np.float32, every: int, first: int
) -> None:
    if positions.size and positions.min() < 0:
        raise PyggmlError(f"log_temperature: position {positions.min()}, wanted 0 or more")
    _log_temperature(out, positions, strength, every, first)


def _ref(positions: np.ndarray, strength: float, every: int, first: int) -> np.ndarray:
    return 1 + strength * np.log(1.0 + (positions.astype(np.int64) + first) // every)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for n, every in ((1, 1), (9, 4), (40, 16), (9, int(rng.integers(1, 50)))):
        positions = rng.integers(0, 50, n).astype(np.int32)
        params = {"strength": 0.1 * n, "every": every, "first": n % 2}
        yield Sample((positions,), params)


LOG_TEMPERATURE = op(
    name="log_temperature",
    spec=_spec,
    ref=_ref,
    grad=NoGrad("a position does not change smoothly"),
    samples=_samples,
    refuses={"strength": (), "every": (0, -1), "first": (-1,)},
)
cpu_kernel(LOG_TEMPERATURE, flat(_check_then_run))
