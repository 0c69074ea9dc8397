"""How many tokens of which prompts go into a pass.

A long prompt beside answers under way is read in chunks: of the sizes that are tried, the largest
with which a pass takes at most SLOWDOWN times as long as one without, or UNSEEN seconds, by what
passes have taken. A short prompt is read at once, so that its answer begins. Half of the room is
that of the prompt that came first, so that it is read whatever comes later; the rest serves those
that end soonest.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from pyggml.generation.gain import PassCosts

SLOWDOWN = 2.5
UNSEEN = 0.012  # seconds between two tokens that nobody sees
SHORT = 256  # tokens of prompts that are read at once
PREFILL_READ = 64  # of a prompt whose own tokens are to be told: each takes a row of logits
_SIZES = tuple(16 << i for i in range(8))  # tokens of a pass; each is bound when it first runs
_ALWAYS = 1 << 62


class Prompt(Protocol):
    """A prompt that is being read. n_left: its tokens to come, of n_new that the cache had not.
    reads: whether its own tokens are to be told."""

    @property
    def n_left(self) -> int: ...

    @property
    def n_new(self) -> int: ...

    @property
    def reads(self) -> bool: ...


AnyPrompt = TypeVar("AnyPrompt", bound=Prompt)


class Chunks:
    """What passes take, with prompts and without."""

    def __init__(self) -> None:
        self._mixed = PassCosts()
        self._plain = PassCosts(kept=_ALWAYS)  # none is measured as long as prompts are read

    def note(self, n_writing: int, n_tokens: int, seconds: float) -> None:
        """A pass of n_tokens took so long, n_writing of which were of answers."""
        costs = self._plain if n_tokens == n_writing else self._mixed
        costs.note(n_tokens, seconds)

    def shares(
        self, prompts: Sequence[AnyPrompt], n_writing: int, room: int
    ) -> dict[AnyPrompt, int]:
        """The tokens of each prompt, the first come first, that go beside n_writing of answers.
        room: the tokens that a pass has at most"""
        if not prompts:
            return {}
        if n_writing:
            n_short = sum(each.n_left for each in prompts if each.n_new <= SHORT)
            room = max(self._beside(n_writing, room), min(SHORT, n_short))
        n_told = sum(each.reads for each in prompts) or 1
        most = {p: min(p.n_left, PREFILL_READ // n_told if p.reads else _ALWAYS) for p in prompts}
        shares = {prompts[0]: min(most[prompts[0]], max(1, room // 2))}
        for prompt in sorted(prompts, key=lambda each: each.n_left):
            own = shares.get(prompt, 0)
            if share := min(most[prompt], own + room - sum(shares.values())):
                shares[prompt] = share
        return shares

    def _beside(self, n_writing: int, most: int) -> int:
        """How many tokens of long prompts: those of the least size, until more is known to fit."""
        sizes = [size for size in _SIZES if size > n_writing] or [n_writing + _SIZES[0]]
        alike = (self._plain.seconds(n) for n in range(n_writing, 0, -1))
        plain = next((seconds for seconds in alike if seconds is not None), None)
        best = sizes[0]
        seconds = self._mixed.seconds(best)
        if plain is None or seconds is None:
            return best - n_writing
        a_token = max(0.0, seconds - plain) / (best - n_writing)
        for size in (size for size in sizes[1:] if size <= most):
            measured = self._mixed.seconds(size)
            seconds = seconds + a_token * (size - best) if measured is None else measured
            if seconds > max(SLOWDOWN * plain, UNSEEN):
                break
            best = size
            if measured is None:  # it is tried first
                break
        return best - n_writing
