"""Padding and rolling.

pad              each axis with zeros before and after, or continued periodically
pad_reflect_1d   the last axis mirrored at its ends; the end elements are not repeated
roll             each axis shifted; elements that leave at one end enter at the other
"""

from collections.abc import Iterator, Sequence

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Sample
from pyggml.graph.tensor import Shape, Tensor
from pyggml.ops.image.resample import resampling_op
from pyggml.ops.image.sample_points import Axis, axis_of_indices

Widths = tuple[tuple[int, int], ...]


def pad(x: Tensor, widths: Sequence[tuple[int, int]], circular: bool = False) -> Tensor:
    """x F32 with (before, after) more elements on each axis, as np.pad (ggml's PAD).

    They are zeros, or with `circular` the periodic continuation of the axis.
    Raises ShapeError for negative widths or another number of axes.
    """
    return PAD(x, widths=tuple((int(a), int(b)) for a, b in widths), circular=circular)


def pad_reflect_1d(x: Tensor, before: int, after: int) -> Tensor:
    """x (…, n) F32, its last axis mirrored at both ends by fewer than n (ggml's PAD_REFLECT_1D)."""
    return PAD_REFLECT_1D(x, before=before, after=after)


def roll(x: Tensor, shifts: Sequence[int]) -> Tensor:
    """x F32 with element i of each axis moved to i + shift, as np.roll (ggml's ROLL)."""
    return ROLL(x, shifts=tuple(int(s) for s in shifts))


def _same(n: int) -> Axis:
    return axis_of_indices(np.arange(n))


def _pad_axes(shape: Shape, widths: Widths, circular: bool) -> list[Axis]:
    if len(widths) != len(shape) or any(w < 0 for pair in widths for w in pair):
        raise ShapeError(f"pad: widths {widths}, wanted {len(shape)} pairs of 0 or more")
    axes = []
    for n, (before, after) in zip(shape, widths, strict=True):
        i = np.arange(-before, n + after)
        axes.append(axis_of_indices(i % n if circular else np.where(i < n, i, -1)))
    return axes


def _pad_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, widths in [
        *(((1, 1), ((0, 0), (0, 0))), ((3, 5), ((1, 0), (2, 3))), ((4,), ((0, 9),))),
        ((2, 3, 4, 5), ((1, 1), (0, 2), (3, 0), (1, 1))),
        ((3, 4), tuple(map(tuple, rng.integers(0, 7, (2, 2)).tolist()))),
    ]:
        for circular in (False, True):
            params = {"widths": widths, "circular": circular}
            yield Sample((rng.standard_normal(shape),), params)


PAD = resampling_op(
    "pad",
    GGMLOp.PAD,
    _pad_axes,
    lambda x, widths, circular: np.pad(x, widths, mode="wrap" if circular else "constant"),
    _pad_samples,
    {"widths": (((-1, 0), (-1, 0)), ((0, 0),) * 5), "circular": ()},
)


def _reflect_axes(shape: Shape, before: int, after: int) -> list[Axis]:
    n = shape[-1]
    if not (0 <= before < n and 0 <= after < n):
        raise ShapeError(f"pad_reflect_1d: {before} and {after}, wanted 0 to {n - 1} each")
    i = np.abs(np.arange(-before, n + after))
    return [*map(_same, shape[:-1]), axis_of_indices(np.where(i < n, i, 2 * (n - 1) - i))]


def _reflect_ref(x: np.ndarray, before: int, after: int) -> np.ndarray:
    return np.pad(x, (*((0, 0),) * (x.ndim - 1), (before, after)), mode="reflect")


def _reflect_samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases = [((1, 1), 0, 0), ((3, 5), 4, 2), ((2, 3, 7), 0, 6), ((2,), 1, 1)]
    for shape, before, after in [*cases, ((2, 6), *rng.integers(0, 6, 2).tolist())]:
        yield Sample((rng.standard_normal(shape),), {"before": before, "after": after})


PAD_REFLECT_1D = resampling_op(
    "pad_reflect_1d",
    GGMLOp.PAD_REFLECT_1D,
    _reflect_axes,
    _reflect_ref,
    _reflect_samples,
    {"before": (-1, 999), "after": (-1, 999)},
)


def _roll_axes(shape: Shape, shifts: Shape) -> list[Axis]:
    if len(shifts) != len(shape):
        raise ShapeError(f"roll: shifts {shifts}, wanted {len(shape)}")
    return [axis_of_indices((np.arange(n) - s) % n) for n, s in zip(shape, shifts, strict=True)]


def _roll_ref(x: np.ndarray, shifts: Shape) -> np.ndarray:
    return np.roll(x, shifts, range(x.ndim))


def _roll_samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases = [((1, 1), (0, 5)), ((3, 8), (1, -3)), ((2, 3, 4, 5), (1, 2, -1, 9))]
    cases.append(((4, 5, 6), tuple(rng.integers(-9, 10, 3).tolist())))
    for shape, shifts in cases:
        yield Sample((rng.standard_normal(shape),), {"shifts": shifts})


ROLL = resampling_op(
    "roll", GGMLOp.ROLL, _roll_axes, _roll_ref, _roll_samples, {"shifts": ((1,) * 5, ())}
)
