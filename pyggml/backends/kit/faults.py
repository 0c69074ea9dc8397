"""What a device's kernels find wrong in their data, such as an id that is no row of a table."""

from typing import Any


class Faults:
    """A cell on the device, int32, 0 while nothing is wrong; and what its numbers mean.

    A kernel that finds a fault puts its number there, and must not read or write what is out of
    range itself. Whoever reads results raises the sentence.
    """

    def __init__(self, cell: Any) -> None:
        self.cell = cell
        self._sentences: list[str] = []

    def number(self, sentence: str) -> int:
        """The number of a fault."""
        if sentence not in self._sentences:
            self._sentences.append(sentence)
        return self._sentences.index(sentence) + 1

    def sentence(self, number: int) -> str:
        """The fault of a number."""
        return self._sentences[number - 1]
