"""Edits as they are written: names with numbers, and the tokens whose rows change.

scale      x · number
add        x + number
replace    the number in x's place

A number is one for all elements, or an array that broadcasts to the activation.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import Any

import numpy as np

from pyggml.errors import ConfigError, ShapeError
from pyggml.graph.tensor import Tensor, leaf
from pyggml.models.taps import Change, Edit
from pyggml.ops import add as plus
from pyggml.ops import mul as times
from pyggml.ops import scale as multiply

Numbers = np.ndarray | Sequence[Any] | float


def edits(
    scale: Mapping[str, Numbers] | None = None,
    add: Mapping[str, Numbers] | None = None,
    replace: Mapping[str, Numbers] | None = None,
    tokens: Iterable[int] | None = None,
) -> list[Edit]:
    """The edits that `Model.trace` names. Raises ConfigError for what is no number, numbers that
    are not finite, and tokens that are no whole numbers."""
    rows = None if tokens is None else _positions(tokens)
    kinds = ("scale", scale, _scaled), ("add", add, _added), ("replace", replace, _replaced)
    return [
        Edit(pattern, change, rows)
        for verb, given, kind in kinds
        for pattern, change in _changes(verb, given or {}, kind)
    ]


def _changes(
    verb: str, given: object, kind: Callable[[np.ndarray], Change]
) -> Iterator[tuple[str, Change]]:
    if not isinstance(given, Mapping):
        example = f"{verb}={{'blk.0.out': 2}}"
        raise ConfigError(f"{verb} is {given!r:.60}, wanted names and numbers: {example}")
    for pattern, numbers in given.items():
        yield pattern, kind(_array(verb, pattern, numbers))


def _array(verb: str, pattern: str, given: object) -> np.ndarray:
    try:
        array = np.asarray(given)
    except ValueError:  # lists of unlike length
        array = np.asarray(None)
    if array.dtype.kind not in "fiub":
        raise ConfigError(
            f"{verb} of {pattern} is {given!r:.60}, wanted a number or an array of numbers"
        )
    array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise ConfigError(f"{pattern}: its numbers are not finite")
    return array


def _positions(tokens: object) -> tuple[int, ...]:
    try:
        return tuple(map(index, tokens if isinstance(tokens, Iterable) else [tokens]))
    except TypeError:
        raise ConfigError(f"tokens is {tokens!r}, wanted positions: whole numbers") from None


# -- kinds of change -------------------------------------------------------------------------------


def _scaled(factor: np.ndarray) -> Change:
    if factor.size == 1:
        return lambda name, x: x if factor.item() == 1 else multiply(x, factor.item())
    return lambda name, x: times(x, _spread(name, x, factor))


def _added(addend: np.ndarray) -> Change:
    return lambda name, x: plus(x, _spread(name, x, addend))


def _replaced(value: np.ndarray) -> Change:
    """x · 0 stays in the sum, so that what x is made of has a gradient: 0."""
    return lambda name, x: plus(multiply(x, 0.0), _spread(name, x, value))


def _spread(name: str, x: Tensor, numbers: np.ndarray) -> Tensor:
    """The numbers in x's shape. Raises ShapeError if they do not broadcast to it."""
    try:
        spread = np.broadcast_to(numbers, x.shape)
    except ValueError:
        raise ShapeError(
            f"{name} has shape {x.shape}, and numbers of shape {numbers.shape} do not broadcast "
            "to it"
        ) from None
    return leaf(np.ascontiguousarray(spread))
