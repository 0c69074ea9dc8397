"""Which tokens of which requests go into the next pass through the model.

A pass takes one token of every answer that is under way, and beside them a chunk of the prompts
that are not read yet (pyggml.generation.serving.chunks), so that a long prompt slows those who
write down but does not stop them. Requests begin in the order in which they came, as slots become
free.

In a deterministic batch the company of others changes no chunk: prompts are read one after the
other, and each in the passes that it would have alone.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from pyggml.errors import PyggmlError
from pyggml.generation import Batch, Piece, Slot
from pyggml.generation.batch import check_shift
from pyggml.generation.passes import MOST_TOKENS, in_whole_passes
from pyggml.generation.sampler import logprobs
from pyggml.generation.serving.chunks import PREFILL_READ, Chunks
from pyggml.generation.serving.request import (
    Failure,
    ReadPrompt,
    Request,
    RequestExpired,
    expiry_failure,
)
from pyggml.generation.speculation import Speculator
from pyggml.model import Model

WORTH_WAITING = 32  # tokens of a prompt that another request is about to compute


@dataclass(eq=False, slots=True)
class _Active:
    """A request with a slot. pending: (n,) int32, what the slot is to be fed, at least a token.
    read: what is to be told of the prompt."""

    request: Request
    slot: Slot
    pending: np.ndarray
    read: list[Piece] = field(default_factory=list)

    @property
    def writes(self) -> bool:
        return bool(self.request.completion.tokens)

    @property
    def reads(self) -> bool:
        """Whether the tokens of its prompt are to be told, and it is not read yet."""
        return self.request.n_likeliest is not None and not self.writes

    @property
    def n_left(self) -> int:
        """How many tokens of its prompt are not read."""
        return len(self.pending)

    @property
    def n_new(self) -> int:
        """How many tokens of its prompt were not in the cache."""
        return len(self.request.prompt) - self.request.n_cached

    def note(self, logits: np.ndarray) -> None:
        """Note the log-probabilities of the next tokens of the prompt, from logits (n, n_vocab)."""
        n, prompt = self.request.n_likeliest or 0, self.request.prompt
        first = len(prompt) - len(self.pending) + 1
        if not self.read:
            self.read.append(Piece("", int(prompt[0])))
        for row, token in zip(logits, prompt[first:], strict=False):
            self.read.append(Piece("", int(token), None, *logprobs(row, int(token), n)))


class Scheduler:
    """Requests over a batch; for one thread."""

    def __init__(self, batch: Batch, n_keep: int | None = None, draft: Model | None = None) -> None:
        """n_keep: a full context shifts and keeps its first n_keep tokens (Slot.shift); None: it
        ends the answer. draft: a smaller model that guesses tokens (pyggml.generation.speculation).

        Raises ConfigError for a context that cannot shift, and as a Speculator does.
        """
        if n_keep is not None:
            check_shift(batch.model, batch.n_ctx, n_keep)
        self._batch, self._n_keep = batch, n_keep
        self._speculator = Speculator(batch, draft)
        self._chunks = Chunks()
        self._waiting: deque[Request] = deque()
        self._active: list[_Active] = []

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def n_active(self) -> int:
        return len(self._active)

    @property
    def slots(self) -> Sequence[Slot]:
        """The places of the batch."""
        return self._batch.slots

    @property
    def model(self) -> Model:
        """The batch's."""
        return self._batch.model

    @property
    def n_bytes(self) -> int:
        """The memory that it would like to have: of the model's weights and of the cache."""
        weights = self.model.parts.weights.values()
        return sum(w.n_bytes for w in weights) + self._batch.memory.n_bytes

    def release(self) -> None:
        """Free the caches; no request can be submitted any more."""
        self._speculator.release()
        self._batch.release()

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request, and free its slot. Nothing happens if it has ended."""
        if request in self._waiting:
            self._waiting.remove(request)
        for active in [a for a in self._active if a.request is request]:
            self._release(active)

    def step(self) -> bool:
        """Make one pass and tell what came of it; False if there is nothing left to do."""
        self._expire()
        self._admit()
        if pieces := self._pieces():
            self._shift(pieces)
            of_slots = self._logits_of(pieces)
            for active, ids in pieces.items():
                logits = of_slots[active.slot]
                if active.reads:
                    active.note(logits)
                    logits = logits[-1:]
                active.pending = active.pending[len(ids) :]
                if not len(active.pending):
                    self._take(active, logits)
        return bool(self._active or self._waiting)

    def _logits_of(self, pieces: Mapping[_Active, np.ndarray]) -> dict[Slot, np.ndarray]:
        """The logits of a pass (Speculator.feed), and how long it took."""
        fed = {active.slot: ids for active, ids in pieces.items()}
        answers = {
            active.slot: active.request.completion
            for active, ids in pieces.items()
            if len(ids) == len(active.pending) and not active.reads
        }
        reading = {active.slot for active in pieces if active.reads}
        start = perf_counter()
        logits = self._speculator.feed(fed, answers, reading)
        n_writing = sum(len(ids) for active, ids in pieces.items() if active.writes)
        n_tokens = sum(map(len, pieces.values()))
        self._chunks.note(n_writing, n_tokens, perf_counter() - start)
        return logits

    def fail(self, error: Exception) -> None:
        """End every request with this error."""
        while self._waiting:
            self._waiting.popleft().tell(Failure(error))
        for active in [*self._active]:
            self._end(active, error)

    # -- beginning and end ------------------------------------------------------------------

    def _admit(self) -> None:
        """Give free slots to those who wait, the first ones first."""
        for request in [*self._waiting]:
            if not self._batch.n_free:
                return
            if self._is_computed_now(request):
                continue
            self._waiting.remove(request)
            shared_prompt = () if request.n_likeliest is not None else request.prompt
            slot = self._batch.open(shared_prompt, request.model, request.owner)
            slot.n_coming = len(request.prompt)
            request.n_cached = slot.n_past
            self._active.append(_Active(request, slot, request.prompt[slot.n_past :]))

    def _is_computed_now(self, request: Request) -> bool:
        """Whether another request is about to compute the start of this prompt.

        Then it waits, and copies that: an instruction that many share is computed once.
        """
        if request.n_likeliest is not None:
            return False
        kind = self._kind(request)
        alike = [active for active in self._active if self._kind(active.request) == kind]
        saved = (self._n_to_copy(a.request, request) - a.slot.n_past for a in alike)
        return request.model.batches and max(saved, default=0) >= WORTH_WAITING

    def _kind(self, request: Request) -> tuple[Model, int | None, bool]:
        """What prompts that share their beginning in the cache have alike."""
        return request.model, request.owner, self._batch.is_long(len(request.prompt))

    def _n_to_copy(self, source: Request, target: Request) -> int:
        """How many tokens of a prompt can be copied once another's are computed."""
        n = n_common(source.prompt, target.prompt)
        return in_whole_passes(n) if self._batch.deterministic else n

    def _expire(self) -> None:
        now = time.monotonic()
        for request in [r for r in self._waiting if r.deadline <= now]:
            self._waiting.remove(request)
            request.tell(expiry_failure())
        for active in [a for a in self._active if a.request.deadline <= now]:
            self._end(active, RequestExpired("the request's time has ended"))

    def _end(self, active: _Active, error: Exception) -> None:
        self._release(active)
        active.request.tell(Failure(error))

    def _release(self, active: _Active) -> None:
        self._active.remove(active)
        active.slot.close()

    # -- a pass -----------------------------------------------------------------------------

    def _pieces(self) -> Mapping[_Active, np.ndarray]:
        """The tokens of a pass: one of every answer, and a chunk of the prompts."""
        pieces = {active: active.pending for active in self._active if active.writes}
        reading = [active for active in self._active if not active.writes]
        if self._batch.deterministic:
            return pieces | {active: _next_alone(active) for active in reading[:1]}
        room = self._batch.most_tokens() if reading else 0
        shares = self._chunks.shares(reading, sum(map(len, pieces.values())), room)
        return pieces | {active: active.pending[:n] for active, n in shares.items()}

    def _shift(self, pieces: Mapping[_Active, np.ndarray]) -> None:
        """Make room in full contexts."""
        for slot, n in ((active.slot, len(ids)) for active, ids in pieces.items()):
            if self._n_keep is not None and slot.n_past + n > self._batch.n_ctx:
                slot.shift(self._n_keep)

    def _take(self, active: _Active, logits: np.ndarray) -> None:
        """Tell what came of a slot's last tokens, from the logits (n, n_vocab) of the last of its
        piece and of a draft."""
        if active.reads:
            finish = active.request.completion.finish
            if finish is not None:
                self._release(active)
            active.request.tell(ReadPrompt(tuple(active.read), finish))
            if finish is not None:
                return
        self._sample(active, logits)

    def _sample(self, active: _Active, logits: np.ndarray) -> None:
        completion, pieces = active.request.completion, list[Piece]()
        try:
            for piece in self._verified(active, logits):
                pieces.append(piece)
        except PyggmlError as error:  # logits that are no numbers
            for piece in pieces:
                active.request.tell(piece)
            self._end(active, error)
            return
        if completion.finish is not None:
            self._release(active)
        for piece in pieces:
            active.request.tell(piece)

    def _verified(self, active: _Active, logits: np.ndarray) -> Iterator[Piece]:
        """The pieces that follow; then what is fed next is pending."""
        verified = self._speculator.verify(active.slot, active.request.completion, logits)
        active.pending = np.array((yield from verified), np.int32)


def _next_alone(active: _Active) -> np.ndarray:
    """The tokens of a prompt's next pass, whoever else is there."""
    most = PREFILL_READ if active.reads else MOST_TOKENS
    return active.pending[: most - active.slot.n_past % most]


def n_common(a: np.ndarray, b: np.ndarray) -> int:
    """How many first tokens of two rows are equal."""
    n = min(len(a), len(b))
    same = a[:n] == b[:n]
    return n if same.all() else int(np.argmin(same))
