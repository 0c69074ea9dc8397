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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from pyggml.errors import ConfigError, ShapeError
from pyggml.graph.tensor import Tensor, leaf
from pyggml.ops import add, mul, scale

Numbers = np.ndarray | Sequence[Any] | float


@dataclass(frozen=True, slots=True)
class Edit:
    """What becomes of the activations that a pattern names: x ← factor · x + addend.

    addend   numbers that broadcast to x's shape, or None
    tokens   positions in this run whose rows change, counted from the end if negative; None: all
    """

    pattern: str
    factor: float = 1.0
    addend: np.ndarray | None = None
    tokens: tuple[int, ...] | None = None

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """The edited activation. Raises ShapeError for an addend or tokens that do not fit."""
        chosen = self._row_mask(name, x)
        y = x
        if self.factor != 1:
            y = (
                mul(x, leaf(1 + (self.factor - 1) * chosen))
                if self.tokens
                else scale(x, self.factor)
            )
        if self.addend is None:
            return y
        try:
            addend = np.broadcast_to(np.asarray(self.addend, np.float32), x.shape)
        except ValueError:
            raise ShapeError(
                f"{name} has shape {x.shape}, and numbers of shape {np.shape(self.addend)} do not "
                "broadcast to it"
            ) from None
        return add(y, leaf(np.ascontiguousarray(addend * chosen)))

    def _row_mask(self, name: str, x: Tensor) -> np.ndarray:
        """1 for each row that changes and 0 for others, float32 (T, 1, …)."""
        n = x.shape[0]
        shape = (n, *(1,) * (len(x.shape) - 1))
        if self.tokens is None:
            return np.ones(shape, np.float32)
        if wrong := [t for t in self.tokens if not -n <= t < n]:
            raise ShapeError(f"{name}: there is no token {wrong[0]} in a run of {n}")
        chosen = np.zeros(shape, np.float32)
        chosen[list(self.tokens)] = 1
        return chosen


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
        return any(fnmatchcase(name, p) for p in self.all_patterns)

    @property
    def all_patterns(self) -> tuple[str, ...]:
        """Of what is read, then of what is changed."""
        return *self.patterns, *(e.pattern for e in self.edits)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """x, or what the edits make of it."""
        if name in self.names:
            raise AssertionError(f"two activations are named {name}")
        self.names.append(name)
        for edit in self.edits:
            if fnmatchcase(name, edit.pattern):
                x = edit(name, x)
        if any(fnmatchcase(name, p) for p in self.patterns):
            self.read[name] = x
        return x


def edits(
    scale: Mapping[str, float] | None = None,
    add: Mapping[str, Numbers] | None = None,
    replace: Mapping[str, Numbers] | None = None,
    tokens: Iterable[int] | None = None,
) -> list[Edit]:
    """The edits that `Model.trace` names. Raises ConfigError for numbers that are not finite."""
    rows = None if tokens is None else tuple(int(t) for t in tokens)
    made = [Edit(p, float(s), None, rows) for p, s in (scale or {}).items()]
    made += [Edit(p, 1.0, np.asarray(a, np.float32), rows) for p, a in (add or {}).items()]
    made += [Edit(p, 0.0, np.asarray(a, np.float32), rows) for p, a in (replace or {}).items()]
    for e in made:
        addend = np.zeros(1) if e.addend is None else e.addend
        if not (np.isfinite(e.factor) and np.isfinite(addend).all()):
            raise ConfigError(f"{e.pattern}: its numbers are not finite")
    return made


def check_names(patterns: Iterable[str], known: Sequence[str]) -> None:
    """ConfigError for patterns that are no name of a known activation."""
    strangers = [p for p in patterns if not any(fnmatchcase(name, p) for name in known)]
    if strangers:
        some = ", ".join([*known[:6], "…", *known[-3:]])
        raise ConfigError(
            f"no activation is named {', '.join(dict.fromkeys(strangers))}; there are {some}"
        )
