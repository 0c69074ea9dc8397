"""WordPiece, BERT's: text → words, in lower case without accents → longest tokens from the left.

A token that begins a word has "▁" (U+2581) before it, where BERT's own files have "##" before all
others. A word of which any part is in no token becomes one unknown token. The rules of
llama.cpp's llm_tokenizer_wpm_session: of what a character decomposes to, or of its lower case, only
the first character remains.
"""

from __future__ import annotations

import unicodedata

from pyggml.errors import TokenizerError
from pyggml.tokenizer.characters import SPACES, lowered
from pyggml.tokenizer.codec import Codec
from pyggml.tokenizer.longest import Longest
from pyggml.tokenizer.metadata import Metadata
from pyggml.tokenizer.spm import SPACE, piece
from pyggml.tokenizer.vocabulary import Vocabulary

# Each character of these is a word. The gap before 0x2B920 is that of the library `tokenizers`.
_HAN = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
    *((0x2B740, 0x2B81F), (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)


def codec(metadata: Metadata, vocabulary: Vocabulary, unknown: int | None) -> Codec:
    """TokenizerError if there is no unknown token."""
    if unknown is None:
        raise TokenizerError("kind 'bert' needs an unknown token, and there is none")
    lower = metadata.flag("tokenizer.ggml.normalizer.lowercase", True)
    strip = metadata.flag("tokenizer.ggml.normalizer.strip_accents", lower)
    characters, words = _Characters(lower, strip), _Words(vocabulary.ids, unknown)

    def encode(texts: list[str]) -> list[list[int]]:
        found = [text.translate(characters).split(" ") for text in texts]
        return [[id for word in each if word for id in words[word]] for each in found]

    return Codec(encode, piece, leads=True)


class _Words(dict[str, list[int]]):
    """word → ids, each found once."""

    def __init__(self, ids: dict[str, int], unknown: int) -> None:
        self._longest, self._unknown = Longest(ids), unknown

    def __missing__(self, word: str) -> list[int]:
        if len(self) > 1 << 20:  # a text without end must not fill the memory
            self.clear()
        ids = self[word] = self._cut(SPACE + word)
        return ids

    def _cut(self, word: str) -> list[int]:
        ids, at = [], 0
        while at < len(word):
            found = self._longest.at(word, at)
            if found is None:
                return [self._unknown]
            ids.append(found[0])
            at += found[1]
        return ids


class _Characters(dict[int, str]):
    """Code point → what stands for it in a text whose words are separated by spaces."""

    def __init__(self, lower: bool, strip: bool) -> None:
        self._lower, self._strip = lower, strip

    def __missing__(self, point: int) -> str:
        found = self[point] = self._normal(chr(point))
        return found

    def _normal(self, char: str) -> str:
        if self._strip:
            char = unicodedata.normalize("NFD", char)[0]
        if char in SPACES:
            return " "
        category = unicodedata.category(char)
        dropped = category in ("Cc", "Cf", "Co") or char in "\0\ufffd"
        if dropped or (self._strip and category[0] == "M"):
            return ""
        alone = category[0] == "P" or (char < "\x7f" and category[0] == "S")
        kept = lowered(char) if self._lower else char
        if alone or any(first <= ord(char) <= last for first, last in _HAN):
            return f" {kept} "
        return kept
