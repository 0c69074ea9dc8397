"""The parts of documents that lie in windows: where they are, whatever the packing."""

from dataclasses import dataclass

import numpy as np

from pyggml.lora.data.windows.batches import Dataset


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Parts of documents, each in one window, in their order: the first token of each, counted over
    all windows, and its number of tokens. Parts without a target are left out."""

    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, data: Dataset) -> "Units":
        none = np.zeros(0, np.int64)
        starts, lengths, before = [none], [none], 0
        for block in data.blocks():
            is_first = np.diff(block.documents, axis=1, prepend=block.documents[:, :1] - 1) != 0
            number = np.cumsum(is_first).reshape(is_first.shape) - 1
            n = int(number[-1, -1]) + 1
            counts = np.bincount(number.reshape(-1), minlength=n)
            learned = np.bincount(number[:, 1:][block.targets()], minlength=n) > 0
            starts.append(np.flatnonzero(is_first)[learned] + before)
            lengths.append(counts[learned])
            before += is_first.size
        return cls(np.concatenate(starts), np.concatenate(lengths))

    def __len__(self) -> int:
        return len(self.starts)

    def spread(self, n: int) -> np.ndarray:
        """The numbers of n of them, spread evenly; all if there are no more."""
        k = min(n, len(self))
        return ((np.arange(k) + 0.5) * len(self) / max(k, 1)).astype(np.int64)

    def goes_on(self, data: Dataset, which: int) -> bool:
        """Whether a part fills its window, and the next part begins with its last token, as a text
        that is longer than a window goes on."""
        if which + 1 == len(self) or self.lengths[which] != data.ctx + 1:
            return False
        tokens, end = data.tokens.reshape(-1), self.starts[which] + self.lengths[which]
        return bool(self.starts[which + 1] == end and tokens[end] == tokens[end - 1])

    def tokens(self, data: Dataset, which: int) -> tuple[np.ndarray, np.ndarray]:
        """The ids of one, and (n,) bool, which of them are learned."""
        at = slice(int(self.starts[which]), int(self.starts[which] + self.lengths[which]))
        ids = data.tokens.reshape(-1)[at]
        learned = np.ones(len(ids), np.bool_)
        if data.trained is not None:
            learned = data.trained.reshape(-1)[at] != 0
        return ids, np.concatenate([[False], learned[1:]])


def first_learned(ids: np.ndarray, learned: np.ndarray, n: int) -> np.ndarray:
    """Up to n ids of a document, by which it is known: from the first one that is learned on, for
    what comes before is a template's in many rows; its last ones if nothing but its end is."""
    if learned.sum() < 2:
        return ids[-n:]
    first = int(learned.argmax())
    return ids[first if first > 1 else 0 :][:n]


def as_words(text: str) -> str:
    """On one line, without the halves of characters at its ends."""
    return " ".join(text.strip("\ufffd").split())
