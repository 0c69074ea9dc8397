"""Which model a file is: a digest of its values, its layout, and a sample of every tensor.

A model that differs from another in one matrix, as a merge of some does, is another one. Reading it
takes some pages of each tensor. What parts of a model a file has does not matter, nor its name.
"""

import hashlib
import re
from dataclasses import astuple, dataclass

from pyggml.gguf.reader import GGUFFile

_PIECES, _BYTES = 4, 4096  # of each tensor, evenly spread, its two ends among them
# What says nothing about numbers: a chat template is part of the rows that it writes.
_LEFT_OUT = ("general.", "split.", "tokenizer.chat_template")
_TEXT = re.compile(r"sample ([0-9a-f]{16}) ([0-9a-f]{16}) ([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class Identity:
    """Digests of a model's values (hyperparameters, vocabulary), of the names, types and shapes of
    its tensors, and of their numbers."""

    values: str
    layout: str
    numbers: str

    def __str__(self) -> str:
        return f"sample {' '.join(astuple(self))}"

    @staticmethod
    def of(text: object) -> "Identity | None":
        """The identity that is written so; None for anything else."""
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        return None if match is None else Identity(*match.groups())

    def difference(self, other: "Identity") -> str:
        """What sets another model apart from this one, as a clause; "" if nothing does."""
        if self.layout != other.layout:
            return "has other tensors, or tensors of other types"
        if self.numbers != other.numbers:
            return "has other weights under the same names"
        return "has other hyperparameters or another vocabulary" * (self.values != other.values)


def identity(file: GGUFFile) -> Identity:
    """The identity of an open file. GGUFError if it is closed."""
    values, layout, numbers = (hashlib.sha256() for _ in range(3))
    for key, field in sorted(file.metadata.items()):
        if not key.startswith(_LEFT_OUT) or key == "general.architecture":
            values.update(repr((key, field.kind, len(field.payload))).encode() + field.payload)
    for name, info in sorted(file.tensors.items()):
        layout.update(repr((name, info.dtype.name, info.shape)).encode())
        raw = file.data(name).reshape(-1).view("u1")
        last = max(len(raw) - _BYTES, 0)
        for i in range(_PIECES):
            start = last * i // (_PIECES - 1)
            numbers.update(raw[start : start + _BYTES].tobytes())
    return Identity(*(d.hexdigest()[:16] for d in (values, layout, numbers)))
