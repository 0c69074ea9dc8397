"""Taps: activations of a model by name, to be read or changed.

name               shape                what it is
token_embd         (T, n_embd)          embeddings of the tokens
blk.3.attn_norm    (T, n_embd)          a norm's output, by its name in the file
blk.3.attn_q       (T, n_out)           a linear module's output, by its name in the file
blk.3.q, k, v      (T, heads, size)     queries and keys after rope, values: what attention reads
blk.3.attn_pattern (T, n_head, T)       how much each head reads of each token: rows that sum to 1 *
blk.3.attention    (T, n_head · size)   the heads' results, before the output matrix
blk.3.attn_head.1  (T, size)            that of one head *
blk.3.attn_out     (T, n_embd)          what attention, or the recurrence in its place, adds
blk.3.mid          (T, n_embd)          the residual stream between attention and feed-forward
blk.3.ffn_neurons  (T, n_ff)            the feed-forward's neurons: what its last matrix multiplies
blk.3.ffn_neurons_exps (T, n_used, n_ff) those of a mixture's chosen experts
blk.3.ffn_out      (T, n_embd)          what the feed-forward part adds
blk.3.per_layer_out (T, n_embd)         what the layer's own input adds (pyggml.models.per_layer)
blk.3.out          (T, n_embd)          the residual stream after the block
output_norm        (T, n_embd)          the last norm's output
logits             (T, n_vocab)         the logits, of as many tokens as they are made for

* made on demand: where a pattern has `attn_pattern` or `attn_head` in it, as "*.attn_head.1" has
and "*" has not. The fused kernel of attention keeps no pattern, so that another computes it.

A name is that of one tensor of the graph. An edit makes further nodes in its place, so that plans,
gradients and devices know of it. Without taps a model's graph is the same as if there were none.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Protocol

from pyggml.errors import ConfigError, suggestion
from pyggml.graph.tensor import Tensor
from pyggml.models.batch_rows import BatchRows, is_pattern
from pyggml.models.spots import Run, Spot, layer_of
from pyggml.ops import add, mul, scale


class Change(Protocol):
    """What becomes of an activation."""

    def __call__(self, name: str, x: Tensor, row: int = 0, n_rows: int = 1) -> Tensor:
        """What stands in x's place, of its shape. x: of one row of a batch, or of all in one."""

    def is_by_row(self, x: Tensor) -> bool:
        """Whether it is of one row of a batch, as a function is, and not of all of x."""


class AnyEdit(Protocol):
    """What may become of activations that a pattern names."""

    @property
    def pattern(self) -> str: ...

    def __call__(self, name: str, x: Tensor, run: Run, n_heads: int) -> Tensor:
        """The edited activation, of so many heads or 0."""


@dataclass(frozen=True, slots=True)
class Edit:
    """What becomes of the activations that a pattern names.

    change   what stands in x's place
    spot     where in x it does
    """

    pattern: str
    change: Change
    spot: Spot

    def __call__(self, name: str, x: Tensor, run: Run, n_heads: int) -> Tensor:
        """The edited activation, of so many heads or 0. Raises ShapeError for numbers or places
        that do not fit."""
        if not self.spot.has_layer(name):
            return x
        rows = run.rows
        by_row = is_pattern(name) or self.change.is_by_row(x)
        if by_row and isinstance(rows, BatchRows) and rows.n > 1 and run.of is None:
            return self._by_row(name, x, run, rows, n_heads)
        return self._where(self.spot.mask(name, x, run, n_heads), x, self.change(name, x))

    @staticmethod
    def _where(chosen: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
        """y where it is chosen, and x elsewhere; None: y everywhere."""
        return y if chosen is None else add(mul(x, scale(chosen, -1.0, 1.0)), mul(y, chosen))

    def _by_row(self, name: str, x: Tensor, run: Run, rows: BatchRows, n_heads: int) -> Tensor:
        """Each row of the batch as it would be edited alone."""
        parts = [rows.cut(name, x, i, run.once) for i in range(rows.n)]
        spot = replace(self.spot, rows=None)
        for i in rows.numbers(name, self.spot.rows):
            chosen = spot.mask(name, parts[i], run.row(i), n_heads)
            y = self.change(name, parts[i], i, rows.n)
            parts[i] = self._where(chosen, parts[i], y)
        return rows.join(name, parts)


class Taps:
    """What is wanted of a graph's activations while it is built.

    patterns   names to read, with * and ? as in a shell
    edits      applied in their order
    every      read all that the graph has, and of what is made on demand what patterns name

    names      every name that was offered
    read       the activations to read, as they are after the edits
    """

    def __init__(
        self, patterns: Sequence[str], edits: Sequence[AnyEdit] = (), *, every: bool = False
    ) -> None:
        self.patterns, self.edits, self.every = tuple(patterns), tuple(edits), every
        self.names: list[str] = []
        self.read: dict[str, Tensor] = {}

    def wants(self, name: str) -> bool:
        """Whether an activation is read or changed."""
        return fits(name, self.all_patterns)

    @property
    def all_patterns(self) -> tuple[str, ...]:
        """Of what is read, then of what is changed."""
        return *self.patterns, *(e.pattern for e in self.edits)

    def asks(self, word: str, names: Sequence[str]) -> bool:
        """Whether one of these is read or changed by a pattern that has this word of their names in
        it; they are offered, and are not made otherwise."""
        patterns = [p for p in self.all_patterns if word in p]
        asked = any(fits(name, patterns) for name in names)
        if not asked:
            self.names += names
        return asked

    def __call__(self, name: str, x: Tensor, run: Run, n_heads: int = 0) -> Tensor:
        """x, or what the edits make of it. n_heads: those that its numbers belong to; 0: none."""
        if name in self.names:
            raise AssertionError(f"two activations are named {name}")
        self.names.append(name)
        for edit in self.edits:
            if fnmatchcase(name, edit.pattern):
                x = edit(name, x, run, n_heads)
        if self.every or fits(name, self.patterns):
            self.read[name] = x
        return x


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name fits one of these patterns."""
    return any(fnmatchcase(name, p) for p in patterns)


def check_layers(edits: Iterable[Edit], activations: Sequence[str]) -> None:
    """ConfigError for a layer of an edit in which its pattern names nothing."""
    for edit in edits:
        layers = {layer_of(name) for name in activations if fits(name, [edit.pattern])}
        if wrong := [i for i in edit.spot.layers or () if i not in layers]:
            raise ConfigError(f"{edit.pattern} names nothing in layer {wrong[0]}")


def check_names(patterns: Iterable[str], activations: Sequence[str]) -> None:
    """ConfigError for patterns that are no name of a known activation."""
    strangers = [p for p in patterns if not any(fnmatchcase(name, p) for name in activations)]
    if strangers:
        names = ", ".join(dict.fromkeys(strangers))
        near = next(filter(None, (suggestion(name, activations) for name in strangers)), "")
        listing = f"; there are {', '.join([*activations[:6], '…', *activations[-3:]])}"
        raise ConfigError(f"no activation is named {names}{near or listing}")
