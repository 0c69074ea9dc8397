"""Spots: where in an activation an edit acts, by layer, position, batch row, head and neuron."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from pyggml.errors import ConfigError, ShapeError
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.tensor import Shape, Tensor, leaf
from pyggml.models.batch_rows import BatchRows, Once, Slots, is_pattern
from pyggml.ops import add, clamp, cpy, get_rows, mul, repeat, reshape, sub

Numbers = tuple[int, ...] | None  # None: all


@dataclass(frozen=True, slots=True)
class Run:
    """The tokens of a graph, of which a spot chooses some.

    positions   (T,) int32, in their texts
    length      (T,) float32, tokens of each token's text; None where a run cannot know it
    n_ctx       the most tokens of a text
    rows        the rows of a batch; None where a run has none
    of          (n,) int32, the tokens that an activation has rows of; None: all
    once        key, builder → what the builder gave at first
    """

    positions: Tensor
    length: Tensor | None
    n_ctx: int
    rows: BatchRows | Slots | None
    of: Tensor | None
    once: Once

    def row(self, i: int) -> "Run":
        """The tokens of one row of the batch, as a run of its own."""
        assert isinstance(self.rows, BatchRows) and self.of is None
        rows, length = self.rows, self.length

        def once(key: Hashable, make: Callable[[], Tensor]) -> Tensor:
            return self.once(("row", i, key), make)

        positions = rows.cut("positions", self.positions, i, self.once)
        length = None if length is None else rows.cut("length", length, i, self.once)
        alone = BatchRows(rows.lengths[i : i + 1])
        return Run(positions, length, self.n_ctx, alone, None, once)

    def mask(self, name: str, tokens: Numbers, rows: Numbers) -> Tensor:
        """1 for each of an activation's rows that changes and 0 for others, float32 (n, 1).

        Raises ShapeError for a position or a row that there is not, and ConfigError for one that
        the run does not know.
        """
        return self.once(("mask", tokens, rows, self.of), lambda: self._mask(name, tokens, rows))

    def _mask(self, name: str, tokens: Numbers, rows: Numbers) -> Tensor:
        masks = [] if tokens is None else [self._at_positions(name, tokens)]
        if rows is not None:
            assert self.rows is not None
            masks.append(self.rows.mask(name, rows))
        first, *rest = masks
        chosen = mul(first, *rest) if rest else first
        return chosen if self.of is None else get_rows(chosen, self.of)

    def _at_positions(self, name: str, tokens: tuple[int, ...]) -> Tensor:
        n = self.n_ctx
        _refuse_beyond(name, "token", tokens, n, "a run of")
        chosen = get_rows(_table([t for t in tokens if t >= 0], n), self.positions)
        if min(tokens, default=0) >= 0:
            return chosen
        if self.length is None:
            raise ConfigError(
                f"tokens has {min(tokens)}, counted from the end of a text: while a text is "
                "generated, it has none yet"
            )
        left = cpy(sub(self.length, cpy(self.positions, F32)), I32)  # 1 of the last token
        from_end = get_rows(_table([-t for t in tokens if t < 0], n + 1), left)
        return clamp(add(chosen, from_end), 0, 1)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where in an activation an edit acts; None: everywhere.

    tokens    positions in each text, counted from its end if negative
    rows      rows of a batch: texts, slots of generation, windows of training
    layers    numbers of blocks, of a pattern that names several
    heads     heads
    neurons   numbers along the last axis: of the feed-forward's neurons, of the stream's features
    """

    tokens: Numbers = None
    rows: Numbers = None
    layers: Numbers = None
    heads: Numbers = None
    neurons: Numbers = None

    def has_layer(self, name: str) -> bool:
        """Whether the layer of an activation is one of these."""
        return self.layers is None or layer_of(name) in self.layers

    def expect_tokens(self, pattern: str, batch: BatchRows) -> None:
        """ShapeError for a position that one of the texts of a batch has not."""
        chosen = range(batch.n) if self.rows is None else self.rows
        for row in (i for i in chosen if -batch.n <= i < batch.n):
            n = batch.lengths[row]
            if wrong := [t for t in self.tokens or () if not -n <= t < n]:
                raise ShapeError(
                    f"{pattern}: there is no token {wrong[0]} in text {row % batch.n} of {n}; "
                    "At(…, rows=…) chooses texts"
                )

    def mask(self, name: str, x: Tensor, run: Run, n_heads: int) -> Tensor | None:
        """1 where x changes and 0 elsewhere, in a shape that tiles x's; None for everywhere.

        Raises ShapeError for a head or a neuron that x has not, ConfigError for tokens of a pattern
        that generation cannot number, or as `Run.mask` does.
        """
        self._expect_keys(name, run)
        along = self._along_rows(name, x.shape, n_heads)
        if self.tokens is None and self.rows is None:
            return None if along is None else leaf(along)
        shape = x.shape[0], *(1,) * (len(x.shape) - 1)
        down = reshape(run.mask(name, self.tokens, self.rows), shape)
        return down if along is None else mul(repeat(leaf(along), x.shape), down)

    def _expect_keys(self, name: str, run: Run) -> None:
        """ConfigError if tokens that a pattern reads have no numbers in a run: in generation those
        of several sequences, and those from the end."""
        if self.neurons is None or not is_pattern(name) or not isinstance(run.rows, Slots):
            return
        if run.rows.n > 1 or min(self.neurons, default=0) < 0:
            raise ConfigError(
                f"{name}: while texts are generated, neurons are the tokens that a pattern reads "
                "of one sequence alone, from its start"
            )

    def numbers(self, name: str, shape: Shape, n_heads: int) -> np.ndarray:
        """The same of one text's activation, whatever the rows, as bool that broadcasts to it."""
        along = self._along_rows(name, shape, n_heads)
        chosen = np.ones((1,) * len(shape), bool) if along is None else along > 0
        if self.tokens is None:
            return chosen
        _refuse_beyond(name, "token", self.tokens, shape[0], "a text of")
        down = np.zeros((shape[0], *(1,) * (len(shape) - 1)), bool)
        down[list(self.tokens)] = True
        return chosen & down

    def _along_rows(self, name: str, shape: Shape, n_heads: int) -> np.ndarray | None:
        """The mask of a row of x, (1, …) float32."""
        if self.heads is None and self.neurons is None:
            return None
        chosen = np.ones((1, *shape[1:]), np.float32)
        if self.heads is not None:
            if not n_heads:
                raise ShapeError(f"{name} has no heads")
            _refuse_beyond(name, "head", self.heads, n_heads, "")
            of_heads = np.zeros((n_heads, prod(shape[1:]) // n_heads), np.float32)
            of_heads[list(self.heads)] = 1
            chosen *= of_heads.reshape(chosen.shape)
        if self.neurons is not None:
            _refuse_beyond(name, "neuron", self.neurons, shape[-1], "")
            of_neurons = np.zeros(shape[-1], np.float32)
            of_neurons[list(self.neurons)] = 1
            chosen *= of_neurons
        return chosen


def layer_of(name: str) -> int | None:
    """The number of the block that an activation is of: 3 of "blk.3.out"; None outside blocks."""
    number = name.partition("blk.")[2].split(".")[0]
    return int(number) if number.isdigit() else None


def _table(chosen: Sequence[int], n: int) -> Tensor:
    """(n, 1) float32, 1 in these rows."""
    table = np.zeros((n, 1), np.float32)
    table[list(chosen)] = 1
    return leaf(table)


def _refuse_beyond(name: str, what: str, numbers: tuple[int, ...], n: int, of: str) -> None:
    if wrong := [i for i in numbers if not -n <= i < n]:
        words = f"in {of} {n}" if of else f"among its {n}"
        raise ShapeError(f"{name}: there is no {what} {wrong[0]} {words}")
