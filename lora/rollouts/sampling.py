"""A prompt → a group of answers, by the batched generation that serves requests.

The prompt is read once; the other sequences copy what the cache has of it. The adapters are read
where they train, so answers are those of the last step's model. Answers are drawn from the whole
distribution softmax(logits / temperature), whose log-probabilities are noted.

A group's passes hold its own sequences alone, and begin with an empty cache. So the bits of its
answers follow from the model, the prompt and the seeds, whatever else was sampled and where.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pyggml.generation import Batch, Completion, Finish, Sampling, Slot
from pyggml.generation.sampler import logprobs
from pyggml.model import Model
from pyggml.runtime import Arenas

_LINE = 64  # bytes that a cache may lose by its place in an arena
_WHOLE = Sampling(top_k=0, top_p=1.0, min_p=0.0)


@dataclass(frozen=True, slots=True, eq=False)
class SampledAnswer:
    """An answer of n tokens.

    ids         (n,) int32, the token that ends it among them
    log_probs   (n,) float32, of each after those before it
    is_cut      whether no token ends it: it has as many as it may
    """

    ids: np.ndarray
    log_probs: np.ndarray
    is_cut: bool

    def __len__(self) -> int:
        return len(self.ids)

    def text(self, model: Model) -> str:
        """What it says, without the token that ends it."""
        return model.tokenizer.decode(self.ids if self.is_cut else self.ids[:-1])


class _Writing:
    """An answer under way."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._ids, self._log_probs = list[int](), list[float]()

    def take(self, logits: np.ndarray) -> int | None:
        """The next token, drawn from the logits (n_vocab,); None if the answer has ended."""
        piece = self._completion.take(logits)
        log_prob, _ = logprobs(logits / self._completion.how.temperature, piece.token, 0)
        self._ids.append(piece.token)
        self._log_probs.append(log_prob)
        return None if piece.finish is not None else piece.token

    @property
    def answer(self) -> SampledAnswer:
        arrays = np.array(self._ids, np.int32), np.array(self._log_probs, np.float32)
        return SampledAnswer(*arrays, self._completion.finish is not Finish.STOP_TOKEN)


class GroupSampler:
    """Samples groups of up to n answers; prompt and answer have n_ctx + 1 tokens at most, the
    answer n_tokens. temperature: above 0, divides the logits."""

    def __init__(
        self, model: Model, n: int, n_ctx: int, n_tokens: int, temperature: float = 1.0
    ) -> None:
        self.model, self._n, self._n_ctx, self._n_tokens = model, n, n_ctx, n_tokens
        self._how = replace(_WHOLE, temperature=temperature)
        self._batch: Batch | None = None
        self._cache: np.ndarray | None = None  # its memory, if that is a part of an arena

    @property
    def n_bytes(self) -> int:
        """Bytes of the host's arena that its programs and its cache take: of the cache none where
        other devices hold it."""
        batch = Batch(self.model, self._n, self._n_ctx)
        n = batch.n_bytes_of_pass(self._n_ctx)
        n += batch.memory.n_bytes_aligned + _LINE if self._is_on_host else 0
        batch.release()
        return n

    @property
    def _is_on_host(self) -> bool:
        return not self.model.devices.have_copies

    def begin(self, arenas: Arenas | None) -> None:
        """Begin a lesson, after other programs may have run in these arenas; None: in memory of
        its own."""
        if self._batch is None:
            self._batch = self._make(arenas)
        elif self._cache is not None:
            self._cache[:] = 0

    def _make(self, arenas: Arenas | None) -> Batch:
        batch = Batch(self.model, self._n, self._n_ctx)
        if arenas is None or not self._is_on_host:
            return batch
        n = batch.memory.n_bytes_aligned
        batch.release()
        rest, self._cache = arenas.split(self.model.devices.host, n)
        return Batch(self.model, self._n, self._n_ctx, arenas=rest, memory=self._cache)

    def sample(self, prompt: np.ndarray, seeds: Sequence[int]) -> list[SampledAnswer]:
        """An answer for each seed. Raises DataError if the greatest logit is NaN or infinite."""
        if self._batch is None:
            self.begin(None)
        assert self._batch is not None
        slots = [self._batch.open() for _ in seeds]
        try:
            return self._write(self._batch, prompt, dict(zip(slots, seeds, strict=True)))
        finally:
            for slot in slots:
                slot.close()

    def _write(
        self, batch: Batch, prompt: np.ndarray, seeds: Mapping[Slot, int]
    ) -> list[SampledAnswer]:
        n = min(self._n_tokens, self._n_ctx + 1 - len(prompt))
        tokenizer = self.model.tokenizer
        writing = {
            slot: _Writing(Completion(tokenizer, replace(self._how, seed=seed), prompt, n))
            for slot, seed in seeds.items()
        }
        first, *rest = writing
        logits = batch.feed({first: prompt})
        for slot in rest:
            slot.copy_prefix(first, len(prompt))
            logits[slot] = logits[first]
        while logits:
            taken = {slot: writing[slot].take(of_slot) for slot, of_slot in logits.items()}
            fed = {slot: [token] for slot, token in taken.items() if token is not None}
            logits = batch.feed(fed) if fed else {}
        return [each.answer for each in writing.values()]


def seeds_of(n: int, *numbers: int) -> list[int]:
    """n seeds that follow from these numbers alone."""
    return [int(word) for word in np.random.SeedSequence(numbers).generate_state(n, np.uint64)]
