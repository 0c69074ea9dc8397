"""A model and its cache: tokens in, the logits of the last one out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyggml.errors import ConfigError, DataError
from pyggml.model import Model, fill
from pyggml.models import Cache, Inputs, build
from pyggml.schedule import ScheduledProgram
from pyggml.tensor import Tensor

PROMPT_BATCH = 512  # prompt tokens in one pass, llama.cpp's ubatch


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
