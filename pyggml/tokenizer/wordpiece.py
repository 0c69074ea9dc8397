"""WordPiece (BERT): text → words, in lower case without accents → longest match from the left.

The first token of a word begins with "▁" (U+2581); BERT's own files have "##" before all others
instead. A word with an unmatched part becomes one unknown token. The rules are those of
llama.cpp's llm_tokenizer_wpm_session: only the first character of a decomposition, or of a lower
case, is kept.
"""

import unicodedata

from pyggml.errors import TokenizerError
from pyggml.tokenizer.characters import SPACES, lower_case
from pyggml.tokenizer.codec import Codec
from pyggml.tokenizer.longest import Longest
from pyggml.tokenizer.metadata import Metadata
from pyggml.tokenizer.spm import SPACE, piece
from pyggml.tokenizer.vocabulary import Vocabulary

# Each of these characters is a word. The library `tokenizers` has the same gap before 0x2B920.
_HAN = (
    *((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F)),
    *((0x2B740, 0x2B81F), (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F)),
)


def codec(metadata: Metadata, vocabulary: Vocabulary, unknown: int | None) -> Codec:
    """The codec of a vocabulary. TokenizerError without an unknown token."""
    if unknown is None:
        raise TokenizerError("kind 'bert' needs an unknown token, and there is none")
    lower = metadata.flag("tokenizer.ggml.normalizer.lowercase", True)
    strip = metadata.flag("tokenizer.ggml.normalizer.strip_accents", lower)
    characters, words = _Characters(lower, strip), _Words(vocabulary.ids, unknown)

    def encode(texts: list[str]) -> list[list[int]]:
        split = [text.translate(characters).split(" ") for text in texts]
        return [[id for word in each if word for id in words[word]] for each in split]

    return Codec(encode, piece, leads=True)


class _Words(dict[str, list[int]]):
    """Cache: word → ids."""

    def __init__(self, ids: dict[str, int], unknown: int) -> None:
        self._longest, self._unknown = Longest(ids), unknown

    def __missing__(self, word: str) -> list[int]:
        if len(self) > 1 << 20:  # bounds the memory
            self.clear()
        ids = self[word] = self._cut(SPACE + word)
        return ids

    def _cut(self, word: str) -> list[int]:
        ids, at = [], 0
        while at < len(word):
            token = self._longest.at(word, at)
            if token is None:
                return [self._unknown]
            ids.append(token[0])
            at += token[1]
        return ids


class _Characters(dict[int, str]):
    """Code point → its replacement: normalised, with spaces around a character that is a word."""

    def __init__(self, lower: bool, strip: bool) -> None:
        self._lower, self._strip = lower, strip

    def __missing__(self, point: int) -> str:
        normal = self[point] = self._normal(chr(point))
        return normal

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
        cased = lower_case(char) if self._lower else char
        if alone or any(first <= ord(char) <= last for first, last in _HAN):
            return f" {cased} "
        return cased
