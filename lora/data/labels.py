"""The classes of texts, each with a token of the vocabulary."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from string import ascii_letters

import numpy as np

from pyggml.errors import DataError, first_names
from pyggml.models.stack import LABELS
from pyggml.tokenizer import Tokenizer

MOST_LABELS = 200
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Labels:
    """The classes of texts: their names and the token of each, in the order of the names."""

    tokens: Mapping[str, int]

    @property
    def names(self) -> list[str]:
        return [*self.tokens]

    def __len__(self) -> int:
        return len(self.tokens)

    def numbers(self, tokens: np.ndarray) -> np.ndarray:
        """The class of each of these tokens, int32; 0 for a token of none."""
        ids = np.fromiter(self.tokens.values(), np.int64)
        order = np.argsort(ids)
        at = order[np.minimum(np.searchsorted(ids, tokens, sorter=order), len(ids) - 1)]
        return np.where(ids[at] == tokens, at, 0).astype(np.int32)

    def text(self) -> str:
        """As a file's metadata have it."""
        return json.dumps(self.tokens, ensure_ascii=False)

    @classmethod
    def read(cls, text: object, n_vocab: int = 1 << 31) -> "Labels":
        """The inverse of `text`. DataError for anything else."""
        try:
            tokens = json.loads(text) if isinstance(text, str) else None
        except (ValueError, RecursionError):
            tokens = None
        if (
            not isinstance(tokens, dict)
            or not 2 <= len(tokens) <= MOST_LABELS
            or not all(type(token) is int and 0 <= token < n_vocab for token in tokens.values())
            or len({*tokens.values()}) < len(tokens)
        ):
            raise DataError(
                f"{LABELS} is no object of 2 to {MOST_LABELS} labels, each with a token of its own"
            )
        return cls(tokens)

    @classmethod
    def choose(cls, words: Mapping[str, Ids], tokenizer: Tokenizer) -> "Labels":
        """A token for each label; words: the tokens that each is written with."""
        users = Counter(token for ids in words.values() for token in {*ids})
        own = {name: next((t for t in ids if users[t] == 1), None) for name, ids in words.items()}
        texts = (before + c for before in (" ", "") for c in ascii_letters)
        letters = (tokenizer.encode(text, add_special=False) for text in texts)
        free = iter([ids[0] for ids in letters if len(ids) == 1 and ids[0] not in users])
        tokens = {name: next(free, None) if t is None else t for name, t in own.items()}
        if lacking := [name for name, token in tokens.items() if token is None]:
            raise DataError(
                f"the labels {first_names(lacking)} have no token that no other label has, and "
                "all letters are taken: give them other names"
            )
        return cls({name: token for name, token in sorted(tokens.items()) if token is not None})
