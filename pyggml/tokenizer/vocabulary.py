"""The arrays of a vocabulary, checked.

tokens   n distinct spellings; an empty one becomes [EMPTY_i], as in llama.cpp
attrs    (n,) uint8, bits of Attr; NORMAL if the file has no token types
scores   (n,) float32; kind `llama`: the pair with the highest score merges first; kind `t5`: the
         logarithm of the token's probability
merges   BPE's pairs "a b", in order of priority, or None; checked by `pairs`
"""

import re
from dataclasses import dataclass, field

import numpy as np

from pyggml.errors import TokenizerError
from pyggml.gguf.fields import brief
from pyggml.tokenizer.metadata import Metadata

TOKENS = "tokenizer.ggml.tokens"  # the key of the spellings
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class Attr:
    """Bits for the values of enum llama_token_type; 0 is undefined. IntFlag would be slow."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 4
    USER_DEFINED = 8
    BYTE = 16
    UNUSED = 32


# By token type: undefined, normal, unknown, control, user defined, unused, byte.
_OF_TYPE = np.array(
    [*(0, Attr.NORMAL, Attr.UNKNOWN, Attr.CONTROL), *(Attr.USER_DEFINED, Attr.UNUSED, Attr.BYTE)],
    np.uint8,
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: list[str]
    attrs: np.ndarray
    scores: np.ndarray
    merges: list[str] | None
    ids: dict[str, int] = field(repr=False)

    def having(self, attr: int) -> list[int]:
        """The ids of tokens with at least one of these bits, in order."""
        ids: list[int] = np.flatnonzero(self.attrs & attr).tolist()
        return ids


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """The vocabulary of a file. TokenizerError for missing, misshapen or inconsistent arrays."""
    tokens = metadata.texts(TOKENS)
    if not tokens:
        raise TokenizerError(f"{TOKENS} is missing or empty, so there is no vocabulary")
    tokens = [spelling(i, text) for i, text in enumerate(tokens)]
    ids = {text: i for i, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        first = next(i for i, text in enumerate(tokens) if ids[text] != i)
        raise TokenizerError(
            f"tokens {first} and {ids[tokens[first]]} are both {brief(tokens[first])}"
        )
    attrs = _attrs(metadata, len(tokens))
    _check_byte_tokens(tokens, attrs)
    merges = metadata.texts("tokenizer.ggml.merges")
    return Vocabulary(tokens, attrs, _scores(metadata, len(tokens)), merges, ids)


def spelling(id: int, text: str) -> str:
    """The spelling of a token; text: as the file has it."""
    return text or f"[EMPTY_{id}]"


def _attrs(metadata: Metadata, n: int) -> np.ndarray:
    types = metadata.numbers("tokenizer.ggml.token_type", np.int32, n=n)
    if types is None:
        return np.full(n, Attr.NORMAL, np.uint8)
    return _OF_TYPE[np.where((types >= 0) & (types < len(_OF_TYPE)), types, 0)]


def _check_byte_tokens(tokens: list[str], attrs: np.ndarray) -> None:
    for i in np.flatnonzero(attrs & Attr.BYTE).tolist():
        if not BYTE_TOKEN.fullmatch(tokens[i]):
            raise TokenizerError(
                f"token {i} is of type byte and called {brief(tokens[i])}, wanted <0x00> to <0xFF>"
            )


def _scores(metadata: Metadata, n: int) -> np.ndarray:
    scores = metadata.numbers("tokenizer.ggml.scores", np.float32, np.int32, n=n)
    if scores is None:
        return np.zeros(n, np.float32)
    if not np.isfinite(scores).all():
        i = int(np.argmin(np.isfinite(scores)))
        raise TokenizerError(f"token {i} has score {scores[i]}, wanted a finite number")
    return scores.astype(np.float32)


def pairs(merges: list[str]) -> list[tuple[str, str]]:
    """Merges as pairs, cut at the first space after the first character, without duplicates.

    TokenizerError for a merge without such a space.
    """
    halves = [(m[:at], m[at + 1 :]) for m in merges if 0 < (at := m.find(" ", 1)) < len(m) - 1]
    if len(halves) != len(merges):
        i = next(i for i, m in enumerate(merges) if not 0 < m.find(" ", 1) < len(m) - 1)
        raise TokenizerError(
            f"merge {i} is {brief(merges[i])}, wanted two tokens and a space between"
        )
    return halves if len(set(merges)) == len(merges) else list(dict.fromkeys(halves))
