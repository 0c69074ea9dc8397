"""Importance matrices in llama.cpp's files: how large the inputs of each matrix are, by column.

For a matrix W and inputs x, the error of a rounded W is Σ_j (ΔW_ij)² x_j² on average, if errors are
independent. So what counts is the mean of x_j², column by column.

GGUF      general.type = "imatrix"; imatrix.datasets (names of texts), imatrix.chunk_count and
          imatrix.chunk_size (tokens of a chunk);
          NAME.in_sum2 F32 (n_matrices, n): Σ x² of the tensor NAME; NAME.counts F32 (n_matrices,
          1): so many x. n_matrices is the number of experts, else 1, and leading axes of 1 are left
          out. A matrix for each head, as of latent attention, has one count and one long row
.dat      the older file: n_entries i32, then of each: length i32 and bytes of the name, number of
          calls i32, number of values i32, values f32, which are means times calls; then the number
          of chunks i32, length i32 and bytes of the text's name, or nothing

Source: llama.cpp, tools/imatrix/imatrix.cpp, common/imatrix-loader.cpp.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pyggml import gguf
from pyggml.errors import GGUFError
from pyggml.files import first_hole, in_characters, open_regular
from pyggml.gguf.fields import brief
from pyggml.graph.dtypes import F32

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MOST_NAME, _MOST_ENTRIES = 256, 1 << 20


@dataclass(frozen=True, slots=True)
class InputSums:
    """The inputs of one tensor: Σ x² float32 (n_matrices, n), and how many x, float32
    (n_matrices,)."""

    squares: np.ndarray
    counts: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """The importance of each column, float32 (n_matrices, n): the mean of x², or 1 of an
        expert that never was asked."""
        counts = self.counts[:, None]
        return np.where(counts > 0, self.squares / np.where(counts > 0, counts, 1), np.float32(1))


@dataclass(frozen=True, slots=True)
class ImportanceMatrix:
    """Sums by the full name of their tensor, what they were collected on, and their file."""

    sums: Mapping[str, InputSums]
    datasets: tuple[str, ...]
    n_chunks: int
    n_ctx: int
    path: str = ""

    def origin(self) -> dict[str, Any]:
        """llama.cpp's keys of a model that was packed by it, after "quantize.imatrix."."""
        facts = {"file": self.path, "dataset": next(iter(self.datasets), "")}
        counts = {"entries_count": len(self.sums), "chunks_count": self.n_chunks}
        return {k: v for k, v in facts.items() if v} | {k: np.uint32(n) for k, n in counts.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as llama.cpp does; an older file stays whole until the new one is complete."""
        metadata = {
            "general.type": "imatrix",
            "imatrix.datasets": list(self.datasets),
            "imatrix.chunk_count": np.uint32(self.n_chunks),
            "imatrix.chunk_size": np.uint32(self.n_ctx),
        }
        tensors: list[gguf.TensorSource] = []
        for name in sorted(self.sums):
            sums = self.sums[name]
            for suffix, array in ((_SUMS, sums.squares), (_COUNTS, sums.counts[:, None])):
                values = np.asarray(array if len(array) > 1 else array[0], np.float32)
                tensors.append((name + suffix, F32, values.shape, values))
        gguf.write(path, metadata, tensors)


def read_imatrix(path: str | os.PathLike[str]) -> ImportanceMatrix:
    """Read either kind of file. GGUFError for one that is damaged or something else."""
    path = Path(path)
    try:
        with open_regular(path) as file:
            is_gguf = file.read(4) == b"GGUF"
            matrix = _read_gguf(path) if is_gguf else _read_dat(_whole(file))
    except OSError as error:
        raise GGUFError(f"{path}: cannot be opened: {error.strerror or error}") from None
    except (struct.error, ValueError, OverflowError) as error:
        raise GGUFError(f"{path}: is no importance matrix: {error}") from None
    if not all(0 <= n < 1 << 32 for n in (matrix.n_chunks, matrix.n_ctx)):
        claim = f"{matrix.n_chunks} chunks of {matrix.n_ctx} tokens"
        raise GGUFError(f"{path}: claims {claim}, wanted 0 to 2^32 - 1 of each")
    for name, sums in matrix.sums.items():
        if not all(np.isfinite(a).all() and (a >= 0).all() for a in (sums.squares, sums.counts)):
            raise GGUFError(f"{path}: {brief(name)} has sums that are not finite and 0 or more")
    return replace(matrix, path=in_characters(path))


def _whole(file: BinaryIO) -> bytes:
    """All bytes of a file. ValueError for one with holes, which may be of any size."""
    hole = first_hole(file)
    if hole is not None:
        raise ValueError(f"nothing was ever written at byte {hole} and behind it")
    file.seek(0)
    return file.read()


def _read_gguf(path: Path) -> ImportanceMatrix:
    with gguf.open(path) as file:
        if file.word("general.type") != "imatrix":
            raise GGUFError(f"{path}: general.type is not 'imatrix', wanted an importance matrix")
        by_name = {}
        for name in file.tensors:
            base = name.removesuffix(_SUMS)
            if name.endswith(_SUMS) and base + _COUNTS in file.tensors:
                by_name[base] = _sums(file, base)
            elif (
                not name.endswith(_COUNTS) or name.removesuffix(_COUNTS) + _SUMS not in file.tensors
            ):
                raise GGUFError(f"{path}: {brief(name)} is no sum with a count, or lacks one")
        if not by_name:
            raise GGUFError(f"{path}: has no tensors, wanted sums and counts of some matrices")
        datasets = file.get("imatrix.datasets")
        return ImportanceMatrix(
            by_name,
            tuple(datasets) if isinstance(datasets, gguf.StringArray) else (),
            file.optional("imatrix.chunk_count", int, 0),
            file.optional("imatrix.chunk_size", int, 0),
        )


def _sums(file: gguf.GGUFFile, base: str) -> InputSums:
    squares, counts = (file.tensors[base + suffix] for suffix in (_SUMS, _COUNTS))
    n = int(np.prod(counts.shape))
    if squares.dtype is not F32 or counts.dtype is not F32:
        raise GGUFError(f"{file.path}: {brief(base)} has {squares.dtype} sums, wanted F32")
    if not n or np.prod(squares.shape) % n:
        raise GGUFError(f"{file.path}: {brief(base)} has {squares.shape} sums for {n} counts")
    values = np.array(file.data(base + _SUMS)).reshape(n, -1)
    return InputSums(values, np.array(file.data(base + _COUNTS)).reshape(n))


def _read_dat(raw: bytes) -> ImportanceMatrix:
    """struct.error or ValueError, with a reason, for bytes that are no such file."""
    at = 0

    def numbers(n: int, kind: str = "i") -> tuple:
        nonlocal at
        values = struct.unpack_from(f"<{n}{kind}", raw, at)
        at += 4 * n
        return values

    def text(most: int) -> str:
        nonlocal at
        (n,) = numbers(1)
        if not 0 <= n <= min(most, len(raw) - at):
            raise ValueError(f"a name claims {n} bytes")
        at += n
        return raw[at - n : at].decode("utf-8", "replace")

    (n_entries,) = numbers(1)
    if not 1 <= n_entries <= _MOST_ENTRIES:
        raise ValueError(f"it claims {n_entries} entries")
    by_name = {}
    for _ in range(n_entries):
        name = text(_MOST_NAME)
        n_calls, n = numbers(2)
        if not 1 <= n <= (len(raw) - at) // 4:
            raise ValueError(f"{brief(name)} claims {n} values")
        squares = np.frombuffer(raw, "<f4", n, at).reshape(1, n)
        at += 4 * n
        by_name[name] = InputSums(squares, np.array([max(n_calls, 1)], np.float32))
    n_chunks = numbers(1)[0] if at < len(raw) else 0
    datasets = (text(1 << 20),) if at < len(raw) else ()
    return ImportanceMatrix(by_name, datasets, max(n_chunks, 0), 0)
