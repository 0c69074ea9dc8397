"""A circuit: edges between the parts of a model, with their scores; pruned, told and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np

from pyggml.errors import ConfigError
from pyggml.look.draw.edges import edges_picture

MOST_DRAWN = 400


@dataclass(frozen=True, slots=True, eq=False)
class Circuit:
    """Edges from senders to receivers.

    senders    names (S,) of what adds to the residual stream, the embedding first
    receivers  names (R,) of what reads it, the logits last
    scores     (S, R) float64, NaN where there is no edge
    feeds      of each receiver, the numbers of the senders that are made of what it reads
    """

    senders: Sequence[str]
    receivers: Sequence[str]
    scores: np.ndarray
    feeds: Sequence[Sequence[int]]

    @property
    def n_edges(self) -> int:
        return int((~np.isnan(self.scores)).sum())

    @property
    def _sizes(self) -> np.ndarray:
        """|scores|, below all others where there is no edge."""
        return np.nan_to_num(np.abs(self.scores), nan=-1.0)

    @property
    def parts(self) -> list[str]:
        """The senders that have an edge."""
        there = ~np.isnan(self.scores)
        return [name for name, row in zip(self.senders, there, strict=True) if row.any()]

    def top(self, n: int = 10) -> list[tuple[str, str, float]]:
        """The n edges with the largest scores by size: sender, receiver, score."""
        order = np.argsort(-self._sizes, axis=None, kind="stable")
        edges = np.stack(np.unravel_index(order[: min(n, self.n_edges)], self.scores.shape), axis=1)
        return [(self.senders[s], self.receivers[r], float(self.scores[s, r])) for s, r in edges]

    def prune(self, threshold: float = 0.0, n_edges: int | None = None) -> Circuit:
        """The edges whose scores are at least `threshold` by size, or so many of the largest; and
        of these, those on a way from the embedding to the logits.

        Raises ConfigError for a threshold or a number below 0.
        """
        if threshold < 0 or (n_edges is not None and n_edges < 0):
            raise ConfigError(
                f"prune takes a threshold and a number of edges of 0 or more, not {threshold} and "
                f"{n_edges}"
            )
        size = self._sizes
        kept = size >= threshold
        if n_edges is not None:
            order = np.argsort(-size, axis=None, kind="stable")[:n_edges]
            chosen = np.zeros(size.size, bool)
            chosen[order] = True
            kept &= chosen.reshape(size.shape)
        return replace(self, scores=np.where(self._on_a_way(kept), self.scores, np.nan))

    def _on_a_way(self, kept: np.ndarray) -> np.ndarray:
        """Of edges (S, R) bool, those that lead from the embedding to the logits."""
        feeds = np.zeros(kept.T.shape, bool)
        for r, senders in enumerate(self.feeds):
            feeds[r, list(senders)] = True
        start, end = np.arange(len(self.senders)) == 0, np.arange(len(self.receivers)) + 1
        while True:
            heard = start | (kept.any(axis=0) @ feeds)
            used = (end == len(end)) | (feeds @ kept.any(axis=1))
            on_a_way = kept & heard[:, None] & used
            if (on_a_way == kept).all():
                return kept
            kept = on_a_way

    def __str__(self) -> str:
        lines = [f"{x:+9.4f}  {s} → {r}" for s, r, x in self.top(20)]
        more = self.n_edges - len(lines)
        head = f"{self.n_edges:,} edges, the largest first"
        return "\n".join([head, *lines, *[f"and {more:,} more"] * (more > 0)])

    def draw(self) -> str:
        """An SVG picture, from the embedding below to the logits above. ConfigError for more than
        400 edges, of which none can be seen."""
        if self.n_edges > MOST_DRAWN:
            raise ConfigError(
                f"{self.n_edges:,} edges, at most {MOST_DRAWN} can be seen: prune(n_edges=50) first"
            )
        there = ~np.isnan(self.scores)
        links = [
            (name, self.senders[s])
            for r, name in enumerate(self.receivers)
            for s in self.feeds[r]
            if there[:, r].any() and there[s].any()
        ]
        return edges_picture(self.top(self.n_edges), links)

    def _repr_html_(self) -> str:
        few = self.n_edges <= MOST_DRAWN
        return self.draw() if few else f"<pre>{escape(str(self))}</pre>"
