"""A text as the model reads it: how surprising each token is, and what attends to what."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pyggml.cli.commands.view.queries import TextQuery
from pyggml.cli.terminal.show import plural
from pyggml.cli.web.errors import ApiError
from pyggml.errors import ConfigError, DataError
from pyggml.look import lens
from pyggml.look.draw import tokens
from pyggml.model import Model

SAMPLE = "The cat sat on the mat, and the dog looked at the cat. Then the dog sat on the mat."
_MOST_TOKENS = 512
_MOST_LOGITS = 1 << 26  # of all tokens together: 256 MiB
_MOST_MAPPED = 128  # tokens of an attention map


def losses(model: Model, question: TextQuery) -> dict[str, Any]:
    """The first tokens of a text, as many as are read, with their losses as colours, and each in
    words. Raises DataError for a text of one token."""
    most = min(_MOST_TOKENS, model.config.n_ctx, max(_MOST_LOGITS // model.config.n_vocab, 2))
    ids, n_all = ids_of(model, question.text, most)
    table, pieces = lens.token_table(model, ids), pieces_of(model, ids)
    return {
        "n_tokens": len(ids),
        "n_all": n_all,
        "loss": table.loss,
        "html": tokens.fragment(table, pieces),
        "about": [tokens.about_token(table, pieces, i) for i in range(len(ids))],
    }


def attention(model: Model, question: TextQuery) -> dict[str, Any]:
    """How much each token attends to each earlier one, by head: [head][reader][read]. Raises
    DataError as `losses` does, ConfigError for a block without attention, ApiError for none."""
    block = question.block
    if block is None:
        raise ApiError(400, "block is missing, wanted a whole number", "block")
    if not 0 <= block < model.config.n_layer:
        raise ConfigError(f"block is {block}, wanted 0 to {model.config.n_layer - 1}")
    ids, n_all = ids_of(model, question.text, min(_MOST_MAPPED, model.config.n_ctx))
    (maps,) = lens.attention_maps(model, ids, [block])
    rows = [[_round(row[: i + 1], 4) for i, row in enumerate(head)] for head in maps]
    return {"n_tokens": len(ids), "n_all": n_all, "tokens": texts_of(model, ids), "maps": rows}


def ids_of(model: Model, text: str, most: int) -> tuple[list[int], int]:
    """The first tokens of a text, and how many it has."""
    ids = model.tokenizer.encode_prompt(text)
    if len(ids) < 2:
        raise DataError(f"the text has {plural(len(ids), 'token')}, wanted at least 2")
    return ids[:most], len(ids)


def texts_of(model: Model, ids: Sequence[int]) -> list[str]:
    """The tokens as they are shown, white space by signs."""
    return [tokens.signs(text) for text in tokens.texts(pieces_of(model, ids))]


def pieces_of(model: Model, ids: Sequence[int]) -> list[bytes]:
    return [model.tokenizer.token_bytes(i, special=True) for i in ids]


def _round(a: np.ndarray, digits: int) -> list[float]:
    return [round(float(x), digits) for x in a]
