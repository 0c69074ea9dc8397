"""Which characters of a text its tokens spell."""

from collections.abc import Sequence

import numpy as np

from pyggml.errors import TokenizerError
from pyggml.tokenizer.spm import SPACE


def locate(text: str, spelled: Sequence[bytes]) -> np.ndarray:
    """(n, 2) int64: the characters [first, last + 1) of a text that each of n tokens spells.

    A token of some bytes of a character has that character. A space that the tokenizer put before
    the text has its first one. Raises TokenizerError if the tokens spell another text.
    """
    whole = b"".join(spelled)
    data = _data(text, whole)
    if data is None:
        raise TokenizerError(
            "the tokens do not spell the text, which this vocabulary normalises, so its characters "
            "cannot be told from them"
        )
    extra = len(whole) - len(data)  # 1 for the space, else 0
    ends = np.cumsum([len(piece) for piece in spelled]) - extra
    starts = np.concatenate([[0], ends[:-1]])
    is_first = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
    number = np.concatenate([np.cumsum(is_first) - 1, [len(text)]])  # byte -> its character
    last = number[np.maximum(ends, 1) - 1] + 1
    return np.stack([number[np.minimum(starts, len(data))], last], axis=1)


def _data(text: str, whole: bytes) -> bytes | None:
    """The text as the tokens spell it; those of SentencePiece have a space for U+2581."""
    for written in (text, text.replace(SPACE, " ")):
        data = written.encode()
        if whole in (data, b" " + data):
            return data
    return None
