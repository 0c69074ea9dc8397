"""Passes: programs that take some tokens of several sequences through the model at once."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from pyggml.generation.ahead import Ahead
from pyggml.graph.arrays import array, detach
from pyggml.graph.dtypes import I32
from pyggml.graph.tensor import Tensor, put_together, zeros
from pyggml.model import Model
from pyggml.models import Cache, Inputs, Taps, Trace, build, record
from pyggml.models.batch_rows import Slots, is_pattern
from pyggml.ops import narrow
from pyggml.runtime import Arenas, Program
from pyggml.sizes import round_up

MOST_TOKENS = 512  # in one pass, llama.cpp's ubatch
STEP = 16  # passes of more tokens are padded to multiples of it
_LOGITS_STEP = 32  # logits of more tokens than there are slots are padded likewise
# Tokens whose rows are computed to the end, at least, where there are more: as many as take the
# paths of all (pyggml.backends.cpu.rewrites.early_rows).
_FEWEST_ROWS = 64
_MOST_KEPT = 32  # bound programs


def size_of_pass(n_tokens: int) -> int:
    """The tokens of the pass that n_tokens run in."""
    return n_tokens if n_tokens <= STEP else round_up(n_tokens, STEP)


def in_whole_passes(n_tokens: int) -> int:
    """How many of n_tokens passes of MOST_TOKENS read."""
    return n_tokens // MOST_TOKENS * MOST_TOKENS


@dataclass(frozen=True, slots=True)
class TokenPass:
    """A bound program: T tokens, of some of which it makes logits.

    logits   (n, n_vocab) float32
    tokens, positions, rows, span, length, slots
             the arrays of its Inputs, to be filled
    of       int32, the tokens whose last rows are computed; the first of them have logits
    first_of the first rows of the logits, by their number
    """

    model: Model
    program: Program
    logits: Tensor
    taps: Taps | None
    tokens: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    span: np.ndarray
    length: np.ndarray
    slots: np.ndarray
    of: np.ndarray
    first_of: dict[int, Tensor] = field(default_factory=dict, init=False)

    def fill(
        self, at: int, tokens: list[int], position: int, first: int, length: int, slot: int = 0
    ) -> None:
        """Put tokens of a sequence into the pass, from its token number `at` on.

        position: in the sequence, of the first of them. first: the cache's row of position 0.
        length: of the sequence. slot: its number.
        """
        here, row = slice(at, at + len(tokens)), first + position
        up = np.arange(len(tokens)) if len(tokens) > 1 else 0  # of one token: arrays take longer
        self.tokens[here], self.positions[here], self.rows[here] = tokens, position + up, row + up
        self.span[here, 0], self.span[here, 1] = first, row + 1 + up
        self.length[here], self.slots[here] = length, slot

    def pad(self, at: int, spare: int) -> None:
        """Fill the pass, from its token number `at` on, with tokens of no sequence: they read no
        rows, and write those from `spare` on."""
        n = len(self.tokens) - at
        if n:
            self.fill(at, [0] * n, 0, spare, 0)
            self.positions[at:], self.span[at:] = 0, spare

    def read(self, lengths: Sequence[int], counts: Sequence[int]) -> np.ndarray:
        """The logits of as many tokens of each sequence as `counts` says, after a run over its
        `lengths`; a trace gets the activations, of several sequences as lists."""
        if self.taps:
            values = {name: self.program.read(t) for name, t in self.taps.read.items()}
            ends = {name: counts if name in ("output", "logits") else lengths for name in values}
            parts = {name: self._parts(name, a, ends[name]) for name, a in values.items()}
            record(self.model.traces, parts)
        n = sum(counts)
        if n not in self.first_of:  # a device copies no other rows
            self.first_of[n] = narrow(self.program.schedule.place(self.logits)[0], 0, 0, n)
        return self.program.read(self.first_of[n])

    def _parts(
        self, name: str, a: np.ndarray, counts: Sequence[int]
    ) -> np.ndarray | list[np.ndarray]:
        """The first rows of an activation, as many of each sequence; of one they are an array. A
        pattern has what is read of the sequence."""
        ends = [*accumulate(counts)]
        parts = [a[end - n : end] for n, end in zip(counts, ends, strict=True)]
        if is_pattern(name):
            keys = [slice(self.span[end - 1, 0], self.span[end - 1, 1]) for end in ends]
            parts = [part[..., own] for part, own in zip(parts, keys, strict=True)]
        return parts[0] if len(parts) == 1 else parts

    def release(self) -> None:
        """Let go of the arena: nodes refer to each other in circles, which would keep it."""
        for plan in self.program.schedule.plans.values():
            detach(*plan.offsets)


class TokenPasses:
    """The passes over one cache, by model and number of tokens.

    A program is bound when it is first asked for, as (model, tokens, logits that are wanted); later
    only its inputs change. All share one arena, and those longest unused give way to new ones.
    """

    def __init__(
        self, cache: Cache, n_slots: int, n_rows: int, arenas: Arenas | None = None
    ) -> None:
        """n_slots: of a pass; n_rows: slots of the cache; arenas: None takes memory of its own."""
        self.cache, self.n_slots, self.n_rows = cache, n_slots, n_rows
        self._arenas = arenas or Arenas()
        self._bound: OrderedDict[tuple[Model, int, int, tuple[Trace, ...]], TokenPass] = (
            OrderedDict()
        )
        self._ahead: dict[Model, Ahead] = {}  # the last one alone

    def __getitem__(self, key: tuple[Model, int, int]) -> TokenPass:
        model, n_tokens, n_wanted = key
        most = self.n_slots if n_wanted <= self.n_slots else round_up(n_wanted, _LOGITS_STEP)
        n_logits = min(n_tokens, most)
        kept_as = (model, n_tokens, n_logits, model.traces)
        if kept_as not in self._bound:
            while len(self._bound) >= _MOST_KEPT:
                self._bound.popitem(last=False)[1].release()
            self._bound[kept_as] = self._bind(model, n_tokens, n_logits)
        self._bound.move_to_end(kept_as)
        return self._bound[kept_as]

    def ahead(self, model: Model) -> Ahead:
        """The pass that becomes that of the likeliest next token."""
        if model not in self._ahead:
            self._release_ahead()
            self._ahead[model] = Ahead(model, self.cache, self._arenas)
        return self._ahead[model]

    def _release_ahead(self) -> None:
        for bound in self._ahead.values():
            bound.release()
        self._ahead.clear()

    def release(self) -> None:
        """Free the memory of all programs."""
        for bound in self._bound.values():
            bound.release()
        self._bound.clear()
        self._release_ahead()
        self._arenas = Arenas()

    def n_bytes(self, model: Model, n_tokens: int) -> int:
        """Bytes of the host's arena that a pass takes."""
        _, logits, taps = self._build(model, n_tokens, min(n_tokens, self.n_slots))
        plans = model.plan(logits, taps).plans
        return sum(plan.n_bytes for backend, plan in plans.items() if backend.is_host)

    def _bind(self, model: Model, n_tokens: int, n_logits: int) -> TokenPass:
        filled, logits, taps = self._build(model, n_tokens, n_logits)
        program = model.program(logits, taps, self._arenas)
        return TokenPass(model, program, logits, taps, *map(array, filled))

    def _build(
        self, model: Model, n_tokens: int, n_logits: int
    ) -> tuple[tuple[Tensor, ...], Tensor, Taps | None]:
        """The leaves of a pass, its logits and the activations that are read."""
        inputs = Inputs.empty(n_tokens, with_rows=True)
        n_rows = max(n_logits, _FEWEST_ROWS) if n_tokens > _FEWEST_ROWS else n_logits
        of = zeros((n_rows,), I32, "of")
        assert inputs.rows is not None
        slots = zeros((n_tokens,), I32, "slots")
        at = inputs.positions, inputs.rows, inputs.span, inputs.length
        filled = inputs.tokens, *at, slots, of
        put_together(*filled)
        inputs = replace(inputs, slots=Slots(slots, self.n_rows))
        taps = model.taps()
        rows = (of, n_logits) if n_tokens > 1 else None
        return filled, build(model.parts, inputs, model.adapters, self.cache, rows, taps), taps
