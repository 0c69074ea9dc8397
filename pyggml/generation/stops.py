"""Stop strings in a text that comes in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Passes a text on up to the first stop string, and never a part of one.

    reached   the stop string that has come, or None
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.reached: str | None = None
        self._stops, self._held = tuple(stops), ""

    def feed(self, text: str) -> str:
        """What may be shown now. What could be the start of a stop string is held back."""
        text, self._held = self._held + text, ""
        starts = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if starts:
            at, self.reached = min(starts)
            return text[:at]
        at = self._possible_start(text)
        self._held = text[at:]
        return text[:at]

    def flush(self) -> str:
        """What was held back: the text has ended, and no stop string came."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self, text: str) -> int:
        """Where the first stop string begins that the text may go on to complete."""
        longest = max(map(len, self._stops), default=0)
        for at in range(max(0, len(text) - longest + 1), len(text)):
            if any(stop.startswith(text[at:]) for stop in self._stops):
                return at
        return len(text)
