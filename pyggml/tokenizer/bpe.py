"""BPE by merges: text → regex pieces → bytes or characters → merges; library `tokenizers`.

On bytes (GPT-2): a printable byte is written as its character (U+0021 to U+007E, U+00A1 to U+00FF
without U+00AD), the 68 others as U+0100 and on, in order; a space is "Ġ".
On characters (Gemma 4): a character without a token becomes the tokens of its bytes, <0x00> to
<0xFF>.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from pyggml.errors import TokenizerError
from pyggml.gguf.fields import brief
from pyggml.tokenizer import spm
from pyggml.tokenizer.codec import Codec
from pyggml.tokenizer.pretokenizers import Pretokenizer
from pyggml.tokenizer.vocabulary import Vocabulary, pairs

_PRINTING = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTING)
BYTE_OF = {chr(b): b for b in _PRINTING} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}
_NEWLINE_RUNS = re.compile("(\n+)")


def codec(vocabulary: Vocabulary, pretokenizer: Pretokenizer) -> Codec:
    """The codec of a vocabulary. A byte without a token gives no id, as in llama.cpp.

    TokenizerError without merges. Merges are checked against the vocabulary at the first encoding:
    half a million take a second.
    """
    if vocabulary.merges is None:
        raise TokenizerError("tokenizer.ggml.merges is missing, which BPE needs")
    return (_of_characters if pretokenizer.characters else _of_bytes)(vocabulary, pretokenizer)


def _of_bytes(vocabulary: Vocabulary, pretokenizer: Pretokenizer) -> Codec:
    n = len(vocabulary.tokens)
    # The library would join the neighbours of a byte without a token. An id past the end keeps
    # them apart; it is dropped afterwards.
    missing = [char for char in BYTE_OF if char not in vocabulary.ids]
    ids = vocabulary.ids | {char: n + i for i, char in enumerate(missing)}
    library = _Late(partial(_library, ids, vocabulary.merges or [], pretokenizer))

    def encode(texts: list[str]) -> list[list[int]]:
        encoded = [e.ids for e in library().encode_batch_fast(texts, add_special_tokens=False)]
        return [[id for id in ids if id < n] for ids in encoded] if missing else encoded

    return Codec(encode, piece)


def _of_characters(vocabulary: Vocabulary, pretokenizer: Pretokenizer) -> Codec:
    how = _OfCharacters(vocabulary.ids, vocabulary.merges or [], pretokenizer)
    return Codec(how.encode, spm.piece if pretokenizer.marks_spaces else str.encode)


class _OfCharacters:
    """Encodes on characters. The library gives id n, unknown, for each character without a token;
    it is replaced by the ids of that character's bytes."""

    def __init__(self, ids: dict[str, int], merges: list[str], pretokenizer: Pretokenizer) -> None:
        self._ids, self._n, self._pretokenizer = ids, len(ids), pretokenizer
        unknown = "-" * (2 * max(map(len, ids)) + 1)  # longer than any merged token
        build = partial(_library, ids | {unknown: self._n}, merges, pretokenizer)
        self._library = _Late(partial(build, unk_token=unknown))

    def encode(self, texts: list[str]) -> list[list[int]]:
        cut = [self._pieces(text) for text in texts]
        batch = [piece for parts in cut for piece in parts if isinstance(piece, str)]
        encodings = iter(self._library().encode_batch_fast(batch, add_special_tokens=False))
        encoded = []
        for parts in cut:
            ids: list[int] = []
            for part in parts:
                is_token = isinstance(part, int)
                ids.extend([part] if is_token else self._spell(part, next(encodings).ids))
            encoded.append(ids)
        return encoded

    def _pieces(self, text: str) -> list[Any]:
        """The text in pieces; a run of newlines that is a token is given by its id."""
        if self._pretokenizer.marks_spaces:
            text = text.replace(" ", spm.SPACE)
        if not self._pretokenizer.whole_newlines:
            return [text]
        runs = (piece for piece in _NEWLINE_RUNS.split(text) if piece)
        return [self._ids.get(run, run) if run[0] == "\n" else run for run in runs]

    def _spell(self, text: str, spelled: list[int]) -> list[int]:
        if self._n not in spelled:
            return spelled
        strangers = (char for char in text if char not in self._ids)
        ids: list[int] = []
        for id in spelled:
            ids.extend([id] if id != self._n else self._byte_ids(next(strangers)))
        return ids

    def _byte_ids(self, char: str) -> list[int]:
        names = (f"<0x{byte:02X}>" for byte in char.encode())
        return [self._ids[name] for name in names if name in self._ids]


class _Late:
    """The result of `make`, which is called at the first use and then freed."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make: Callable[[], Any] | None = make
        self._made: Any = None

    def __call__(self) -> Any:
        if self._make is not None:
            self._made = self._make()
            self._make = None
        return self._made


def _library(
    ids: dict[str, int], merges: list[str], pretokenizer: Pretokenizer, **settings: Any
) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    settings |= {"ignore_merges": pretokenizer.ignore_merges}
    cut = pairs(merges)
    try:
        whole: Any = Tokenizer(BPE(ids, cut, **settings))
    except Exception as error:  # the library has no narrower type
        raise TokenizerError(f"a merge does not fit the vocabulary: {brief(str(error))}") from None
    whole.pre_tokenizer = splits(pretokenizer)
    return whole


def splits(pretokenizer: Pretokenizer) -> Any:
    """The library's pre-tokenizer: each pattern cuts the pieces left by the one before."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pretokenizer.patterns
    ]
    if not pretokenizer.characters:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def piece(text: str) -> bytes:
    """The bytes of a normal token of byte-level BPE.

    A character outside of the byte alphabet is kept; llama.cpp writes [UNK_BYTE_...].
    """
    try:
        return bytes(BYTE_OF[char] for char in text)
    except KeyError:
        return b"".join(
            bytes([BYTE_OF[char]]) if char in BYTE_OF else char.encode() for char in text
        )
