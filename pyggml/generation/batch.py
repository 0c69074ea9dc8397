"""Several sequences of one model in one cache and, where the model allows it, in one pass.

    batch = Batch(model, n_slots=8, n_ctx=2048)
    slot = batch.open(prompt)  # slot.tokens: the start of the prompt that was in the cache
    logits = batch.feed({slot: prompt[slot.n_past :], other: [token]})
    logits[slot]  # after its last token, (n_vocab,)
    slot.close()

A pass takes tokens of any sequences: one each of those being written, a piece of a prompt of
another. Sequences with different adapters go in passes of their own, over the same weights and
the same cache. So does each sequence of a model with recurrent parts (Model.batches).

Products of bytes and attention round by how many rows a pass has. So logits differ in their last
bits between passes of other sizes, and near ties may fall otherwise. In a deterministic batch the
passes of a sequence depend on how it is fed alone: it shares none, and begins with what another
left in the cache only as far as passes of MOST_TOKENS made that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np

from pyggml.errors import ConfigError, DataError, Fault
from pyggml.generation import passes
from pyggml.generation.ahead import Coming, runs_ahead
from pyggml.generation.memory import CacheMemory, CacheType, State
from pyggml.generation.sampler import checked_argmax
from pyggml.graph import Graph
from pyggml.model import Model, check_greatest
from pyggml.models import Shift, build_shift
from pyggml.models.build import expect_next_token
from pyggml.runtime import Arenas, Program, bind, schedule

Tokens = Sequence[int] | np.ndarray
_ALL = 1 << 62
_MUCH_FREE = 4 << 30  # bytes of a device, of which a pass of a few thousand tokens takes a part


def check_shift(model: Model, n_past: int, n_keep: int) -> None:
    """ConfigError unless n_past tokens can drop half of those after the first n_keep."""
    if not model.shifts:
        raise ConfigError(
            f"the context of {model.config.architecture} cannot shift: it has states or learned "
            "positions that belong to all tokens so far"
        )
    if not 0 <= n_keep <= n_past - 2:
        raise ConfigError([("keep", f"is {n_keep}, wanted 0 to {n_past - 2} of {n_past} tokens")])


class Slot:
    """A sequence of a batch. `Batch.open` gives one; `close` ends it.

    tokens   the sequence
    model    what reads it: the batch's model, or that with other adapters
    owner    whose it is
    """

    def __init__(self, batch: Batch, number: int) -> None:
        self.batch, self.number, self.model = batch, number, batch.model
        self.tokens: list[int] = []
        self.owner: int | None = None
        self.is_open = False
        self.n_cached = 0  # of the tokens; the others are fed again before new ones
        self.n_kept = _ALL  # tokens whose keys tell of the tokens here alone: a shift ends them
        self.n_whole = 0  # first tokens that passes of MOST_TOKENS made
        self.n_coming = 0  # tokens that it will have at least, of a prompt that is fed in pieces
        self.is_long = False  # whether what is cached has the rotary factors of long sequences
        self.state: State = {}  # of recurrent parts, while another sequence's is in the cache
        self.last_used = 0
        self.n_changes = 0  # how often it was fed, cut or closed: `Batch.greedy` sees others do it

    @property
    def n_past(self) -> int:
        """How many tokens the sequence has."""
        return len(self.tokens)

    @property
    def length(self) -> int:
        """The number of tokens that its rotary factors are chosen by."""
        return max(self.n_past, self.n_coming)

    def extend(self, tokens: list[int]) -> None:
        """Append tokens. What is cached with other rotary factors than the sequence now has is
        forgotten: it is fed anew."""
        self.tokens += tokens
        self.n_changes += 1
        is_long = self.batch.is_long(self.length)
        if is_long != self.is_long:
            self.is_long, self.n_cached, self.n_whole, self.n_kept = is_long, 0, 0, _ALL

    def truncate(self, n: int) -> None:
        """Forget all but the first n tokens.

        Recurrent parts cannot go back: they are fed the n tokens anew, with the next ones. Raises
        ConfigError if there are fewer.
        """
        if not 0 <= n <= self.n_past:
            raise ConfigError([("n", f"is {n}, wanted 0 to {self.n_past}, the tokens there are")])
        del self.tokens[n:]
        self.n_coming = 0
        self.n_changes += 1
        self.n_cached = self._reusable(n)
        self.n_whole = passes.in_whole_passes(min(self.n_whole, self.n_cached))
        if n <= self.n_kept:
            self.n_kept = _ALL

    def copy_prefix(self, other: Slot, n: int) -> None:
        """Become the first n tokens of another slot of the batch, which may be closed.

        Raises ConfigError if it has fewer, or is read by another model.
        """
        if other.batch is not self.batch or other.model is not self.model:
            raise ConfigError("a prefix of another model, wanted one that the same model has read")
        if not 0 <= n <= other.n_past:
            raise ConfigError([("n", f"is {n}, wanted 0 to {other.n_past}, the tokens there are")])
        if other is not self:
            self.tokens, self.n_cached = other.tokens[:n], other._reusable(n)
            self.n_kept, self.n_whole = other.n_kept, other.n_whole
            self.is_long = other.is_long
            self.batch.copy(other, self)
        self.truncate(n)

    def shift(self, n_keep: int = 0) -> int:
        """Drop half of the tokens after the first n_keep, and move the others up, as llama.cpp does
        in a full context; returns how many were dropped.

        The keys of those that stay are turned to their new positions (pyggml.models.shift); if they
        are few enough for other rotary factors, they are fed anew with the next tokens. Raises
        ConfigError for a model whose tokens cannot move, or if there are none to drop.
        """
        check_shift(self.model, self.n_past, n_keep)
        n = (self.n_past - n_keep) // 2
        self.batch.move(self, n_keep + n, n_keep)
        del self.tokens[n_keep : n_keep + n]
        self.n_coming = 0
        self.n_changes += 1
        self.n_kept = min(self.n_kept, n_keep)
        self.n_whole = passes.in_whole_passes(min(self.n_whole, n_keep))
        return n

    def close(self) -> None:
        """Give the slot back. What it has cached stays, for a prompt that begins alike."""
        self.n_changes += 1
        self.is_open = False

    def n_shared(self, tokens: list[int]) -> int:
        """How many of these tokens it has cached, from the first on, as a prompt of them would."""
        n = min(self.n_cached, self.n_kept, len(tokens))
        both = zip(self.tokens[:n], tokens, strict=False)
        unlike = (i for i, (one, other) in enumerate(both) if one != other)
        shared = next(unlike, n)
        if self.batch.deterministic:
            shared = min(passes.in_whole_passes(shared), self.n_whole)
        return self._reusable(shared)

    def _reusable(self, n: int) -> int:
        """How many of its first n tokens the cache can serve. A model with a state can serve all or
        none: the state is that after the last token."""
        return min(n, self.n_cached) if self.model.batches or n >= self.n_cached else 0


class Batch:
    """A model and a cache for up to n_slots sequences of n_ctx tokens each."""

    def __init__(
        self,
        model: Model,
        n_slots: int,
        n_ctx: int,
        cache_type: CacheType = "f16",
        deterministic: bool = False,
        arenas: Arenas | None = None,
        memory: np.ndarray | None = None,
    ) -> None:
        """cache_type: of keys and values, one of CACHE_TYPES or a pair (pyggml.generation.memory).
        deterministic: no sequence's logits depend on another's, see above.
        arenas: memory that its programs share with others, which run in between; memory: (n,) uint8
        for the cache. None: their own.

        Raises ConfigError if n_slots or n_ctx is below 1 or the type does not fit the model, and
        ModelError for a model that predicts no next token.
        """
        expect_next_token(model.config)
        faults: list[Fault] = []
        for name, n in (("n_slots", n_slots), ("n_ctx", n_ctx)):
            if n < 1:
                faults.append((name, f"is {n}, wanted at least 1"))
        if faults:
            raise ConfigError(faults)
        self.model, self.n_ctx, self.deterministic = model, n_ctx, deterministic
        n_spare = passes.STEP - 1 if model.batches else 0
        self.memory = CacheMemory(model, n_slots, n_ctx, n_spare, cache_type, memory)
        self.slots = tuple(Slot(self, i) for i in range(n_slots))
        self._passes = passes.TokenPasses(
            self.memory.cache, 1 if deterministic else n_slots, n_slots, arenas
        )
        self.n_short = model.config.n_ctx_short or _ALL  # tokens that have short rotary factors
        self._running: Slot | None = None  # whose state is in the cache
        self._shifts: dict[int, tuple[Shift, Program]] = {}  # by rows; the last alone
        self._clock = 0

    def release(self) -> None:
        """Free the cache and the memory of all programs; nothing can be fed any more.

        Slots and graphs refer to each other in circles, so Python would free them only when it next
        looks for such.
        """
        self._passes.release()
        self._shifts.clear()
        self.memory.release()

    def n_bytes_of_pass(self, n_tokens: int) -> int:
        """Bytes of the host's arena that a pass of so many tokens of one sequence takes."""
        n = passes.size_of_pass(min(n_tokens, passes.MOST_TOKENS))
        return self._passes.n_bytes(self.model, n)

    @property
    def n_free(self) -> int:
        """How many slots can be opened."""
        return sum(not slot.is_open for slot in self.slots)

    def is_long(self, n_tokens: int) -> bool:
        """Whether a sequence of so many tokens takes the rotary factors for long ones."""
        return n_tokens > self.n_short

    def open(
        self, prompt: Tokens = (), model: Model | None = None, owner: int | None = None
    ) -> Slot:
        """A slot for a sequence that will begin with the prompt.

        It has as much of the prompt as another sequence, open or closed, left in the cache, but
        never the last token: the rest is to be fed. model: the batch's, with other adapters.
        owner: whose the prompt is; others' sequences are as if they were not there.
        Raises ConfigError for another base model, DataError if no slot is free.
        """
        model = model or self.model
        if model.parts is not self.model.parts:
            raise ConfigError("another base model, wanted that of the batch with any adapters")
        free = [slot for slot in self.slots if not slot.is_open]
        if not free:
            raise DataError(f"all {len(self.slots)} slots are taken")
        start = [int(token) for token in prompt[:-1]]
        kind = model, owner, self.is_long(len(prompt))
        alike = [s for s in self.slots if (s.model, s.owner, s.is_long) == kind]
        donor = max(alike, key=lambda slot: slot.n_shared(start), default=free[0])
        n = donor.n_shared(start) if donor in alike else 0
        wastes_little = donor in free and 2 * n >= donor.n_past
        slot = donor if n and wastes_little else min(free, key=lambda slot: slot.last_used)
        slot.model, slot.owner, slot.is_open = model, owner, True
        slot.copy_prefix(donor if n else slot, n)
        slot.n_coming = len(prompt)
        return slot

    def feed(
        self, pieces: Mapping[Slot, Tokens], every: Collection[Slot] = ()
    ) -> dict[Slot, np.ndarray]:
        """Append tokens to sequences; the logits after the last of each, float32 (n_vocab,).

        every: slots with the logits after each new token instead, (n, n_vocab).
        Raises ConfigError for a closed slot, DataError if tokens exceed a slot's context or are
        outside of the vocabulary; nothing is appended then.
        """
        checked = {slot: self._check_tokens(slot, tokens) for slot, tokens in pieces.items()}
        for slot, ids in checked.items():
            slot.extend(ids)
        logits: dict[Slot, list[np.ndarray]] = {slot: [] for slot in checked}
        for together in self._groups(list(checked)):
            while together:
                counts = self._next(together)
                for slot, rows in zip(counts, self._run_pass(counts, every), strict=True):
                    logits[slot] += [rows]
                together = [slot for slot in together if slot.n_cached < slot.n_past]
        return {
            slot: np.concatenate(logits[slot])[-len(ids) :]
            if slot in every
            else logits[slot][-1][-1]
            for slot, ids in checked.items()
        }

    def feed_one(self, slot: Slot, tokens: Tokens) -> np.ndarray:
        """Append tokens to one sequence; what `feed` gives for it, with less done around a pass.

        Raises as `feed`.
        """
        slot.extend(self._check_tokens(slot, tokens))
        while True:
            (logits,) = self._run_pass(self._next([slot]))
            if slot.n_cached == slot.n_past:
                return _expect_finite(slot, logits[-1])

    def greedy(self, slot: Slot, tokens: Tokens, owner: object = None) -> Iterator[int]:
        """Append tokens to one sequence, then one by one the likeliest that follow.

        Each token is given before it is appended: that happens when the next one is asked for. It
        ends when the context is full. owner: of the batch, which lives as long.
        Raises as `feed`; DataError if the greatest logit is NaN or infinite; ConfigError if the
        sequence was changed meanwhile.
        """
        token = checked_argmax(self.feed_one(slot, tokens))
        yield from self._give(slot, token)
        end = self.n_ctx if slot.is_long else min(self.n_ctx, self.n_short)
        if slot.n_past < end and runs_ahead(slot.model):
            for after in self._run_ahead(slot, token, end):
                token = after
                yield from self._give(slot, token)
        while slot.n_past < end:
            slot.extend([token])
            (logits,) = self._run_pass({slot: 1})
            token = checked_argmax(_expect_finite(slot, logits[-1]))
            yield from self._give(slot, token)
        if end < self.n_ctx:  # the next token gives all of them other rotary factors
            yield from self.greedy(slot, [token], owner)

    def _give(self, slot: Slot, token: int) -> Iterator[int]:
        """Give a token, and look whether its sequence is the same when the next is asked for."""
        n_changes = slot.n_changes
        yield token
        if slot.n_changes != n_changes:
            raise ConfigError("the sequence was changed before its next token was asked for")

    def _run_ahead(self, slot: Slot, token: int, end: int) -> Iterator[int]:
        """The likeliest tokens after this one, which is not appended yet. The pass of each is
        started before it is given. It ends with `end` tokens, and where another sequence takes the
        pass or a trace begins."""
        ahead = self._passes.ahead(slot.model)
        run = ahead.begin(token, slot.n_past, slot.number * self.n_ctx, slot.length)
        coming: Coming | None = ahead.start()
        while coming is not None and ahead.run == run and not slot.model.traces:
            slot.tokens.append(token)
            slot.n_cached = n = slot.n_past
            self._note_use(slot)
            after = ahead.start() if n < end else None
            token, coming = coming(), after
            yield token

    def move(self, slot: Slot, source: int, target: int) -> None:
        """Make a slot's cached tokens from `source` on those from `target` on."""
        n, first = slot.n_cached - source, slot.number * self.n_ctx
        if n <= 0:
            slot.n_cached = min(slot.n_cached, target)
            return
        if n not in self._shifts:
            shift = build_shift(self.model.parts, self.memory.cache, n)
            program = bind(schedule(Graph.of(*shift.outputs), self.model.devices))
            self._shifts = {n: (shift, program)}
        shift, program = self._shifts[n]
        shift.fill(first + source, first + target, slot.length)
        program()
        slot.n_cached = target + n

    def copy(self, source: Slot, target: Slot) -> None:
        """Give a slot what the cache has of another's first tokens, as many as it counts."""
        self.memory.copy_rows(source.number, target.number, target.n_cached)
        if self._running is target:
            self._running = None
        target.state = self.memory.state() if self._running is source else source.state

    def _check_tokens(self, slot: Slot, tokens: Tokens) -> list[int]:
        if not slot.is_open or slot.batch is not self:
            raise ConfigError(f"slot {slot.number} is not open, wanted one that this batch opened")
        match tokens:
            case [token] if type(token) is int and 0 <= token < self.model.config.n_vocab:
                ids = [token]  # as a sampler gives it: an array takes longer
            case _:
                ids = self.model.check_tokens(tokens).tolist()
        if slot.n_past + len(ids) > self.n_ctx:
            raise DataError(
                f"{slot.n_past} + {len(ids)} tokens do not fit into a context of {self.n_ctx}"
            )
        return ids

    def _groups(self, slots: list[Slot]) -> list[list[Slot]]:
        """The slots that can share a pass, in the order of their rows."""
        slots = sorted(slots, key=lambda slot: slot.number)
        if self.deterministic or not self.model.batches:
            return [[slot] for slot in slots]
        models = dict.fromkeys(slot.model for slot in slots)
        return [[slot for slot in slots if slot.model is model] for model in models]

    def _next(self, slots: list[Slot]) -> dict[Slot, int]:
        """How many tokens of each slot go into the next pass: all that await it or, if these are
        too many, those of the slots with the fewest first. Of more than MOST_TOKENS a multiple of
        these, as each size of a pass has a program of its own."""
        waiting = {slot: slot.n_past - slot.n_cached for slot in slots}
        room = n = sum(waiting.values())
        if n > passes.MOST_TOKENS:
            room = passes.in_whole_passes(min(n, self.most_tokens()))
        taken = dict.fromkeys(slots, 0)
        for slot in sorted(slots, key=waiting.__getitem__):
            taken[slot] = min(waiting[slot], room)
            room -= taken[slot]
        return {slot: n for slot, n in taken.items() if n}

    def most_tokens(self) -> int:
        """The tokens of a pass at most. A device that gains by it runs several passes as one, if
        much of its memory is left beside the weights, which the first pass brings."""
        devices = self.model.devices.backends
        together = min(device.passes_together for device in devices)
        if together > 1 and not self.deterministic:
            free = (memory[0] if (memory := d.memory()) else 0 for d in devices)
            weights = self.model.parts.weights.values()
            coming = 0 if self._clock else sum(w.n_bytes for w in weights)
            if min(free) >= _MUCH_FREE + coming:
                return together * passes.MOST_TOKENS
        return passes.MOST_TOKENS

    def _run_pass(
        self, pieces: Mapping[Slot, int], every: Collection[Slot] = ()
    ) -> list[np.ndarray]:
        """Run the next tokens of some slots, as many as it says of each, in one pass. The logits
        (n, n_vocab) of each slot's last token, or of every one."""
        counts = [n if slot in every else 1 for slot, n in pieces.items()]
        if not self.model.batches:
            self._switch(*pieces)
        try:
            run = self._fill(pieces, counts)
            run.program()
            logits = run.read([*pieces.values()], counts)
        except BaseException:  # broken off: a state would be that of none of its tokens
            for slot in () if self.model.batches else pieces:
                slot.n_cached = 0
            raise
        for slot, n in pieces.items():
            if slot.n_whole == slot.n_cached and n == passes.MOST_TOKENS:
                slot.n_whole += n
            slot.n_cached += n
            self._note_use(slot)
        return [logits[end - n : end] for n, end in zip(counts, accumulate(counts), strict=True)]

    def _fill(self, pieces: Mapping[Slot, int], counts: Sequence[int]) -> passes.TokenPass:
        """A pass of the next tokens of some slots, with logits of the last `counts` of each."""
        n_tokens = sum(pieces.values())
        n = passes.size_of_pass(n_tokens) if self.model.batches else n_tokens
        filled = self._passes[next(iter(pieces)).model, n, sum(counts)]
        of, end = list[int](), 0
        for (slot, n), n_wanted in zip(pieces.items(), counts, strict=True):
            start = slot.n_cached
            piece, first = slot.tokens[start : start + n], slot.number * self.n_ctx
            filled.fill(end, piece, start, first, slot.length, slot.number)
            end += n
            of += range(end - n_wanted, end)
        filled.pad(end, self.memory.first_spare)
        filled.of[:] = of + of[-1:] * (len(filled.of) - len(of))
        return filled

    def _note_use(self, slot: Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock

    def _switch(self, slot: Slot) -> None:
        """Make the cache's state that of a slot."""
        if self._running is slot:
            return
        if self._running is not None:
            self._running.state = self.memory.state()
        if slot.n_cached:
            self.memory.set_state(slot.state)
        self._running = slot


def _expect_finite(slot: Slot, logits: np.ndarray) -> np.ndarray:
    """The logits. NotFiniteError, with the trace's names, where what one changes makes no numbers;
    of several sequences in a pass each one's own logits tell."""
    if slot.model.traces and slot.model.edited:
        check_greatest(logits.max(), slot.model.edited)
    return logits
