"""What the activations of a text tell: a grid of heads, the logit lens, what adds to a logit, what
a patch moves, and an adapter beside its base."""

from base64 import b64encode
from collections.abc import Sequence
from math import isqrt
from typing import Any

import numpy as np

from pyggml.cli.commands.view.queries import TextQuery
from pyggml.cli.commands.view.reading import ids_of, texts_of
from pyggml.cli.terminal.show import plural
from pyggml.cli.web.errors import ApiError
from pyggml.errors import ConfigError, DataError
from pyggml.files.json_text import finite
from pyggml.look import lens
from pyggml.look.draw import tokens
from pyggml.model import Model

_MOST_TOKENS = 64  # of a table of blocks by positions
_MOST_COMPARED = 256
_MOST_POINTS = 1 << 20  # of the maps of all heads together
_BEST = 5  # tokens that are named at a position
_MOVED = 10  # whose logits a patch has moved


def heads(model: Model, question: TextQuery) -> dict[str, Any]:
    """The attention of every head of every block, small: rows of T² bytes in base64, of which 255
    is the whole attention and the scale that of its root. Raises ConfigError for a model without
    attention."""
    activations = model.activations
    names = [n for n in activations if n.startswith("blk.") and n.endswith(".attn_pattern")]
    if not names:
        raise ConfigError("no block of this model has attention")
    n_maps = max(sum(".attn_head." in n for n in activations), 1)
    most = min(_MOST_TOKENS, model.config.n_ctx, max(isqrt(_MOST_POINTS // n_maps), 2))
    ids, n_all = ids_of(model, question.text, most)
    with model.trace(*names) as t:
        model.logits(ids)
    roots = (np.sqrt(np.clip(t[name].transpose(1, 0, 2), 0, 1)) for name in names)
    maps = [np.ascontiguousarray(np.rint(255 * root).astype(np.uint8)) for root in roots]
    blocks = [
        {"block": int(name.split(".")[1]), "heads": [b64encode(head).decode() for head in each]}
        for name, each in zip(names, maps, strict=True)
    ]
    return _read(model, ids, n_all) | {"blocks": blocks}


def logit_lens(model: Model, question: TextQuery) -> dict[str, Any]:
    """What every block would choose after each token if it were the last: [block][position] of
    [token, probability], the best first."""
    ids, n_all = _short(model, question.text)
    best, p = lens.lens_choices(model, ids, _BEST)
    rows = [_choices(model, *row) for row in zip(best, p, strict=True)]
    return _read(model, ids, n_all) | {"rows": rows, "rounds": model.rounds}


def attribution(model: Model, question: TextQuery) -> dict[str, Any]:
    """Of the token that the model chooses after a position: what each part adds to its logit, and
    how much each token before it does, to first order."""
    ids, n_all = _short(model, question.text)
    at = _position(question, len(ids))
    ids_before = ids[: at + 1]
    (best,), (p,) = lens.choices(model.logits(ids_before)[-1:], _BEST)
    token = int(best[0])
    parts = lens.logit_attribution(model, ids_before, token)
    shares = lens.gradient_x_activation(
        model, ids_before, "token_embd", metric=lambda t: t["logits"][-1, token]
    )
    return _read(model, ids, n_all) | {
        "at": at,
        "best": _likeliest_tokens(model, best, p),
        "parts": [[name, finite(value)] for name, value in parts.items()],
        "shares": [finite(x) for x in shares["token_embd"]],
        "rounds": model.rounds,
    }


def patch(model: Model, question: TextQuery) -> dict[str, Any]:
    """What moves if an activation at a position were that of another text of as many tokens, or 0
    without one: the logits after the last token, and at every position how far its probabilities
    go (the divergence of Kullback and Leibler, in nats)."""
    ids, n_all = _short(model, question.text)
    at = _position(question, len(ids))
    if not question.name:
        raise ApiError(400, "name is missing, wanted an activation's, such as blk.0.out", "name")
    before = model.logits(ids)
    if question.other:
        other_ids = model.tokenizer.encode_prompt(question.other)
        if len(other_ids) < len(ids) or (len(other_ids) > len(ids) and n_all == len(ids)):
            raise DataError(
                f"the other text has {plural(len(other_ids), 'token')}, wanted {len(ids)} as the "
                "text has, or no other text"
            )
        other_ids = other_ids[: len(ids)]  # of both the first are read
        after = lens.patch(model, ids, other_ids, question.name, tokens=[at])
    else:
        with model.trace(scale={question.name: 0.0}, tokens=[at]):
            after = model.logits(ids)
    logs = [[lens.log_softmax(row) for row in rows] for rows in (before, after)]
    moved = [float(np.sum(np.exp(a) * (a - b))) for a, b in zip(*logs, strict=True)]
    return _read(model, ids, n_all) | {
        "at": at,
        "name": question.name,
        "moved": moved,
        "logits": _largest_moves(model, before[-1], after[-1]),
        "rounds": model.rounds,
    }


def _largest_moves(model: Model, before: np.ndarray, after: np.ndarray) -> list[list[Any]]:
    """Tokens that were or are probable, by how far their logits moved: [token, logit before, after,
    probability before, after]."""
    best = dict.fromkeys(int(i) for row in (before, after) for i in np.argsort(-row)[: _MOVED // 2])
    p = [np.exp(lens.log_softmax(row)) for row in (before, after)]
    lines = [[i, before[i], after[i], p[0][i], p[1][i]] for i in best]
    return [[_token(model, i), *map(float, numbers)] for i, *numbers in lines]


def compare(base: Model, model: Model, question: TextQuery) -> dict[str, Any]:
    """The losses of a text and the choices after each token, of the file alone and with the run's
    adapter. Raises DataError where the two split the text otherwise."""
    ids, n_all = ids_of(base, question.text, min(_MOST_COMPARED, base.config.n_ctx))
    if ids_of(model, question.text, len(ids))[0] != ids:
        raise DataError("the two models split this text into other tokens: nothing to compare")
    sides = [_side(each, ids) for each in (base, model)]
    return _read(base, ids, n_all) | {"base": sides[0], "adapted": sides[1]}


def _side(model: Model, ids: Sequence[int]) -> dict[str, Any]:
    logits, targets = model.logits(ids), np.asarray(ids[1:])
    losses, _ = lens.losses_and_ranks(logits[:-1], targets)
    best, p = lens.choices(logits, _BEST)
    return {
        "losses": [None, *(round(float(x), 4) for x in losses)],
        "loss": float(losses.mean()),
        "best": _choices(model, best, p),
    }


def _short(model: Model, text: str) -> tuple[list[int], int]:
    return ids_of(model, text, min(_MOST_TOKENS, model.config.n_ctx))


def _read(model: Model, ids: Sequence[int], n_all: int) -> dict[str, Any]:
    return {"n_tokens": len(ids), "n_all": n_all, "tokens": texts_of(model, ids)}


def _position(question: TextQuery, n: int) -> int:
    at = n - 1 if question.at is None else question.at
    if not 0 <= at < n:
        raise DataError(f"at is {at}, wanted a position of the {n} tokens that are read, from 0")
    return at


def _choices(model: Model, best: np.ndarray, p: np.ndarray) -> list[list[list[Any]]]:
    """Of each position the tokens that are chosen after it."""
    return [_likeliest_tokens(model, *cell) for cell in zip(best, p, strict=True)]


def _likeliest_tokens(model: Model, ids: np.ndarray, p: np.ndarray) -> list[list[Any]]:
    """Tokens with their probabilities."""
    return [[_token(model, int(i)), float(f"{x:.4g}")] for i, x in zip(ids, p, strict=True)]


def _token(model: Model, i: int) -> str:
    (text,) = tokens.texts([model.tokenizer.token_bytes(i, special=True)])
    return tokens.signs(text)
