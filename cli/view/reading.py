"""A text as the model reads it: how surprising each token is, and what attends to what."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import Any

import numpy as np

from pyggml import lens
from pyggml.cli.view.source import Watched
from pyggml.errors import ConfigError, DataError
from pyggml.model import Model

MOST_CHARACTERS = 20_000
_MOST_TOKENS = 512
_MOST_LOGITS = 1 << 25  # of all tokens together: 256 MiB where they are float64
_MOST_MAPPED = 128  # tokens of an attention map


def losses(model: Model, text: str, stop: Event) -> dict[str, Any]:
    """The tokens of a text, and −log p of each but the first. Raises DataError for one of too many
    tokens, or too few."""
    most = min(_MOST_TOKENS, model.config.n_ctx, max(_MOST_LOGITS // model.config.n_vocab, 2))
    ids = _ids(model, text, most)
    found = lens.token_losses(Watched(model, stop), ids)
    return {"tokens": _shown(model, ids), "losses": _rounded(found, 5), "mean": float(found.mean())}


def attention(model: Model, text: str, block: int, stop: Event) -> dict[str, Any]:
    """How much each token attends to each earlier one, by head: [head][reader][read]. Raises
    DataError as `losses` does, and ConfigError for a block without attention."""
    if not 0 <= block < model.config.n_layer:
        raise ConfigError(f"block is {block}, wanted 0 to {model.config.n_layer - 1}")
    ids = _ids(model, text, min(_MOST_MAPPED, model.config.n_ctx))
    (maps,) = lens.attention_maps(Watched(model, stop), ids, [block])
    rows = [[_rounded(row[: i + 1], 4) for i, row in enumerate(head)] for head in maps]
    return {"tokens": _shown(model, ids), "maps": rows}


def _ids(model: Model, text: str, most: int) -> list[int]:
    ids = model.tokenizer.encode(text, parse_special=True)
    if not 2 <= len(ids) <= most:
        raise DataError(f"the text has {len(ids)} tokens, wanted 2 to {most}")
    return ids


def _shown(model: Model, ids: Sequence[int]) -> list[str]:
    return [model.tokenizer.token_bytes(i, special=True).decode("utf-8", "replace") for i in ids]


def _rounded(a: np.ndarray, digits: int) -> list[float]:
    return [round(float(x), digits) for x in a]
