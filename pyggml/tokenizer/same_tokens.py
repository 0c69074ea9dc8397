"""Whether two models have the same tokens. Rows that only fill up a matrix are none."""

import hashlib
from itertools import zip_longest

import numpy as np

from pyggml.errors import ModelError
from pyggml.gguf import GGUFFile
from pyggml.gguf.fields import brief

_UNUSED = 5  # of tokenizer.ggml.token_type


def used_tokens(file: GGUFFile) -> list[str]:
    """The tokens up to the last that is not unused; none if the file has no vocabulary."""
    tokens, types = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    tokens = [] if tokens is None else list(tokens)
    if isinstance(types, np.ndarray) and len(types) == len(tokens):
        used = np.flatnonzero(types != _UNUSED)
        tokens = tokens[: int(used[-1]) + 1 if used.size else 0]
    return tokens


def vocabulary_digest(file: GGUFFile) -> str:
    """SHA-256 of the tokens of a model, of which the first 32 digits are enough."""
    return hashlib.sha256(repr(used_tokens(file)).encode()).hexdigest()[:32]


def check_same_tokens(file: GGUFFile, other: GGUFFile) -> None:
    """Raises ModelError, naming the first token that differs, if they have other tokens."""
    pairs = zip_longest(used_tokens(file), used_tokens(other))
    unlike = next(((i, *pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]), None)
    if unlike is None:
        return
    i, theirs, ours = unlike
    there, here = ("none" if t is None else brief(t) for t in (theirs, ours))
    raise ModelError(
        f"{file.path}: has another vocabulary than {other.path}, wanted the same tokens: "
        f"token {i} is {there} there and {here} here"
    )
