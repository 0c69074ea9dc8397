"""Text generation: a prompt fills the cache, then tokens are sampled one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.errors import ConfigError, DataError, Fault
from pyggml.model import Model, fill
from pyggml.models import Cache, Inputs, build
from pyggml.schedule import ScheduledProgram
from pyggml.tensor import Tensor

PROMPT_BATCH = 512  # prompt tokens in one pass, llama.cpp's ubatch


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample a token.

    temperature   0 to 100; 0 takes the likeliest token
    top_k         sample from the k likeliest tokens; 0 for all
    top_p         sample from the likeliest tokens with this sum of probabilities; 1 for all
    seed          of the random generator

    Raises ConfigError for values out of range.
    """

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
    """One token id from logits (n_vocab,). Tokens with logit -inf are never sampled.

    Raises DataError if the greatest logit is NaN or infinite.
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
    with np.errstate(over="ignore"):  # near temperature 0 all but the likeliest become -inf
        p = np.exp((z - z[0]) / how.temperature)
    p /= p.sum()
    kept = int(np.searchsorted(np.cumsum(p), how.top_p)) + 1
    p = p[:kept] / p[:kept].sum()
    return int(order[rng.choice(len(p), p=p)])


class Session:
    """A model and a cache for n_ctx tokens: tokens in, logits of the last one out."""

    def __init__(self, model: Model, n_ctx: int) -> None:
        """Raises ConfigError if n_ctx is below 1."""
        if n_ctx < 1:
            raise ConfigError([("n_ctx", f"is {n_ctx}, wanted at least 1")])
        self.model, self.n_ctx, self.n_past = model, n_ctx, 0
        state = model.parts.decoder.state(n_ctx)
        self.cache = Cache.empty(state, n_ctx, exact=model.compute == "f32")
        model.devices.hold(*self.cache.state.values())
        self._programs: dict[int, tuple[ScheduledProgram, Inputs, Tensor]] = {}

    def feed(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Append tokens to the context; returns the logits after the last, float32 (n_vocab,).

        Raises DataError if the tokens exceed the cache or are outside of the vocabulary.
        """
        ids = self.model.checked(tokens)
        if self.n_past + len(ids) > self.n_ctx:
            raise DataError(
                f"{self.n_past} + {len(ids)} tokens do not fit into a context of {self.n_ctx}"
            )
        for first in range(0, len(ids), PROMPT_BATCH):
            batch = ids[first : first + PROMPT_BATCH]
            program, inputs, out = self._program(len(batch))
            fill(inputs, batch, self.n_past)
            program()
            self.n_past += len(batch)
        logits: np.ndarray = program.read(out)[0]
        return logits

    def _program(self, n_tokens: int) -> tuple[ScheduledProgram, Inputs, Tensor]:
        """The program for n_tokens tokens, its inputs and its logits (1, n_vocab).

        A program is bound once; later calls change only the values of its inputs. Programs of one
        token and of full batches are kept, of other lengths only the last one.
        """
        if n_tokens not in self._programs:
            for odd in self._programs.keys() - {1, PROMPT_BATCH}:
                del self._programs[odd]
            inputs = Inputs.empty(n_tokens)
            parts = self.model.parts
            out = build(parts, inputs, self.model.adapters, self.cache, last_only=True)
            self._programs[n_tokens] = (self.model.program(out), inputs, out)
        return self._programs[n_tokens]


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
