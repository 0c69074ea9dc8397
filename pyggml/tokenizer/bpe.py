"""Byte-level BPE, GPT-2's: text → regex pieces → UTF-8 bytes, each as one character → merges.

A byte that prints keeps its character (U+0021 to U+007E, U+00A1 to U+00FF but U+00AD), the 68
others get U+0100 and on, in order: a space is "Ġ". The library `tokenizers` does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyggml.errors import TokenizerError
from pyggml.gguf.fields import shown
from pyggml.tokenizer.pretokenizers import Pretokenizer
from pyggml.tokenizer.vocabulary import Vocabulary

_PRINTING = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTING)
BYTE_OF = {chr(b): b for b in _PRINTING} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


def encoder(
    vocabulary: Vocabulary, pretokenizer: Pretokenizer
) -> Callable[[list[str]], list[list[int]]]:
    """Texts → ids of each. A byte that the vocabulary lacks gives no id, as in llama.cpp."""
    if vocabulary.merges is None:
        raise TokenizerError("tokenizer.ggml.merges is missing, which kind 'gpt2' needs")
    from tokenizers import Tokenizer

    n = len(vocabulary.tokens)
    # The library would join the neighbours of a byte without a token; an id past the end keeps
    # them apart and is dropped afterwards.
    missing = [char for char in BYTE_OF if char not in vocabulary.ids]
    ids = vocabulary.ids | {char: n + i for i, char in enumerate(missing)}
    whole: Any = Tokenizer(_model(ids, vocabulary.merges, pretokenizer.ignore_merges))
    whole.pre_tokenizer = splits(pretokenizer.patterns)

    def encode(texts: list[str]) -> list[list[int]]:
        found = [e.ids for e in whole.encode_batch_fast(texts, add_special_tokens=False)]
        return [[id for id in ids if id < n] for ids in found] if missing else found

    return encode


def _model(ids: dict[str, int], merges: list[tuple[str, str]], ignore_merges: bool) -> Any:
    from tokenizers.models import BPE

    try:
        return BPE(ids, merges, ignore_merges=ignore_merges)
    except Exception as error:  # the library has no narrower type
        raise TokenizerError(f"a merge does not fit the vocabulary: {shown(str(error))}") from None


def splits(patterns: tuple[str, ...]) -> Any:
    """The library's pre-tokenizer: each pattern cuts what the one before has left."""
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, byte_level])


def piece(text: str) -> bytes:
    """The bytes that a normal token stands for.

    A character that stands for no byte is given as it is, where llama.cpp writes [UNK_BYTE_...].
    """
    try:
        return bytes(BYTE_OF[char] for char in text)
    except KeyError:
        return b"".join(
            bytes([BYTE_OF[char]]) if char in BYTE_OF else char.encode() for char in text
        )
