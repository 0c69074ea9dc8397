"""What an adapter stood on while it was trained: the adapters below it, by name and digest.

Two keys of our own in an adapter file, which others ignore; of equal length, lowest adapter first:

pyggml.lora.below.names     strings: the files' names
pyggml.lora.below.digests   strings: SHA-256 of their A and B, whatever the file's name
pyggml.lora.below.weights   float64 array: what their updates were multiplied by

And of the model below all of these:

pyggml.lora.base            string: `pyggml.gguf.identity.Identity`

And of an adapter, or a model, that classifies texts, or embeds them:

pyggml.labels               string: a JSON object of label → token (`pyggml.lora.data.labels`)
pyggml.pooling              string: how a text becomes a vector (`pyggml.models.pooling`)
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from pyggml import gguf
from pyggml.errors import AdapterError
from pyggml.gguf.identity import Identity, identity
from pyggml.graph.arrays import read
from pyggml.models.low_rank import LoraPair, LoraPairs

_BELOW = "pyggml.lora.below"
BASE = "pyggml.lora.base"
LABELS, POOLING = "pyggml.labels", "pyggml.pooling"
_NAMES, _DIGESTS, _WEIGHTS = (f"{_BELOW}.{part}" for part in ("names", "digests", "weights"))


@dataclass(frozen=True, slots=True)
class Below:
    """An adapter that lay below another one."""

    name: str
    digest: str
    weight: float

    @property
    def word(self) -> str:
        return self.name if self.weight == 1 else f"{self.name}:{self.weight:g}"


class FilePairs(dict[str, LoraPair]):
    """The updates of an adapter file: its name, its weight, and what it stood on: adapters, and the
    model below them, if the file tells. `chats` are the keys of the template that it learned,
    `labels` the classes that it tells apart, unread, `pooling` how its texts become vectors."""

    name: str = ""
    weight: float = 1.0
    below: tuple[Below, ...] = ()
    base: Identity | None = None
    chats: Mapping[str, str | None] = MappingProxyType({})
    labels: object = None
    pooling: str | None = None

    def times(self, weight: float) -> "FilePairs":
        """The same with updates multiplied by a weight."""
        pairs = FilePairs({n: replace(p, scale=weight * p.scale) for n, p in self.items()})
        pairs.name, pairs.weight, pairs.below = self.name, weight * self.weight, self.below
        pairs.base, pairs.chats, pairs.labels = self.base, self.chats, self.labels
        pairs.pooling = self.pooling
        return pairs


def digest(pairs: LoraPairs) -> str:
    """SHA-256 of all A and B, without weights and scales."""
    sha = hashlib.sha256()
    for name, pair in sorted(pairs.items()):
        sha.update(name.encode())
        for t in (pair.a, pair.b):
            sha.update(read(t).tobytes())
    return sha.hexdigest()[:32]


def below_metadata(adapters: Iterable[LoraPairs]) -> dict[str, Any]:
    """The keys for an adapter that stands on these; none if it stands on none from a file."""
    files = [pairs for pairs in adapters if isinstance(pairs, FilePairs)]
    if not files:
        return {}
    return {
        _NAMES: [pairs.name for pairs in files],
        _DIGESTS: [digest(pairs) for pairs in files],
        _WEIGHTS: np.array([pairs.weight for pairs in files], np.float64),
    }


def read_below(file: gguf.GGUFFile) -> tuple[Below, ...]:
    """What the adapter in this file stood on. AdapterError if the keys do not fit together."""
    names, digests, weights = (file.get(key) for key in (_NAMES, _DIGESTS, _WEIGHTS))
    if names is None and digests is None and weights is None:
        return ()
    are_strings = all(isinstance(value, gguf.StringArray) for value in (names, digests))
    if not are_strings or not isinstance(weights, np.ndarray) or weights.dtype != np.float64:
        raise AdapterError(f"{file.path}: {_BELOW} is no list of names, digests and weights")
    if not len(names) == len(digests) == len(weights):
        raise AdapterError(f"{file.path}: {_BELOW} has lists of unlike length")
    return tuple(map(Below, names, digests, weights.tolist()))


def learned_metadata(adapters: Iterable[LoraPairs]) -> dict[str, Any]:
    """What whoever reads the updates of these adapters must know of texts: the keys that the last
    one with any has."""
    files = [pairs for pairs in adapters if isinstance(pairs, FilePairs)]
    keys = dict[str, Any]()
    for pairs in files:
        keys |= {} if pairs.pooling is None else {POOLING: pairs.pooling}
        keys |= {LABELS: pairs.labels} if isinstance(pairs.labels, str) else {}
    return keys


def base_metadata(file: gguf.GGUFFile) -> dict[str, str]:
    """The key for an adapter of the model in this file."""
    return {BASE: str(identity(file))}


def base_differences(adapters: Iterable[LoraPairs], file: gguf.GGUFFile) -> dict[str, str]:
    """By the name of an adapter, how the model in this file differs from the one it was trained on.

    Of the same model in other types nothing is told: an adapter is meant for these, too.
    """
    bases = {p.name: p.base for p in adapters if isinstance(p, FilePairs) and p.base is not None}
    if not bases:
        return {}
    here = identity(file)
    apart = {n: base.difference(here) for n, base in bases.items() if base.layout == here.layout}
    return {name: clause for name, clause in apart.items() if clause}


def doubts(adapters: Iterable[LoraPairs], file: gguf.GGUFFile) -> list[str]:
    """What says that adapters on the model in this file are not what was trained: sentences."""
    adapters = tuple(adapters)
    sentences = [
        f"{name} was trained on top of {', '.join(below.word for below in lacks)}, which is not "
        "here (by its numbers and weight): without it, it is not what was trained"
        for name, lacks in missing(adapters).items()
    ]
    return sentences + [
        f"{name} was trained on another model: {file.path.name} {apart}"
        for name, apart in base_differences(adapters, file).items()
    ]


def missing(adapters: Iterable[LoraPairs]) -> Mapping[str, list[Below]]:
    """By the name of an adapter, what it stood on that is not among these with its weight."""
    files = [pairs for pairs in adapters if isinstance(pairs, FilePairs)]
    if not any(pairs.below for pairs in files):
        return {}
    there = {(digest(pairs), pairs.weight) for pairs in files}
    lacks = {p.name: [b for b in p.below if (b.digest, b.weight) not in there] for p in files}
    return {name: names_lacking for name, names_lacking in lacks.items() if names_lacking}
