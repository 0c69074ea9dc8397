"""Sweeps: many small changes of one model, run by one program that is planned and bound once.

    sweep = model.sweep(metric, ids, "blk.*.out")
    cells = [{"replace": {f"blk.{i}.out": At(clean, tokens=[p])}} for i in … for p in …]
    for cell, y in zip(cells, sweep(cells)):

A cell is what `Model.trace` takes: scale, add, replace and tokens, of numbers and arrays. In the
graph each activation x that cells may change is x · factor + addend, of its shape, both inputs: a
cell is numbers in these. Several cells share a pass, each as rows of a batch. Of several texts a
cell may be a list, of what each text has changed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from pyggml.errors import ConfigError, NotFiniteError, ShapeError, first_names, suggestion
from pyggml.graph.arrays import array
from pyggml.graph.tensor import Tensor, zeros
from pyggml.models.batch_rows import BatchRows
from pyggml.models.edits import Arithmetic, broadcasts, edits
from pyggml.models.metric import Gradients, gradients_by_text
from pyggml.models.spots import Run
from pyggml.models.taps import Edit, check_layers, fits
from pyggml.ops import add, mul
from pyggml.runtime import Program

Cell = Mapping[str, Any]  # what of `Model.trace`'s scale, add, replace and tokens it changes
Cells = Sequence[Cell]  # of each text one
Result = float | np.ndarray | Gradients
_VERBS = "scale", "add", "replace", "tokens"
_MOST_TOKENS = 512  # of a pass that cells share
_MOST_BYTES = 1 << 28  # of its logits


@dataclass(frozen=True, slots=True)
class Place:
    """Where a graph takes the numbers of an activation's change, arrays of its shape.

    n_heads   those that its numbers belong to; 0: none
    """

    factor: np.ndarray
    addend: np.ndarray
    n_heads: int


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """An edit of the activations that a pattern names, whose numbers are inputs of the graph.

    places   of each activation, shared with the openings of other patterns
    """

    pattern: str
    places: dict[str, Place]

    def __call__(self, name: str, x: Tensor, run: Run, n_heads: int) -> Tensor:
        if name in self.places:
            return x
        factor, addend = (zeros(x.shape, name=f"{kind} of {name}") for kind in ("factor", "addend"))
        array(factor).fill(1)
        self.places[name] = Place(array(factor), array(addend), n_heads)
        return add(mul(x, factor), addend)


@dataclass(slots=True, eq=False)
class SweepPass:
    """The program of a sweep, over n copies of its texts.

    batch     rows: the texts, once for each copy
    """

    program: Program
    batch: BatchRows
    n_texts: int
    places: Mapping[str, Place]
    _changed: list[tuple[str, int]] = field(default_factory=list)

    @property
    def n_copies(self) -> int:
        return self.batch.n // self.n_texts

    def run(self, cells: Sequence[Sequence[Edit]]) -> list[list[Result]]:
        """What cells give, as many as there are copies at most: of each, by text."""
        for name, row in self._changed:
            place, part = self.places[name], self.batch.part(name, row)
            place.factor[part], place.addend[part] = 1, 0
        self._changed.clear()
        for copy, cell in enumerate(cells):
            for edit in cell:
                self._change(edit, copy)
        self.program()
        rows = self._results(len(cells) * self.n_texts)
        return [rows[i : i + self.n_texts] for i in range(0, len(rows), self.n_texts)]

    def _change(self, edit: Edit, copy: int) -> None:
        """Make an edit in a copy of the texts."""
        names = [name for name in self.places if fits(name, [edit.pattern])]
        first = copy * self.n_texts
        texts = BatchRows(self.batch.lengths[: self.n_texts])
        for name in filter(edit.spot.has_layer, names):
            for i in texts.numbers(name, edit.spot.rows):
                part = self.batch.part(name, first + i)
                self._changed.append((name, first + i))
                place = self.places[name]
                own = Place(place.factor[part], place.addend[part], place.n_heads)
                _apply(edit, name, own, i, self.n_texts)

    def _results(self, n: int) -> list[Result]:
        """Of the first n rows."""
        graph = self.program.schedule.graph
        if "loss" in graph.names:  # as it is where gradients are
            read = {name: self.program.read(graph[name]) for name in graph.names}
            return [*gradients_by_text(read, self.batch)[:n]]
        arrays = [self.program.read(graph[f"metric:{i}"]) for i in range(n)]
        return [float(a) if a.shape == () else a for a in arrays]


def _apply(edit: Edit, name: str, place: Place, text: int, n_texts: int) -> None:
    """Make an edit in the numbers of one text's activation."""
    change, shape = edit.change, place.factor.shape
    assert isinstance(change, Arithmetic)
    y = change.array(name, text, n_texts)
    if not broadcasts(y.shape, shape):
        raise ShapeError(
            f"{name} has shape {shape}, and numbers of shape {y.shape} do not broadcast to it"
        )
    chosen = edit.spot.numbers(name, shape, place.n_heads)
    if change.verb == "add":
        np.add(place.addend, y, out=place.addend, where=chosen)
        return
    factor: Any = y if change.verb == "scale" else 0
    for numbers in (place.factor, place.addend):
        np.multiply(numbers, factor, out=numbers, where=chosen)
    if change.verb == "replace":
        np.add(place.addend, y, out=place.addend, where=chosen)


class Sweep:
    """What cells make of a metric, one result each; `Model.sweep` gives one.

    names   the activations that cells may change
    """

    def __init__(
        self,
        bind: Callable[[int], SweepPass],
        names: Sequence[str],
        n_copies: int,
        n_texts: int | None,
    ) -> None:
        """bind: a number of copies of the texts → their pass. n_copies: the most of a pass.
        n_texts: of a list, by which results are lists too; None: one text."""
        self.names = names
        self._bind, self._n_copies, self._n_texts = bind, n_copies, n_texts
        self._pass: SweepPass | None = None

    def __call__(self, cells: Iterable[Cell | Cells]) -> Iterator[Any]:
        """What the metric is with each cell's changes, in the cells' order, as passes give them.

        A number is a float, other metrics are float32 arrays of their shapes; with `by` it is
        `Gradients`; of several texts a list of these. Raises as `Model.trace` does, ConfigError for
        what is no cell, and NotFiniteError for a result that is NaN or infinite.
        """
        coming, n_done = iter(cells), 0
        while cells_of_pass := [self._edits(cell) for cell in islice(coming, self._n_copies)]:
            if self._pass is None or self._pass.n_copies < len(cells_of_pass):
                self._pass = self._bind(len(cells_of_pass))
            for rows in self._pass.run(cells_of_pass):
                _expect_finite(rows, n_done)
                n_done += 1
                yield rows[0] if self._n_texts is None else rows

    def _edits(self, cell: Cell | Cells) -> list[Edit]:
        """What a cell changes; of a list, in each text its own."""
        if self._n_texts is None or not isinstance(cell, list | tuple):
            return self._edits_of(cell)
        if len(cell) != self._n_texts:
            raise ConfigError(
                f"a cell is a list of {len(cell)}, wanted one for each of {self._n_texts} texts"
            )
        return [_in_text(edit, i) for i, own in enumerate(cell) for edit in self._edits_of(own)]

    def _edits_of(self, cell: object) -> list[Edit]:
        if not isinstance(cell, Mapping):
            raise ConfigError(f"a cell is {cell!r:.60}, wanted such as {{'scale': {{name: 0}}}}")
        if strangers := [key for key in cell if key not in _VERBS]:
            near = suggestion(str(strangers[0]), _VERBS) or f", wanted {', '.join(_VERBS)}"
            raise ConfigError(f"a cell has {strangers[0]!r}{near}")
        changes = edits(**cell)
        for edit in changes:
            if isinstance(edit.change, Arithmetic) and callable(edit.change.term):
                raise ConfigError(
                    f"{edit.pattern}: a cell changes it by a function, wanted a number or an "
                    "array, for which one program serves all cells"
                )
            if not any(fits(name, [edit.pattern]) for name in self.names):
                raise ConfigError(
                    f"a cell changes {edit.pattern}, which the sweep does not open: it was made "
                    f"for {first_names(self.names, 3)}"
                )
        check_layers(changes, self.names)
        return changes


def _in_text(edit: Edit, i: int) -> Edit:
    """The edit in one text of several."""
    if edit.spot.rows is not None:
        raise ConfigError(f"{edit.pattern}: the cell is of one text, and has no rows")
    return replace(edit, spot=replace(edit.spot, rows=(i,)))


def copies_of_a_pass(n_tokens: int, n_vocab: int) -> int:
    """How many copies of texts of so many tokens share a pass."""
    most = min(_MOST_TOKENS, _MOST_BYTES // (4 * n_vocab))
    return max(1, most // n_tokens)


def _expect_finite(rows: Sequence[Result], cell: int) -> None:
    for y in rows:
        values = y.metric if isinstance(y, Gradients) else y
        if not np.isfinite(values).all():
            raise NotFiniteError(f"cell {cell} of the sweep gives NaN or infinity")
