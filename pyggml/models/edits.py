"""Edits as they are written: names with what changes the activations, and where.

scale      x · y
add        x + y
replace    y in x's place

y is a number, an array that broadcasts to x, or a function of x that gives either, or a value that
is made of x by operators and `pyggml.functions`: nodes of the graph, with gradients. `At` says
where in x.

Where a pass has several rows, prompts or windows of training, x is each row's own for a function,
and for an array of as many tokens. A list of arrays has one for each row.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pyggml.eager.activation import Activation
from pyggml.eager.value import Value
from pyggml.errors import ConfigError, ShapeError
from pyggml.graph.tensor import Shape, Tensor
from pyggml.models.spots import Numbers, Spot
from pyggml.models.taps import Edit

Term = np.ndarray | Sequence[Any] | float | Callable[[Activation], Any]
_ByRow = tuple[np.ndarray, ...]
Whole = Iterable[int] | int | None


@dataclass(frozen=True, slots=True)
class At:
    """The value of an edit at chosen places: scale={"blk.*.attention": At(0, heads=[1, 3])}.

    term      a number, an array, a list of arrays, or a function of the activation
    tokens    positions in each text, from its end if negative; None: those of the trace
    layers    numbers of blocks
    heads     of queries, keys, values, their results and patterns
    neurons   numbers along the last axis
    rows      of a batch: texts of one pass, in generation slots, in training windows
    """

    term: Term
    tokens: Whole = None
    layers: Whole = None
    heads: Whole = None
    neurons: Whole = None
    rows: Whole = None

    def spot(self, tokens: Whole) -> Spot:
        """Where; tokens: where this names none."""
        given = {
            "tokens": tokens if self.tokens is None else self.tokens,
            **{name: getattr(self, name) for name in ("rows", "layers", "heads", "neurons")},
        }
        return Spot(**{name: _whole_numbers(name, numbers) for name, numbers in given.items()})


Terms = Mapping[str, Term | At]


def edits(
    scale: Terms | None = None,
    add: Terms | None = None,
    replace: Terms | None = None,
    tokens: Whole = None,
) -> list[Edit]:
    """The edits that `Model.trace` names. Raises ConfigError for what is no number, numbers that
    are not finite, and places that are no whole numbers."""
    verbs = {"scale": scale, "add": add, "replace": replace}
    if tokens is not None and not any(verbs.values()):
        raise ConfigError("tokens says where scale, add and replace change, and none is given")
    return [edit for verb, given in verbs.items() for edit in _edits(verb, given or {}, tokens)]


def _edits(verb: str, given: object, tokens: Whole) -> Iterator[Edit]:
    if not isinstance(given, Mapping):
        example = f"{verb}={{'blk.0.out': 2}}"
        raise ConfigError(f"{verb} is {given!r:.60}, wanted names and numbers: {example}")
    for pattern, term in given.items():
        at = term if isinstance(term, At) else At(term)
        yield Edit(pattern, _change(verb, pattern, at.term), at.spot(tokens))


def repeat_edit(edit: Edit, n_rows: int, n_copies: int) -> Edit:
    """The edit of a batch of n_rows rows, in each of several copies of these."""
    spot, change = edit.spot, edit.change
    if spot.rows is not None and all(-n_rows <= i < n_rows for i in spot.rows):
        rows = (k * n_rows + i % n_rows for k in range(n_copies) for i in spot.rows)
        spot = replace(spot, rows=tuple(rows))
    if isinstance(change, Arithmetic) and isinstance(change.term, tuple):
        change = replace(change, term=change.term * n_copies)
    return replace(edit, spot=spot, change=change)


def _whole_numbers(name: str, numbers: Any) -> Numbers:
    if numbers is None:
        return None
    every = [*numbers] if isinstance(numbers, Iterable) else [numbers]
    if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in every):
        raise ConfigError(f"{name} is {numbers!r:.60}, wanted whole numbers")
    return tuple(map(int, every))


@dataclass(frozen=True, slots=True, eq=False)
class Arithmetic:
    """What a verb does with a term.

    term   an array, one for each row of a batch, or a function of the activation
    """

    verb: str
    term: np.ndarray | _ByRow | Callable[[Activation], Any]

    def is_by_row(self, x: Tensor) -> bool:
        if isinstance(self.term, np.ndarray):
            return not broadcasts(self.term.shape, x.shape)
        return True

    def __call__(self, name: str, x: Tensor, row: int = 0, n_rows: int = 1) -> Tensor:
        before = Activation(x)
        if callable(self.term):
            y = self.term(before)
            about = f"{self.verb} of {name}: the function gave"
            y = y if isinstance(y, Value) else _array(about, y)
        else:
            y = self.array(name, row, n_rows)
        return _combine(self.verb, name, before, y)

    def array(self, name: str, row: int, n_rows: int) -> np.ndarray:
        """The numbers of one row, of a term that is no function."""
        if isinstance(self.term, np.ndarray):
            return self.term
        assert isinstance(self.term, tuple)
        if len(self.term) == n_rows:
            return self.term[row]
        if n_rows > 1:
            raise ShapeError(
                f"{name}: {len(self.term)} arrays, wanted one for each of {n_rows} rows of a batch"
            )
        return _array(f"{self.verb} of {name} is", list(self.term))


def _change(verb: str, pattern: str, term: Any) -> Arithmetic:
    """The change that a verb and a term are; arrays are of finite numbers."""
    if callable(term):
        return Arithmetic(verb, term)
    about = f"{verb} of {pattern} is"
    by_row = isinstance(term, list | tuple) and {type(y) for y in term} == {np.ndarray}
    arrays = [_array(about, y) for y in (term if by_row else [term])]
    if not all(np.isfinite(a).all() for a in arrays):
        raise ConfigError(f"{pattern}: its numbers are not finite")
    return Arithmetic(verb, tuple(arrays) if by_row else arrays[0])


def _array(about: str, given: object) -> np.ndarray:
    try:
        array = np.asarray(given)
    except ValueError:  # lists of unlike length
        array = np.asarray(None)
    if array.dtype.kind not in "fiub":
        raise ConfigError(f"{about} {given!r:.60}, wanted a number or an array of numbers")
    return array.astype(np.float32)


def _combine(verb: str, name: str, x: Activation, y: np.ndarray | Value) -> Tensor:
    """The node of x and y. What is replaced stays in the sum, times 0, so that all that it is made
    of has a gradient. Raises ShapeError if y does not broadcast to x."""
    if not broadcasts(y.shape, x.shape):
        raise ShapeError(
            f"{name} has shape {x.shape}, and numbers of shape {y.shape} do not broadcast to it"
        )
    term = float(y.item()) if isinstance(y, np.ndarray) and not y.shape else y
    if verb == "scale":
        return (x * term).node
    return ((x if verb == "add" else x * 0.0) + term).node


def broadcasts(shape: Shape, to: Shape) -> bool:
    """Whether numbers of a shape broadcast to another one."""
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False
