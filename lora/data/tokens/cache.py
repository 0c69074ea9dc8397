"""CachedDocuments tokens: the tokens of files read before, as GGUF files mapped into memory.

    DIGEST.gguf   general.type "tokens"; the tensors ids, lengths, trained, places of `Documents`
                  tokens.key       JSON: what the tokens depend on; DIGEST is its SHA-256
                  tokens.about     JSON: the file's format and its faulty rows
                  tokens.crc32     of each tensor
    DIGEST.json   size, times and SHA-256 of a file that was read; DIGEST is that of its path

A file is known by the SHA-256 of its bytes. Its size and times stand for that hash, so that a
second run need not read it. Damaged or inconsistent entries count as absent and are made anew.
"""

import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pyggml import gguf
from pyggml.errors import DataError, GGUFError, PyggmlError, cause_of
from pyggml.files import replacing
from pyggml.files.json_text import read_object
from pyggml.graph.dtypes import F32, I8, I32, I64, DType
from pyggml.lora.data.formats.source import open_bytes
from pyggml.lora.data.reading.files import SHOWN, UNITS, RowFaults
from pyggml.lora.data.tokens.documents import Documents, Notes
from pyggml.lora.data.tokens.spill import blocks

MOST_BYTES = 8 << 30  # of a folder; the entries that were used last stay
MOST_FILES = 1 << 16
VERSION = 6  # of what is made of a file and its rows: change it, and older entries are not found
_NAME = re.compile(r"[0-9a-f]{32}\.(gguf|json)")
_SETTLED = 2.0  # seconds after which a file system tells a later change by its time
_MOST_STAMP = 1 << 16  # bytes
_DTYPES: dict[str, tuple[DType, ...]] = {
    "ids": (I32,),
    "lengths": (I64,),
    "trained": (I8, F32),  # F32 where a token is learned by a share
    "places": (I64,),
}


@dataclass(frozen=True, slots=True)
class CachedDocuments:
    """A file's documents and format, its skipped rows, and remarks for the user."""

    documents: Documents
    kind: str
    faults: RowFaults
    notes: Notes = field(default_factory=dict)


class TokenCache:
    """A folder of kept tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._room, self._places = -1, 0  # bytes and files that are free, as far as is known

    def find(self, key: Mapping[str, Any], n_vocab: int) -> CachedDocuments | None:
        """The entry with this key, mapped; None if there is none."""
        path = self._path(key)
        try:
            with gguf.open(path) as file:
                entry = _read_entry(file, key, n_vocab)
            os.utime(path)  # it was used now
            return entry
        except (GGUFError, ValueError, OSError):
            return None

    def keep(self, key: Mapping[str, Any], kept: CachedDocuments) -> str:
        """Write an entry. Returns the reason if it cannot be written, else ""."""
        documents = kept.documents
        tensors = {"ids": documents.ids, "lengths": documents.lengths}
        if documents.trained is not None:
            is_flag = documents.trained.dtype == np.bool_
            tensors["trained"] = documents.trained.view(np.int8) if is_flag else documents.trained
        if documents.places is not None:
            tensors["places"] = documents.places
        metadata = {
            "general.type": "tokens",
            "tokens.key": _text(key),
            "tokens.about": _text({"kind": kept.kind, "notes": kept.notes, **asdict(kept.faults)}),
            "tokens.crc32": np.array([_crc32(array) for array in tensors.values()], np.uint32),
        }
        sources = [
            (name, _DTYPES[name][array.dtype == np.float32], array.shape, array)
            for name, array in tensors.items()
        ]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(sum(array.nbytes for array in tensors.values()))
            gguf.write(self._path(key), metadata, sources, durable=False)
        except (OSError, PyggmlError) as error:
            return str(error)
        return ""

    def folder_made(self) -> Path | None:
        """The folder, made if it has to be; None if it cannot be."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        return self.folder

    def _path(self, key: Mapping[str, Any]) -> Path:
        return self.folder / f"{_digest(_text(key))}.gguf"

    def _make_room(self, n_bytes: int) -> None:
        """Have room for another entry and its stamp. The folder is looked at once in a while, so
        that many entries take time in proportion to their number."""
        self._room -= n_bytes
        self._places -= 2
        if self._room < 0 or self._places < 0:
            self._room, self._places = self._prune(n_bytes)

    def _prune(self, room_for: int) -> tuple[int, int]:
        """Remove the least recently used of our own files, until an eighth of the room is free and
        there is some for another entry; the bytes and files that are then free."""
        stats = []
        for path in self.folder.iterdir():
            if _NAME.fullmatch(path.name):
                with suppress(OSError):  # another run removed it
                    stats.append((path, path.stat()))
        stats.sort(key=lambda each: each[1].st_mtime, reverse=True)
        total = sum(status.st_size for _, status in stats)
        fits = total + room_for <= MOST_BYTES and len(stats) + 2 <= MOST_FILES
        share = 1 if fits else 7 / 8
        room, places = int(MOST_BYTES * share) - room_for, int(MOST_FILES * share) - 2
        for path, status in stats:
            if (room >= status.st_size and places > 0) or not is_ours(path):
                room -= status.st_size
                places -= 1
            else:
                with suppress(OSError):  # another run was faster, or Windows has it mapped
                    path.unlink()
        return room, places

    # -- source files ---------------------------------------------------------------------------

    def content(self, path: Path) -> str:
        """The SHA-256 of a file, which is read only if its size or times are not known.

        Raises DataError if it cannot be read.
        """
        try:
            now, about = time.time(), _about(path)
            stamp = self.folder / f"{_digest(os.fsencode(path.resolve()))}.json"
            stored = read_object(stamp, _MOST_STAMP)
            if stored.get("about") == about and isinstance(stored.get("sha256"), str):
                return str(stored["sha256"])
            with open_bytes(path) as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot be read: {cause_of(error)}") from error
        if now - path.stat().st_mtime > _SETTLED and _about(path) == about:
            with suppress(OSError, PyggmlError):  # then the next run reads the file again
                self.folder.mkdir(parents=True, exist_ok=True)
                with replacing(stamp, durable=False) as out:
                    out.write(_text({"about": about, "sha256": sha256}).encode())
        return sha256


def is_ours(path: Path) -> bool:
    """Whether a file of a cache's folder was written by it: by its name and by what is in it.

    An entry is named by the digest of its key. A stamp has nothing but numbers and a SHA-256.
    """
    if not _NAME.fullmatch(path.name) or path.is_symlink():
        return False
    if path.suffix == ".json":
        stamp = read_object(path, _MOST_STAMP)
        about, sha256 = stamp.get("about"), stamp.get("sha256")
        is_about = isinstance(about, list) and all(type(n) is int for n in about)
        is_digest = isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256) is not None
        return stamp.keys() == {"about", "sha256"} and is_about and is_digest
    try:
        with gguf.open(path) as file:
            kind, key = (file.require(name, str) for name in ("general.type", "tokens.key"))
    except GGUFError:
        return False
    return kind == "tokens" and _digest(key) == path.stem


def _digest(text: str | bytes) -> str:
    raw = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(raw).hexdigest()[:32]


def _about(path: Path) -> list[int]:
    """What changes with a file's content."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _crc32(array: np.ndarray) -> int:
    crc = 0
    for block in blocks(array):
        crc = zlib.crc32(block.tobytes(), crc)
    return crc


def _read_entry(file: gguf.GGUFFile, key: Mapping[str, Any], n_vocab: int) -> CachedDocuments:
    """GGUFError or ValueError for anything that `keep` would not have written."""
    said = [file.require(name, str) for name in ("general.type", "tokens.key")]
    tensors = {name: file.data(name) for name in file.tensors}
    types = {name: _DTYPES.get(name, ()) for name in tensors}
    if said != ["tokens", _text(key)] or not {"ids", "lengths"} <= tensors.keys():
        raise ValueError("other tokens")
    if any(file.tensors[name].dtype not in kinds for name, kinds in types.items()):
        raise ValueError("other tensors")
    checks = [_crc32(array) for array in tensors.values()]
    if file.require("tokens.crc32", np.ndarray).tolist() != checks:
        raise ValueError("damaged")
    if not _fits(tensors, n_vocab):
        raise ValueError("counts that do not fit together")
    lengths, trained = tensors["lengths"], tensors.get("trained")
    documents = Documents(
        tensors["ids"],
        np.cumsum(lengths) - lengths,
        lengths,
        trained.view(np.bool_) if trained is not None and trained.dtype == np.int8 else trained,
        tensors.get("places"),
    )
    return CachedDocuments(documents, *_about_rows(file.require("tokens.about", str)))


def _fits(tensors: Mapping[str, np.ndarray], n_vocab: int) -> bool:
    """Whether every id is of the vocabulary, and every array as long as the others ask."""
    ids, lengths, n = tensors["ids"], tensors["lengths"], len(tensors["lengths"])
    trained, places = tensors.get("trained"), tensors.get("places")
    if ids.ndim != 1 or lengths.ndim != 1 or lengths.min() < 0 or lengths.max() > len(ids):
        return False
    if float(lengths.sum(dtype=np.float64)) != len(ids):  # whole numbers might wrap around
        return False
    if trained is not None and (trained.shape != ids.shape or not _within(trained, 2)):
        return False
    return _within(ids, n_vocab) and (places is None or places.shape == (n, 2))


def _within(values: np.ndarray, end: int) -> bool:
    return all(part.min() >= 0 and part.max() < end for part in blocks(values))


def _about_rows(text: str) -> tuple[str, RowFaults, Notes]:
    """A file's format, its faulty rows, and what is to be said of the others."""
    about = json.loads(text)
    names = ("kind", "notes", "total", "places", "counts", "lack_names")
    if not isinstance(about, dict) or about.keys() != set(names):
        raise ValueError("other things said")
    kind, notes, total, places, counts, lack_names = (about[name] for name in names)
    if kind not in (*UNITS, "text") or type(total) is not int or not _are_faults(places, counts):
        raise ValueError("other things said")
    if not isinstance(notes, dict) or not isinstance(lack_names, bool):
        raise ValueError("other things said")
    return (
        kind,
        RowFaults(total, places, counts, lack_names),
        {note: _note(said) for note, said in notes.items()},
    )


def _are_faults(places: Any, counts: Any) -> bool:
    """Whether these are the places of faults, some of each, and their counts."""
    if not (
        isinstance(places, dict) and isinstance(counts, dict) and places.keys() == counts.keys()
    ):
        return False
    return len(counts) <= SHOWN and all(
        type(n) is int and isinstance(rows, list) and rows and all(isinstance(p, str) for p in rows)
        for n, rows in zip(counts.values(), places.values(), strict=True)
    )


def _note(said: Any) -> tuple[int, str]:
    match said:
        case [int(n), str(place)]:
            return n, place
    raise ValueError("other things said")
