r"""RWKV's tokenizer: longest match on UTF-8 bytes, from left to right, regardless of words.

Tokens are byte strings. A file spells them with the escapes \t, \n, \r and \xHH; a backslash before
another character means that character. Control tokens are in the same table, so they match in any
text.
"""

import re

from pyggml.errors import TokenizerError
from pyggml.gguf.fields import brief
from pyggml.tokenizer.codec import Codec
from pyggml.tokenizer.longest import Longest
from pyggml.tokenizer.vocabulary import Vocabulary

_ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|([^x])|)", re.DOTALL)
_NAMED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}


def codec(vocabulary: Vocabulary) -> Codec:
    """The codec of a vocabulary. TokenizerError if a byte lacks a token of its own."""
    ids = {_spell(i, text): i for i, text in enumerate(vocabulary.tokens)}
    missing = [byte for byte in range(256) if bytes([byte]) not in ids]
    if missing:
        raise TokenizerError(
            f"{len(missing)} of the 256 bytes have no token, the first is 0x{missing[0]:02X}"
        )
    longest = Longest(ids)

    def encode(texts: list[str]) -> list[list[int]]:
        return [_cut(text.encode(), longest) for text in texts]

    return Codec(encode, piece, for_all_types=True)


def _cut(data: bytes, longest: Longest[bytes]) -> list[int]:
    ids, at = [], 0
    while at < len(data):
        token = longest.at(data, at)
        assert token is not None  # every byte is a token
        ids.append(token[0])
        at += token[1]
    return ids


def _spell(id: int, text: str) -> bytes:
    raw = piece(text)
    if not raw:
        raise TokenizerError(f"token {id} is {brief(text)}, which spells no byte")
    return raw


def piece(text: str) -> bytes:
    """The bytes of a token, from its spelling. TokenizerError for an invalid escape."""

    def unescape(escape: re.Match[bytes]) -> bytes:
        if escape[1]:
            return bytes.fromhex(escape[1].decode())
        if not escape[2]:
            raise TokenizerError(f"the token {brief(text)} holds an escape that is none")
        return _NAMED.get(escape[2], escape[2])

    raw = text.encode()
    return _ESCAPE.sub(unescape, raw) if b"\\" in raw else raw
