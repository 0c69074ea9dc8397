"""A vocabulary of a text, as fields of a GGUF file; pairs are found by the library `tokenizers`.

bpe         the 256 bytes, and the pairs that are most frequent inside words (Sennrich et al. 2016)
characters  the 256 bytes, and the characters of the text
bytes       the 256 bytes

Each is byte-level BPE to llama.cpp, so that every text has tokens and comes back unchanged. Texts
are cut into words as by `PRE`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pyggml.errors import ConfigError
from pyggml.tokenizer.bpe import BYTE_OF, splits
from pyggml.tokenizer.pretokenizers import pretokenizer

KINDS = ("bpe", "characters", "bytes")
PRE = "qwen2"  # words with the space before them, digits one by one
END = "<|endoftext|>"
_CHAR_OF = {byte: char for char, byte in BYTE_OF.items()}
_NORMAL, _CONTROL = 1, 3  # enum llama_token_type
_CHARACTERS = 1 << 21  # more than Unicode has


def vocabulary_fields(
    texts: Iterable[str], n_tokens: int, kind: str = "bpe", special: Sequence[str] = ()
) -> dict[str, Any]:
    """The fields tokenizer.ggml.* of a vocabulary of at most n_tokens tokens.

    texts    pieces of any length, read once; a word that goes over two is cut
    special  tokens that no text gives, beside the end of a text, which is the first of them

    There are fewer tokens where the texts have no more pairs that occur twice. Raises ConfigError
    if n_tokens has no room for the 256 bytes and the special tokens, and for a special token that
    is given twice, blank, no text, or a token of the texts.
    """
    control = (END, *special)
    _check_special(control)
    least = len(BYTE_OF) + len(control)
    if n_tokens < least:
        raise ConfigError(f"{n_tokens} tokens are too few: bytes and special tokens are {least}")
    merges = _merges(texts, n_tokens - len(control), kind)
    tokens = [_CHAR_OF[byte] for byte in range(256)]
    tokens += dict.fromkeys(left + right for left, right in merges)
    if both := sorted({*tokens} & {*control}):
        raise ConfigError(f"the special token {both[0]!r} is one of the text's tokens too")
    types = [_NORMAL] * len(tokens) + [_CONTROL] * len(control)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PRE,
        "tokenizer.ggml.tokens": [*tokens, *control],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.eos_token_id": len(tokens),
        "tokenizer.ggml.add_bos_token": False,
    }


def _check_special(tokens: Sequence[str]) -> None:
    for token in tokens:
        if tokens.count(token) > 1:
            raise ConfigError(f"the special token {token!r} is given twice")
        if not token.strip() or any(map(_is_half, token)):
            raise ConfigError(f"a special token is {token!r}, wanted text that is not blank")


def _is_half(char: str) -> bool:
    """Whether a character is half of a surrogate pair: a byte of a command line that is no text."""
    return "\ud800" <= char <= "\udfff"


def _merges(texts: Iterable[str], n_tokens: int, kind: str) -> list[tuple[str, str]]:
    if kind == "bytes":
        return []
    if kind == "characters":
        return _of_characters(texts, n_tokens - len(BYTE_OF))
    return _of_pairs(texts, n_tokens)


def _of_pairs(texts: Iterable[str], n_tokens: int) -> list[tuple[str, str]]:
    import json

    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    library: Any = Tokenizer(BPE())
    library.pre_tokenizer = splits(pretokenizer(PRE))
    trainer = BpeTrainer(
        vocab_size=n_tokens,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=list(BYTE_OF),
    )
    library.train_from_iterator(texts, trainer)
    merges = json.loads(library.to_str())["model"]["merges"]
    return [(left, right) for left, right in merges]


def _of_characters(texts: Iterable[str], n_tokens: int) -> list[tuple[str, str]]:
    """The merges that make each character of its bytes, the most frequent characters first.

    A character whose tokens have no room stays bytes.
    """
    counts = np.zeros(_CHARACTERS, np.int64)
    for text in texts:
        codes, n = np.unique(np.frombuffer(text.encode("utf-32-le"), np.uint32), return_counts=True)
        counts[codes] += n
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    merges: dict[str, tuple[str, str]] = {}
    for code in order.tolist():
        steps = {left + right: (left, right) for left, right in _pairs_of(chr(code))}
        if len(merges | steps) <= n_tokens:
            merges |= steps
    return list(merges.values())


def _pairs_of(character: str) -> Iterator[tuple[str, str]]:
    """The bytes of a character, each joined to those before it."""
    first, *continuation = (_CHAR_OF[byte] for byte in character.encode())
    for other in continuation:
        yield first, other
        first += other
