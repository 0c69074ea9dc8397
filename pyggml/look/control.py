"""Control vectors: directions added to the residual stream after blocks, in llama.cpp's files.

control_vector   a direction for each block, from texts of two kinds
ControlVector    the directions: added by a trace, written and read as GGUF

general.architecture     "controlvector"
controlvector.model_hint    the model's architecture; controlvector.layer_count  how many directions
direction.3              F32 (n_embd,), added to blk.3.out; block 0 has none, as in llama.cpp
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pyggml import gguf
from pyggml.errors import ConfigError, DataError, GGUFError, first_of
from pyggml.gguf.fields import brief
from pyggml.graph.dtypes import F32
from pyggml.model import Model
from pyggml.models.texts import Ids

AFTER_FIRST = slice(1, None)  # the first position of a text is far from all others in many models
_KIND = "controlvector"
_NAME = re.compile(r"direction\.0*([1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True, eq=False)
class ControlVector:
    """Directions by block, float32 (n_embd,).

    architecture  of the model that it was made with; "" if a file does not say
    """

    directions: Mapping[int, np.ndarray]
    architecture: str = ""

    def addends(
        self, model: Model, scale: float = 1.0, blocks: Iterable[int] | None = None
    ) -> dict[str, np.ndarray]:
        """What a trace adds: `with model.trace(add=vector.addends(model, 2.0))`.

        blocks: after which; all that have a direction by default. Raises ConfigError for directions
        that do not fit the model, for blocks without one, and for a scale that is not finite.
        """
        faults = []
        c, chosen = model.config, sorted(self.directions if blocks is None else blocks)
        if not np.isfinite(scale):
            faults.append(f"scale is {scale}, wanted a finite number")
        if missing := [i for i in chosen if i not in self.directions]:
            faults.append(f"block {missing[0]} has no direction")
        elif beyond := [i for i in chosen if i >= c.n_layer]:
            faults.append(f"there is a direction for block {beyond[0]} of {c.n_layer}")
        if sizes := {d.size for d in self.directions.values()} - {c.n_embd}:
            faults.append(f"directions have {min(sizes)} numbers, wanted the model's {c.n_embd}")
        if faults:
            raise ConfigError(f"control vector: {first_of(faults, 3)}")
        most = max(float(np.abs(self.directions[i]).max()) for i in chosen) if chosen else 0.0
        if abs(scale) * most > float(np.finfo(np.float32).max):
            raise ConfigError(f"control vector: scale is {scale:g}, too large for float32")
        return {f"blk.{i}.out": np.float32(scale) * self.directions[i] for i in chosen}

    def within(self, first: int, last: int) -> ControlVector:
        """The directions of blocks `first` to `last`, both counted. ConfigError if none is left."""
        kept = {i: d for i, d in self.directions.items() if first <= i <= last}
        if not kept:
            ends = f"{min(self.directions)} to {max(self.directions)}"
            raise ConfigError(
                f"control vector: no direction for blocks {first} to {last}, wanted some of {ends}"
            )
        return ControlVector(kept, self.architecture)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what llama.cpp's --control-vector reads. PyggmlError if the disk refuses."""
        metadata = {
            "general.architecture": _KIND,
            f"{_KIND}.model_hint": self.architecture,
            f"{_KIND}.layer_count": np.int32(len(self.directions)),
        }
        tensors: list[gguf.TensorSource] = [
            (f"direction.{i}", F32, d.shape, d) for i, d in sorted(self.directions.items())
        ]
        gguf.write(path, metadata, tensors)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ControlVector:
        """The vector in a file; directions of one block add up, as in llama.cpp.

        GGUFError, naming the faults, for another kind of file, for directions of no block or of
        block 0, and for those that are not F32, finite, and of one length.
        """
        with gguf.open(path) as file:
            kind, hint = file.word("general.architecture"), file.word(f"{_KIND}.model_hint")
            if kind != _KIND:
                raise GGUFError(f"{path}: general.architecture is {kind!r}, wanted {_KIND!r}")
            if faults := _faults(file):
                raise GGUFError(f"{path}: {first_of(faults, 5)}")
            directions: dict[int, np.ndarray] = {}
            for name in file.tensors:
                match = _NAME.fullmatch(name)
                assert match is not None
                d = np.array(file.data(name), np.float32)
                block = int(match[1])
                directions[block] = directions[block] + d if block in directions else d
        return cls(directions, hint)


def _faults(file: gguf.GGUFFile) -> list[str]:
    """What is wrong with the tensors of a file."""
    faults, sizes = [], set()
    for info in file.tensors.values():
        if not _NAME.fullmatch(info.name):
            faults.append(f"tensor {brief(info.name)}, wanted direction.1 and so on")
        elif info.dtype is not F32 or len(info.shape) != 1:
            faults.append(f"{info.name} is {info.dtype}{list(info.shape)}, wanted F32 and one axis")
        elif not np.isfinite(file.data(info.name)).all():
            faults.append(f"{info.name} is not finite")
        sizes.add(info.shape)
    if not sizes:
        faults.append("there are no directions")
    elif len(sizes) > 1 and not faults:
        faults.append(f"directions of {len(sizes)} lengths, wanted one")
    return faults


def control_vector(
    model: Model,
    towards: Sequence[Ids],
    away: Sequence[Ids],
    by: Literal["mean", "pca"] = "mean",
    positions: slice = AFTER_FIRST,
    blocks: Iterable[int] | None = None,
) -> ControlVector:
    """A direction for each block but the first, or for these, from texts of two kinds (token ids).

    A text's activation is the mean over its `positions`: all but the first by default, and
    slice(-1, None) is the last. by "mean": the mean of the texts `towards` less that of those
    `away` (Turner et al. 2023). by "pca": of the differences of pairs, one text of either kind
    each, the direction in which they are largest (Zou et al. 2023), as long as the pairs differ
    along it on average. At a scale of 1 it takes a text from one kind to the other.

    Raises DataError for no texts, for a text without such positions, and with "pca" for unlike
    numbers of texts; ConfigError for a model of one block, for blocks that it has not, and where
    the residual stream is several vectors.
    """
    if by not in ("mean", "pca"):
        raise ConfigError(f"by is {by!r}, wanted 'mean' or 'pca'")
    if not towards or not away or (by == "pca" and len(towards) != len(away)):
        pairs = ", and as many of each for pairs" if by == "pca" else ""
        raise DataError(
            f"{len(towards)} wanted texts and {len(away)} others, wanted one at least{pairs}"
        )
    chosen = _blocks(model.config.n_layer, blocks)
    names = [f"blk.{i}.out" for i in chosen]
    to, off = (text_means(model, names, texts, positions) for texts in (towards, away))
    if to.ndim != 3 or to.shape[2] != model.config.n_embd:
        raise ConfigError(
            f"{model.config.architecture} has a residual stream of several vectors, wanted one"
        )
    if by == "mean":
        rows = to.mean(axis=0) - off.mean(axis=0)
    else:
        rows = np.stack([_principal(d) for d in (to - off).swapaxes(0, 1)])
    directions = {i: row.astype(np.float32) for i, row in zip(chosen, rows, strict=True)}
    return ControlVector(directions, model.config.architecture)


def _blocks(n_layer: int, given: Iterable[int] | None) -> list[int]:
    """The blocks that get a direction."""
    if n_layer < 2:
        raise ConfigError("the model has one block, wanted two: the first gets no direction")
    chosen = sorted({*range(1, n_layer)} if given is None else {*given})
    if strange := [i for i in chosen if not 1 <= i < n_layer]:
        raise ConfigError(f"blocks has {strange[0]}, wanted 1 to {n_layer - 1}")
    if not chosen:
        raise ConfigError("blocks has none, wanted one at least")
    return chosen


def text_means(
    model: Model, names: Sequence[str], texts: Sequence[Ids], positions: slice = AFTER_FIRST
) -> np.ndarray:
    """Activations of texts, each text's averaged over its positions: float64 (n_texts, n_names, …),
    of names whose activations have one shape but for the tokens.

    Raises DataError for no texts, and for a text without such positions.
    """
    if not texts:
        raise DataError("no texts, wanted one at least")
    means = []
    for number, ids in enumerate(texts, 1):
        with model.trace(*names) as t:
            model.logits(ids)
        rows = [t[name][positions] for name in names]
        if not len(rows[0]):
            raise DataError(f"text {number} has {len(ids)} tokens, none at the positions wanted")
        means.append([r.mean(axis=0, dtype=np.float64) for r in rows])
    return np.array(means)


def _principal(differences: np.ndarray) -> np.ndarray:
    """The direction (n_embd,) in which differences (n_pairs, n_embd) are largest, as long as they
    are along it on average."""
    *_, axes = np.linalg.svd(differences, full_matrices=False)
    return np.asarray((differences @ axes[0]).mean() * axes[0])
