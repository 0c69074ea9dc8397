"""What each block would predict of a text, as a table: by the logit lens, and by a tuned one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape

import numpy as np

from pyggml.lab.linear import exact
from pyggml.lab.tuned_lens import TunedLens
from pyggml.look.draw import tokens
from pyggml.look.lens import log_softmax, stream_logits
from pyggml.model import Model
from pyggml.models.texts import Ids

_CELL, _MOST_COLUMNS = 10, 6  # characters of a token, and tokens that are printed


@dataclass(frozen=True, slots=True, eq=False)
class LensRows:
    """What each block predicts of T tokens.

    top         (n_blocks, T) int32: the most probable next token
    share       (n_blocks, T) float32: its probability
    divergence  (n_blocks, T) float64: KL(p ‖ q) of the model's own prediction p from the block's q,
                in nats
    """

    top: np.ndarray
    share: np.ndarray
    divergence: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class LensTable:
    """A text of T tokens by lens, "logit" and perhaps "tuned".

    pieces   the text of each token
    words    of the tokens that are predicted, by id
    """

    pieces: tuple[str, ...]
    words: Mapping[int, str]
    lenses: Mapping[str, LensRows]

    def __str__(self) -> str:
        """The last tokens of the text, 80 columns; `draw` has all."""
        first = max(len(self.pieces) - _MOST_COLUMNS, 0)
        heads = "".join(f"{_short(p):<{_CELL}}" for p in self.pieces[first:])
        parts = []
        for name, rows in self.lenses.items():
            lines = [f"{name:<8}{'KL':>7}  after {heads}".rstrip()]
            for i, (top, divergence) in enumerate(zip(rows.top, rows.divergence, strict=True)):
                cells = "".join(f"{_short(self.words[int(t)]):<{_CELL}}" for t in top[first:])
                lines.append(f"blk.{i:<4}{divergence.mean():7.3f}        {cells}".rstrip())
            parts.append("\n".join(lines))
        return "\n\n".join(parts)

    def draw(self) -> str:
        """HTML: a row a block, a column a token, coloured by the prediction's probability."""
        tables = "".join(map(self._table, self.lenses))
        return f'<style>{tokens.STYLE}</style><div class="tokens">{tables}</div>'

    def _table(self, name: str) -> str:
        rows = self.lenses[name]
        head = "".join(f"<th>{_mark(p)}</th>" for p in ("", "KL", *self.pieces))
        body = "".join(
            f"<tr><th>blk.{i}</th><td>{rows.divergence[i].mean():.3f}</td>"
            f"{''.join(self._cells(rows, i))}</tr>"
            for i in reversed(range(len(rows.top)))
        )
        return f"<table><caption>{name} lens</caption><tr>{head}</tr>{body}</table>"

    def _cells(self, rows: LensRows, i: int) -> Iterator[str]:
        numbers = zip(rows.top[i], rows.share[i], rows.divergence[i], strict=True)
        for top, share, divergence in numbers:
            level = int(share * len(tokens.LEVELS))
            about = f"probability {share:.3f}, KL {divergence:.3f}"
            yield f'<td class="t{level}" title="{about}">{_mark(self.words[int(top)])}</td>'

    def _repr_html_(self) -> str:
        return self.draw()


def lens_table(model: Model, ids: Ids, tuned: TunedLens | None = None) -> LensTable:
    """What each block predicts after each of the tokens ids (T,), by the logit lens and by a tuned
    one if there is one, beside what the model does.

    Raises ConfigError for a lens that does not fit the model, and what `Model.logits` does.
    """
    if tuned is not None:
        tuned.check(model)
    model = exact(model)
    names = [f"blk.{i}.out" for i in range(model.config.n_layer)]
    with model.trace(*names) as t:
        last = model.logits(ids)
    lenses = {"logit": [t[n] for n in names]}
    if tuned is not None:
        lenses["tuned"] = [tuned.translate(i, t[n]) for i, n in enumerate(names)]
    rows = {
        name: _rows([_compare(last, stream_logits(model, h)) for h in streams])
        for name, streams in lenses.items()
    }
    spell = model.tokenizer.token_bytes
    pieces = tokens.texts([spell(int(i), special=True) for i in ids])
    tokens_shown = np.unique(np.concatenate([r.top.reshape(-1) for r in rows.values()])).tolist()
    words = {i: "".join(tokens.texts([spell(i, special=True)])) for i in tokens_shown}
    return LensTable(tuple(pieces), words, rows)


Compared = tuple[np.ndarray, np.ndarray, np.ndarray]


def _rows(blocks: list[Compared]) -> LensRows:
    top, share, divergence = map(np.stack, zip(*blocks, strict=True))
    return LensRows(top, share, divergence)


def _compare(ours: np.ndarray, theirs: np.ndarray) -> Compared:
    """Of logits (T, n_vocab) of the model and of a lens: the lens's top token and its probability,
    and KL(p ‖ q), each (T,)."""
    top, share, divergence = np.empty(len(ours), np.int32), np.empty(len(ours), np.float32), []
    for t, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        log_p, log_q = map(log_softmax, (mine, its))
        top[t] = its.argmax()
        share[t] = np.exp(log_q[top[t]])
        divergence.append(float(np.exp(log_p) @ (log_p - log_q)))
    return top, share, np.array(divergence)


def _short(piece: str) -> str:
    shown = tokens.signs(piece).replace("\n", "")
    return shown if len(shown) < _CELL else f"{shown[: _CELL - 2]}…"


def _mark(piece: str) -> str:
    return escape(tokens.signs(piece).replace("\n", ""))
