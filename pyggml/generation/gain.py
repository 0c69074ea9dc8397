"""How many tokens of a draft are worth the pass that verifies them, by what passes have taken.

A draft of k tokens, each of which is accepted with probability a if those before it were, gives
1 + a + … + a^k tokens (Leviathan et al. 2023, eq. 1). Its pass has k more tokens than one without.
The lengths are those with the most tokens a second; without a gain they are 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_WEIGHT = 0.25  # of the newest time
_KEPT = 256  # the machine may have been busy


@dataclass(frozen=True, slots=True)
class Offer:
    """A draft that can be had.

    chance   that a token of it is accepted if those before it were
    most     tokens
    seconds  that each token takes to draft; those of several sequences are drafted together
    n_right  guesses like these that were right so far, or tokens that may come if these are fewer
    """

    chance: float
    most: int
    seconds: float = 0.0
    n_right: float = math.inf


class PassCosts:
    """Seconds of passes by their number of tokens. kept: passes for which a time holds."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._seconds: dict[int, float] = {}
        self._last: dict[int, int] = {}  # number of the pass that was noted last, by size
        self._n = 0
        self._binding = 0.0  # of the program of a new size, and its first pass

    def note(self, n_tokens: int, seconds: float) -> None:
        """What a pass took. The first of a size does not count: its program was bound."""
        self._n += 1
        if n_tokens in self._last:
            before = self._seconds.get(n_tokens, seconds)
            self._seconds[n_tokens] = before + _WEIGHT * (seconds - before)
        else:
            self._binding = seconds
        self._last[n_tokens] = self._n

    def seconds(self, n_tokens: int) -> float | None:
        """Of a pass of so many tokens; None before one was measured."""
        if self._n - self._last.get(n_tokens, 0) > self._kept:
            self._seconds.pop(n_tokens, None)
        return self._seconds.get(n_tokens)

    def affords(self, n: int, n_tokens: int, n_right: float) -> bool:
        """Whether a pass of n tokens was there before, or the time that n_right guesses save, half
        a pass each, would pay twice for the programs of the sizes from n_tokens to n."""
        saved = n_right * (self.seconds(n_tokens) or 0.0) / 2
        return n in self._last or saved >= 2 * self._binding * (n - n_tokens)

    def lengths(self, n_tokens: int, offers: Sequence[Offer]) -> list[int]:
        """How many tokens of each offer are worth it beside the n_tokens that a pass has anyway.

        A size that was not measured is taken to cost what the next smaller one does, so that it is;
        but not before it affords its program.
        """
        lengths, best = [0] * len(offers), [0] * len(offers)
        seconds = self.seconds(n_tokens)
        if seconds is None:
            return best
        gains = [(o.chance**j, i) for i, o in enumerate(offers) for j in range(1, o.most + 1)]
        expected = float(max(1, len(offers)))
        rate = expected / seconds
        n_right = sum(offer.n_right for offer in offers)
        for n, (gain, i) in enumerate(sorted(gains, reverse=True), n_tokens + 1):
            if not self.affords(n, n_tokens, n_right):
                break
            expected, lengths[i] = expected + gain, lengths[i] + 1
            seconds = self.seconds(n) or seconds
            drafting = max(o.seconds * k for o, k in zip(offers, lengths, strict=True))
            if expected / (seconds + drafting) > rate:
                rate, best = expected / (seconds + drafting), [*lengths]
        return best
