"""Tokens kept for the next run: found by content, checked on every count, made anew where wrong."""

import os

import numpy as np
import pytest

from pyggml import gguf
from pyggml.errors import DataError
from pyggml.lora import DataConfig, read_corpus
from pyggml.lora.data import TokenCache
from pyggml.lora.data.tokens import cache

import chats

CONFIG = DataConfig(ctx=8, val_split=0.0)
ROWS = '{"prompt": "ab", "completion": "cdef"}\n' * 9 + '{"text": "xyz"}\n'


class Bytes(chats.Bytes):
    """It counts how often it is asked."""

    n_vocab, identity = 300, "bytes"

    def __init__(self):
        self.n_calls = 0

    def encode(self, text, add_special=True, parse_special=False):
        self.n_calls += 1
        return super().encode(text)


@pytest.fixture
def kept(tmp_path):
    """A file of rows, and the folder of its tokens."""
    path = tmp_path / "a.jsonl"
    path.write_text(ROWS)
    os.utime(path, (1e9, 1e9))
    read_corpus(path, Bytes(), CONFIG, TokenCache(tmp_path / "cache"))
    return path, tmp_path / "cache"


def again(path, folder, config=CONFIG, **changes):
    """Whether the tokens were kept, and the corpus."""
    tokenizer = Bytes()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    corpus = read_corpus(path, tokenizer, config, TokenCache(folder))
    assert corpus.files[0].was_kept == (tokenizer.n_calls == 0)
    return corpus.files[0].was_kept, corpus


def test_a_second_run_reads_the_same_tokens(kept):
    path, folder = kept
    found, corpus = again(path, folder)
    assert found
    assert corpus.digest() == read_corpus(path, Bytes(), CONFIG).digest()


def test_tokens_are_known_by_the_content_not_by_the_name(kept):
    path, folder = kept
    copy = path.with_name("b.jsonl")
    copy.write_text(ROWS)
    assert again(copy, folder)[0]
    path.write_text(ROWS + ROWS)
    assert not again(path, folder)[0]


def test_what_tokens_depend_on_makes_others(kept):
    path, folder = kept
    assert not again(path, folder, identity="other bytes")[0]
    assert not again(path, folder, DataConfig(ctx=8, special_tokens="plain"))[0]
    named = ("prompt=completion", "completion=prompt")
    assert not again(path, folder, DataConfig(ctx=8, columns=named, skip_bad_rows=True))[0]
    assert again(path, folder, DataConfig(ctx=7, val_split=0.2))[0], "windows are made anew alone"


def rewritten(path, change):
    """The entry with changed metadata or tensors, its checksums made to fit."""
    with gguf.open(path) as file:
        metadata = {key: field.value for key, field in file.metadata.items()}
        tensors = {name: file.data(name).copy() for name in file.tensors}
    change(metadata, tensors)
    crcs = [cache._crc32(array) for array in tensors.values()]
    metadata["tokens.crc32"] = np.array(crcs, np.uint32)
    types = cache._DTYPES
    gguf.write(
        path, metadata, [(n, types.get(n, types["ids"])[0], a.shape, a) for n, a in tensors.items()]
    )


WRONG = {
    "kind": lambda metadata, tensors: metadata.update({"general.type": "adapter"}),
    "key": lambda metadata, tensors: metadata.update({"tokens.key": "{}"}),
    "id": lambda metadata, tensors: tensors["ids"].__setitem__(3, 300),
    "negative id": lambda metadata, tensors: tensors["ids"].__setitem__(3, -1),
    "lengths": lambda metadata, tensors: tensors["lengths"].__setitem__(0, 8),
    "negative length": lambda metadata, tensors: tensors["lengths"].__setitem__(slice(2), [-1, 15]),
    "mask": lambda metadata, tensors: tensors.update(trained=tensors["trained"][1:]),
    "places": lambda metadata, tensors: tensors.update(places=tensors["places"][1:]),
    "no lengths": lambda metadata, tensors: tensors.pop("lengths"),
    "more": lambda metadata, tensors: tensors.update(more=tensors["ids"]),
    "about": lambda metadata, tensors: metadata.update({"tokens.about": "[1"}),
    "what about": lambda metadata, tensors: metadata.update({"tokens.about": "[1]"}),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_entry_that_does_not_fit_together_is_made_anew(kept, what):
    path, folder = kept
    (entry,) = folder.glob("*.gguf")
    rewritten(entry, WRONG[what])
    found, corpus = again(path, folder)
    assert not found and corpus.digest() == read_corpus(path, Bytes(), CONFIG).digest()
    assert again(path, folder)[0], "and is whole then"


def test_a_damaged_entry_is_made_anew(kept):
    path, folder = kept
    (entry,) = folder.glob("*.gguf")
    whole = entry.read_bytes()
    at = whole.index(b"abcdef"[:1] + bytes(3) + b"b")  # the first ids
    for damaged in (whole[:at] + b"c" + whole[at + 1 :], whole[: len(whole) // 2], b"", b"GGUF"):
        entry.write_bytes(damaged)
        assert not again(path, folder)[0]


def test_a_file_that_may_have_changed_unseen_is_read_again(kept):
    """Same size, and the time of an edit in the same instant as the first reading."""
    path, folder = kept
    for stamp in folder.glob("*.json"):
        stamp.write_text("[" * 5000)
    assert again(path, folder)[0], "its content is looked at"
    now = path.stat().st_mtime + 1e9
    path.write_text(ROWS.replace("xyz", "zyx"))
    os.utime(path, (now, now))
    assert not again(path, folder)[0]


def test_the_folder_is_bounded(kept, monkeypatch):
    path, folder = kept
    (entry,) = folder.glob("*.gguf")
    os.utime(entry, (1e9, 1e9))
    monkeypatch.setattr(cache, "MOST_BYTES", entry.stat().st_size + 100)
    path.write_text(ROWS.replace("xyz", "zyx"))
    again(path, folder)
    (newer,) = folder.glob("*.gguf")
    assert newer != entry


def strangers(folder, entry, stamp):
    """Files that others keep there, some under names such as ours: path -> content."""
    model = gguf_of("model", {"tokens.key": "{}"}, folder)
    other_key = gguf_of("tokens", {"tokens.key": "[]"}, folder)
    content = {
        "model.gguf": model,
        "rows.json": b'{"about": [1], "sha256": ""}',
        "mine.partial": b"half",
        "0" * 32 + ".gguf": model,
        "1" * 32 + ".gguf": other_key,
        "2" * 32 + ".gguf": b"no GGUF file",
        "3" * 32 + ".gguf": entry,
        "4" * 32 + ".json": b'{"about": [1], "sha256": "a"}',
        "5" * 32 + ".json": b'{"about": [1], "sha256": "' + b"a" * 64 + b'", "mine": 1}',
        "6" * 32 + ".json": b"[]",
        "7" * 32 + ".jsonl": b"{}",
        "A" * 32 + ".json": stamp,
    }
    for name, raw in content.items():
        (folder / name).write_bytes(raw)
        os.utime(folder / name, (1e9, 1e9))
    return {folder / name: raw for name, raw in content.items()}


def gguf_of(kind, metadata, folder):
    path = folder.with_name("made.gguf")
    gguf.write(path, {"general.type": kind, **metadata}, [])
    return path.read_bytes()


@pytest.mark.parametrize("limit", ["MOST_BYTES", "MOST_FILES"])
def test_only_what_is_its_own_is_removed(kept, monkeypatch, limit):
    """By name and by content: whatever else lies in the folder stays, a link of such a name too."""
    path, folder = kept
    (entry,), (stamp,) = folder.glob("*.gguf"), folder.glob("*.json")
    theirs = strangers(folder, entry.read_bytes(), stamp.read_bytes())
    link = folder / ("8" * 32 + ".gguf")
    link.symlink_to(entry)
    monkeypatch.setattr(cache, limit, 0)
    path.write_text(ROWS.replace("xyz", "zyx"))
    again(path, folder)
    assert not entry.exists() and not stamp.exists(), "they are the cache's own"
    assert {each: each.read_bytes() for each in theirs} == theirs and link.is_symlink()


def test_the_folder_is_looked_at_once_for_many_files(tmp_path, monkeypatch):
    """So that a folder of thousands takes time in proportion to its files."""
    looked, prune = [], TokenCache._prune
    monkeypatch.setattr(TokenCache, "_prune", lambda self, n: (looked.append(n), prune(self, n))[1])
    (tmp_path / "rows").mkdir()
    for i in range(20):
        (tmp_path / "rows" / f"{i}.jsonl").write_text(f'{{"text": "row {i} of a file"}}\n' * 3)
    read_corpus(tmp_path / "rows", Bytes(), CONFIG, TokenCache(tmp_path / "cache"))
    assert len([*(tmp_path / "cache").glob("*.gguf")]) == 20 and len(looked) == 1


def test_a_folder_that_cannot_be_made_keeps_nothing(kept):
    path, _ = kept
    corpus = read_corpus(path, Bytes(), CONFIG, TokenCache(path / "cache"))
    assert "Not a directory" in corpus.files[0].not_kept
    assert corpus.digest() == read_corpus(path, Bytes(), CONFIG).digest()


def test_skipped_rows_are_told_by_every_run(tmp_path):
    path, folder = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_text(ROWS + '{"text": 3}\n')
    skipping = DataConfig(ctx=8, skip_bad_rows=True)
    for _ in range(2):
        _, corpus = again(path, folder, skipping)
        assert str(corpus.files[0].skipped) == 'line 11 is an object whose "text" is a number'
    for _ in range(2):
        with pytest.raises(
            DataError, match='line 11 is an object whose "text" is a number; wanted'
        ):
            read_corpus(path, Bytes(), CONFIG, TokenCache(folder))
