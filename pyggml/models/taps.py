"""Taps: activations of a model by name, to be read or changed.

name               shape                what it is
token_embd         (T, n_embd)          embeddings of the tokens
blk.3.attn_norm    (T, n_embd)          a norm's output, by its name in the file
blk.3.attn_q       (T, n_out)           a linear module's output, by its name in the file
blk.3.q, k, v      (T, heads, size)     queries and keys after rope, values: what attention reads
blk.3.attention    (T, n_head · size)   the heads' results, before the output matrix
blk.3.attn_out     (T, n_embd)          what attention, or the recurrence in its place, adds
blk.3.ffn_out      (T, n_embd)          what the feed-forward part adds
blk.3.per_layer_out (T, n_embd)         what the layer's own input adds (pyggml.models.per_layer)
blk.3.out          (T, n_embd)          the residual stream after the block
output_norm        (T, n_embd)          the last norm's output
logits             (T, n_vocab)         the logits, of as many tokens as they are made for

A name is that of one tensor of the graph. An edit makes further nodes in its place, so that plans,
gradients and devices know of it. Without taps a model's graph is the same as if there were none.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from pyggml.errors import ConfigError, ShapeError, suggestion
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.tensor import Tensor, leaf
from pyggml.ops import add, clamp, cpy, get_rows, mul, reshape, scale, sub

Change = Callable[[str, Tensor], Tensor]  # a name and its activation → what stands in its place
ChosenRows = Callable[[str, tuple[int, ...]], Tensor]  # an activation's name, positions → (n, 1)


@dataclass(frozen=True, slots=True)
class Positions:
    """Where the tokens of a run stand in their texts: an edit chooses rows by it.

    positions   (T,) int32
    length      (T,) float32, tokens of each token's text; None where a run cannot know it
    n_ctx       the most tokens of a text
    of          (n,) int32, the tokens that an activation has rows of; None: all
    """

    positions: Tensor
    length: Tensor | None
    n_ctx: int
    of: Tensor | None = None

    def mask(self, name: str, tokens: Sequence[int]) -> Tensor:
        """1 for each row that changes and 0 for others, float32 (n, 1).

        Raises ShapeError for a position that no text of the run can have, and ConfigError for one
        that is counted from an end which the run does not know.
        """
        n = self.n_ctx
        if wrong := [t for t in tokens if not -n <= t < n]:
            raise ShapeError(f"{name}: there is no token {wrong[0]} in a run of {n}")
        first = _table([t for t in tokens if t >= 0], n)
        chosen = get_rows(first, self.positions)
        if min(tokens, default=0) < 0:
            chosen = clamp(add(chosen, self._from_end(tokens)), 0, 1)
        return chosen if self.of is None else get_rows(chosen, self.of)

    def _from_end(self, tokens: Sequence[int]) -> Tensor:
        """(T, 1), 1 for each row that one of these names from the end, where it is negative."""
        if self.length is None:
            raise ConfigError(
                f"tokens has {min(tokens)}, counted from the end of a text: while a text is "
                "generated, it has none yet"
            )
        left = cpy(sub(self.length, cpy(self.positions, F32)), I32)  # 1 of the last token
        return get_rows(_table([-t for t in tokens if t < 0], self.n_ctx + 1), left)


def _table(chosen: Sequence[int], n: int) -> Tensor:
    """(n, 1) float32, 1 in these rows."""
    table = np.zeros((n, 1), np.float32)
    table[list(chosen)] = 1
    return leaf(table)


@dataclass(frozen=True, slots=True)
class Edit:
    """What becomes of the activations that a pattern names.

    change   (name, x) → what stands in x's place, of its shape
    tokens   positions in a text whose rows change, counted from its end if negative; None: all
    """

    pattern: str
    change: Change
    tokens: tuple[int, ...] | None = None

    def __call__(self, name: str, x: Tensor, rows: ChosenRows) -> Tensor:
        """The edited activation. Raises ShapeError for numbers or tokens that do not fit."""
        if self.tokens is None:
            return self.change(name, x)
        chosen = reshape(rows(name, self.tokens), (x.shape[0], *(1,) * (len(x.shape) - 1)))
        others = scale(chosen, -1.0, 1.0)
        return add(mul(x, others), mul(self.change(name, x), chosen))


class Taps:
    """What is wanted of a graph's activations while it is built.

    patterns   names to read, with * and ? as in a shell
    edits      applied in their order

    names      every name that was offered
    read       the activations to read, as they are after the edits
    """

    def __init__(self, patterns: Sequence[str], edits: Sequence[Edit] = ()) -> None:
        self.patterns, self.edits = tuple(patterns), tuple(edits)
        self.names: list[str] = []
        self.read: dict[str, Tensor] = {}

    def wants(self, name: str) -> bool:
        """Whether an activation is read or changed."""
        return fits(name, self.all_patterns)

    @property
    def all_patterns(self) -> tuple[str, ...]:
        """Of what is read, then of what is changed."""
        return *self.patterns, *(e.pattern for e in self.edits)

    def __call__(self, name: str, x: Tensor, rows: ChosenRows) -> Tensor:
        """x, or what the edits make of it. rows: the mask of an edit's tokens."""
        if name in self.names:
            raise AssertionError(f"two activations are named {name}")
        self.names.append(name)
        for edit in self.edits:
            if fnmatchcase(name, edit.pattern):
                x = edit(name, x, rows)
        if fits(name, self.patterns):
            self.read[name] = x
        return x


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name fits one of these patterns."""
    return any(fnmatchcase(name, p) for p in patterns)


def check_names(patterns: Iterable[str], known: Sequence[str]) -> None:
    """ConfigError for patterns that are no name of a known activation."""
    strangers = [p for p in patterns if not any(fnmatchcase(name, p) for name in known)]
    if strangers:
        names = ", ".join(dict.fromkeys(strangers))
        near = suggestion(strangers[0], known) if names == strangers[0] else ""
        some = f"; there are {', '.join([*known[:6], '…', *known[-3:]])}"
        raise ConfigError(f"no activation is named {names}{near or some}")
