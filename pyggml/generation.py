"""Text from a model: a prompt fills the key-value cache, then one token follows the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.errors import ConfigError, DataError, Fault
from pyggml.model import Model, fill
from pyggml.models import Cache, Inputs, build
from pyggml.runtime import Program
from pyggml.tensor import Tensor

PROMPT_CHUNK = 512  # tokens of the prompt that one pass takes


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 takes the likeliest token; top_k 0 and top_p 1 cut nothing off."""

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        faults: list[Fault] = []
        if not 0 <= self.temperature <= 100:
            faults.append(("temperature", f"is {self.temperature}, wanted 0 to 100"))
        if self.top_k < 0:
            faults.append(("top_k", f"is {self.top_k}, wanted 0 or more"))
        if not 0 < self.top_p <= 1:
            faults.append(("top_p", f"is {self.top_p}, wanted above 0 and at most 1"))
        if self.seed < 0:
            faults.append(("seed", f"is {self.seed}, wanted 0 or more"))
        if faults:
            raise ConfigError(faults)


def sample(logits: np.ndarray, how: Sampling, rng: np.random.Generator) -> int:
    """One token id from logits (n_vocab,); those of -inf are never taken.

    Raises DataError if the greatest is NaN or infinite, so that there is nothing to choose by.
    """
    if not np.isfinite(greatest := logits.max()):
        raise DataError(
            f"the greatest logit is {greatest}, wanted a finite number: the model's "
            "weights or its adapter make no numbers"
        )
    if how.temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")[: how.top_k or None]
    z = logits[order].astype(np.float64)
    with np.errstate(over="ignore"):  # next to temperature 0 all but the likeliest are at -inf
        p = np.exp((z - z[0]) / how.temperature)
    p /= p.sum()
    kept = int(np.searchsorted(np.cumsum(p), how.top_p)) + 1
    p = p[:kept] / p[:kept].sum()
    return int(order[rng.choice(len(p), p=p)])


class Session:
    """A model with a cache of `n_ctx` tokens; tokens go in, logits of the last one come out."""

    def __init__(self, model: Model, n_ctx: int) -> None:
        """Raises ConfigError for a cache without rows."""
        if n_ctx < 1:
            raise ConfigError([("n_ctx", f"is {n_ctx}, wanted at least 1")])
        self.model, self.n_ctx, self.n_past = model, n_ctx, 0
        state = model.parts.decoder.state(n_ctx)
        self.cache = Cache.empty(state, n_ctx, exact=model.compute == "f32")
        self._programs: dict[int, tuple[Program, Inputs, Tensor]] = {}

    def feed(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Logits float32 (n_vocab,) after the last of these tokens.

        Raises DataError if they do not fit into the cache or are outside the vocabulary.
        """
        ids = self.model.checked(tokens)
        if self.n_past + len(ids) > self.n_ctx:
            raise DataError(
                f"{self.n_past} + {len(ids)} tokens do not fit into a context of {self.n_ctx}"
            )
        for first in range(0, len(ids), PROMPT_CHUNK):
            some = ids[first : first + PROMPT_CHUNK]
            program, inputs, out = self._program(len(some))
            fill(inputs, some, self.n_past)
            program()
            self.n_past += len(some)
        logits: np.ndarray = program.read(out)[0]
        return logits

    def _program(self, n_tokens: int) -> tuple[Program, Inputs, Tensor]:
        """The graph for this many tokens; only the last one's logits are computed.

        It is bound once: what a later call changes are the numbers of its inputs. Those of one
        token and of whole chunks stay; of other lengths, which prompts end with, only the last.
        """
        if n_tokens not in self._programs:
            for odd in self._programs.keys() - {1, PROMPT_CHUNK}:
                del self._programs[odd]
            inputs = Inputs.empty(n_tokens)
            parts = self.model.parts
            out = build(parts, inputs, self.model.adapters, self.cache, last_only=True)
            program, _ = self.model.program(out)
            self._programs[n_tokens] = (program, inputs, out)
        return self._programs[n_tokens]


def generate(
    model: Model,
    prompt: Sequence[int] | np.ndarray,
    n_tokens: int,
    how: Sampling | None = None,
    n_ctx: int | None = None,
) -> Iterator[int]:
    """Token ids, one at a time, until an end-of-generation token or `n_tokens` of them.

    n_ctx: cache rows (default: as many as needed). Raises ConfigError for counts out of range,
    DataError for an empty prompt and where a token does not fit into the cache.
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
