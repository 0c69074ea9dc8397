"""Models and data sets by their names on the Hugging Face hub, in huggingface_hub's own cache.

owner/name             a model's only GGUF file, or of several its Q4_K_M
owner/name:Q8_0        its file of this type; a model in several parts is all of them
owner/name:FILE.gguf   this file
hub:owner/name         the files of a data set's training split
hub:owner/name/PATH    those at this path or below, or that fit this pattern

`@REVISION` after the name takes another than the newest revision. The hub is asked each time; where
it cannot be reached, or HF_HUB_OFFLINE is set, what is cached serves, and that is said. A download
that broke off goes on where it was. huggingface_hub is imported when it is asked for.
"""

import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pyggml.errors import ConfigError, suggestion
from pyggml.extras import how_to_install

SCHEME = "hub:"
_USUAL = "Q4_K_M"
_SECONDS = 10  # that the hub has to answer
_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?"
_REVISION = r"(?:@(?P<revision>[\w./-]+))?"
_MODEL = re.compile(rf"(?:{SCHEME})?(?P<name>{_NAME}){_REVISION}(?::(?P<tag>[^:]+))?")
_DATA = re.compile(rf"{SCHEME}(?P<name>{_NAME}){_REVISION}(?:/(?P<path>[^@]+))?")
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")  # of a name without its suffix
_NO_MODEL = re.compile(r"(^|/)(mmproj|imatrix)|imatrix\.gguf$", re.IGNORECASE)
_TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
_PACKED = tuple(f"{suffix}{packed}" for suffix in _TEXTS for packed in (".gz", ".zst"))
_DATA_SUFFIXES = (*_TEXTS, *_PACKED, ".parquet")
_ABOUT = ("dataset_infos.json", "dataset_info.json", "license.txt")
TRAINING, HELD_OUT = ("train",), ("validation", "valid", "val", "dev", "test", "eval")
_SPLITS = (*TRAINING, *HELD_OUT)


def is_model_name(word: str) -> bool:
    """Whether this is the name of a model on the hub rather than a path: there is no such file, and
    it does not end as the path of one would."""
    match = _MODEL.fullmatch(word)
    if match is None or (match["tag"] is None and word.endswith((".gguf", ".dat"))):
        return False
    return word.startswith(SCHEME) or not Path(word).exists()


def model_path(word: str) -> Path:
    """The file of this model in the cache, after its download; of several parts the first.

    Raises ConfigError: one sentence, for names that the hub does not know, types that the model
    does not have, and what is neither cached nor to be reached.
    """
    match = _MODEL.fullmatch(word)
    if match is None:
        raise ConfigError(f"{word}: wanted OWNER/NAME:TYPE, such as Qwen/Qwen3-0.6B-GGUF:Q8_0")
    about = f"{word}: is no file here, and as a model of the hub it"
    repository = _Repository(match["name"], "model", match["revision"] or "main", about)
    tag = match["tag"] or ""
    return repository.fetch(lambda files: _model_files(word, files, tag))[0]


def data_paths(word: str, splits: Sequence[str] = TRAINING) -> list[Path]:
    """The files of this data set in the cache, sorted, after their download: those of the first of
    these splits that it has. Raises ConfigError as `model_path` does."""
    match = _DATA.fullmatch(word)
    if match is None:
        raise ConfigError(f"{word}: wanted hub:OWNER/NAME, or hub:OWNER/NAME/PATH")
    about = f"{word}: as a data set of the hub it"
    repository = _Repository(match["name"], "dataset", match["revision"] or "main", about)
    return repository.fetch(lambda files: _data_files(word, files, match["path"] or "", splits))


# -- which files ----------------------------------------------------------------------------------


def _model_files(word: str, files: Sequence[str], tag: str) -> list[str]:
    """The parts of the file of this type, or of this name."""
    models = [f for f in files if f.endswith(".gguf") and not _NO_MODEL.search(f)]
    stems: dict[str, list[str]] = {}
    for file in sorted(models):
        stems.setdefault(_PART.sub("", file.removesuffix(".gguf")), []).append(file)
    exact = [parts for parts in stems.values() if tag in parts]
    fits = exact or [
        parts
        for stem, parts in stems.items()
        if re.search(rf"(^|[-._/]){re.escape(tag or _USUAL)}$", stem, re.IGNORECASE)
    ]
    if not tag and len(stems) == 1:
        fits = [*stems.values()]
    if len(fits) != 1:
        names = [*stems]
        near = suggestion(tag, [stem.rpartition("-")[2] for stem in names]) if tag else ""
        what = f"{len(fits)} files of type {tag or _USUAL}" if fits else f"no {tag or 'such'} file"
        listed = ", ".join(f"{stem}.gguf" for stem in names) or "no GGUF file"
        raise ConfigError(f"{word}: has {what}{near}; wanted one of its files: {listed}")
    (parts,) = fits
    _check_whole(word, parts)
    return parts


def _data_files(word: str, files: Sequence[str], path: str, splits: Sequence[str]) -> list[str]:
    if path in files:
        return [path]
    inside = [f for f in sorted(files) if f.lower().endswith(_DATA_SUFFIXES)]
    inside = [f for f in inside if f.rpartition("/")[2].lower() not in _ABOUT and f[0] != "."]
    if any(c in path for c in "*?["):
        chosen = [f for f in inside if fnmatchcase(f, path)]
    else:
        folder = path.strip("/") + "/" if path else ""
        chosen = _of_split(word, [f for f in inside if f.startswith(folder)], splits)
        _check_one_set(word, chosen)
    if not chosen:
        listed = ", ".join(inside[:20]) or "none"
        raise ConfigError(f"{word}: has no data there; its files of data are {listed}")
    _check_whole(word, chosen)
    return chosen


def _of_split(word: str, files: list[str], splits: Sequence[str]) -> list[str]:
    """The files of the first of these splits; all, if no name tells of a split."""
    by_split = {
        split: [f for f in files if re.search(rf"(^|[-_./]){split}([-_./]|$)", f, re.IGNORECASE)]
        for split in _SPLITS
    }
    for split in splits:
        if by_split[split]:
            return by_split[split]
    choices = [split for split, named in by_split.items() if named]
    if choices:
        raise ConfigError(
            f"{word}: has no split {' or '.join(splits)}, but {', '.join(choices)}: name a file or "
            f"folder of it, such as {word}/{by_split[choices[0]][0]}"
        )
    return files


def _check_one_set(word: str, files: Iterable[str]) -> None:
    """ConfigError if the files are several data sets: folders that name no split, or data."""
    folders = {
        "/".join(p for p in f.split("/")[:-1] if p.lower() not in (*_SPLITS, "data")) for f in files
    }
    if len(folders) > 1:
        names = ", ".join(f"{word}/{folder}" for folder in sorted(folders) if folder)
        raise ConfigError(f"{word}: has several configurations, wanted one of {names}")


def _check_whole(word: str, files: Iterable[str]) -> None:
    """ConfigError if a file in several parts lacks some, as in a cache after a broken download."""
    for file in files:
        match = _PART.search(_stem(file))
        if match is None:
            continue
        n = sum(f.startswith(file[: match.start()]) and bool(_PART.search(_stem(f))) for f in files)
        if n != int(match[2]):
            raise ConfigError(f"{word}: of {int(match[2])} parts there are {n}, wanted all")


def _stem(file: str) -> str:
    return file.rpartition(".")[0]


# -- the hub and its cache ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Repository:
    """A repository of the hub. about: what a sentence about it begins with."""

    name: str
    kind: str
    revision: str
    about: str

    def fetch(self, choose: Callable[[Sequence[str]], list[str]]) -> list[Path]:
        """The chosen ones of its files, in the cache."""
        hub = _huggingface_hub(self.about)
        try:
            files = self._list_files(hub)
        except _Unreachable as error:
            cached = self._cached_snapshot(hub)
            if cached is None:
                raise ConfigError(
                    f"{self.about} cannot be fetched, nor is it cached: {error}"
                ) from None
            warnings.warn(f"{self.name}: {error}: as it is cached", stacklevel=2)
            folder, files = cached
            return [folder / file for file in choose(files)]
        return [self._download(hub, file) for file in choose(files)]

    def _list_files(self, hub: Any) -> list[str]:
        api = hub.HfApi(endpoint=_endpoint())
        try:
            info = api.repo_info(
                self.name, repo_type=self.kind, revision=self.revision, timeout=_SECONDS
            )
        except Exception as error:  # of the hub, of its HTTP client, or of the system
            raise self._fault(hub, error) from None
        return [file.rfilename for file in info.siblings]

    def _download(self, hub: Any, file: str) -> Path:
        try:
            path = hub.hf_hub_download(
                self.name,
                file,
                repo_type=self.kind,
                revision=self.revision,
                cache_dir=_cache(hub),
                endpoint=_endpoint(),
            )
        except Exception as error:
            fault = self._fault(hub, error)
            if isinstance(fault, ConfigError):
                raise fault from None
            raise ConfigError(
                f"{self.about} was not fetched to its end: {file}: {fault}; the same command goes "
                "on from there"
            ) from None
        return Path(path)

    def _fault(self, hub: Any, error: Exception) -> Exception:
        """What an error of the hub says in one sentence; _Unreachable if the cache may help."""
        errors, host = hub.errors, _endpoint() or hub.constants.ENDPOINT
        if isinstance(error, errors.GatedRepoError):
            page = f"{host}/{'datasets/' * (self.kind == 'dataset')}{self.name}"
            return ConfigError(
                f"{self.about} is gated: accept its terms at {page}, then `hf auth login`"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return ConfigError(f"{self.about} has no revision {self.revision!r}")
        if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
            return ConfigError(
                f"{self.about} is not known there; one that is private wants `hf auth login`"
            )
        if isinstance(error, errors.OfflineModeIsEnabled):
            return _Unreachable("HF_HUB_OFFLINE is set")
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return _Unreachable(f"{host} does not answer ({reason})")

    def _cached_snapshot(self, hub: Any) -> tuple[Path, list[str]] | None:
        """The newest cached snapshot of this revision, and its files."""
        folder = Path(_cache(hub) or hub.constants.HF_HUB_CACHE)
        folder /= f"{self.kind}s--{self.name.replace('/', '--')}"
        try:
            number = (folder / "refs" / self.revision).read_text().strip()
        except OSError:
            number = self.revision
        snapshot = folder / "snapshots" / number
        if not snapshot.is_dir():
            return None
        files = [p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.is_file()]
        return snapshot, sorted(files)


def hide_progress() -> None:
    """Download without bars from now on."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # read when huggingface_hub is imported


class _Unreachable(Exception):
    """The hub cannot be asked."""


def _huggingface_hub(about: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError:
        raise ConfigError(f"{about} needs huggingface_hub: {how_to_install('hub')}") from None
    return huggingface_hub


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT")


def _cache(hub: Any) -> str | None:
    return os.environ.get("HF_HUB_CACHE")
