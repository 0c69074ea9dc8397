"""A prompt fills the cache, then tokens are sampled one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pyggml.errors import ConfigError
from pyggml.generation.sampling import Sampling, sample
from pyggml.generation.session import Session
from pyggml.model import Model


def generate(
    model: Model,
    prompt: Sequence[int] | np.ndarray,
    n_tokens: int,
    how: Sampling | None = None,
    n_ctx: int | None = None,
) -> Iterator[int]:
    """Token ids one at a time, up to n_tokens or an end-of-generation token (not included).

    n_ctx: rows of the cache, by default as many as needed. Raises ConfigError for counts out of
    range, DataError for an empty prompt or more tokens than the cache has rows.
    """
    how = how or Sampling()
    if n_tokens < 0:
        raise ConfigError([("n_tokens", f"is {n_tokens}, wanted 0 or more")])
    session = Session(model, len(prompt) + max(n_tokens, 1) if n_ctx is None else n_ctx)
    rng = np.random.default_rng(how.seed)
    logits = session.feed(prompt)
    for i in range(n_tokens):
        token = sample(logits, how, rng)
        if model.tokenizer.is_eog(token):
            return
        yield token
        if i + 1 < n_tokens:
            logits = session.feed([token])
