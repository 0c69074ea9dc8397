"""Folders, patterns and pipes: which files they are, in what order, and what is left out."""

import contextlib
import json
import os
import threading
import time
from functools import partial

import numpy as np
import pytest

from pyggml.errors import DataError
from pyggml.lora import DataConfig, read_corpus
from pyggml.lora.data import Schema, Source, TokenCache
from pyggml.lora.data.reading.expand import _open_pipe, expand

from chats import Bytes

ROW = json.dumps({"text": "some words of a row"}) + "\n"


class Known(Bytes):
    """One that a cache can tell from others."""

    identity, n_vocab = "bytes", 257


@pytest.fixture
def folder(tmp_path):
    """Two files of rows, one of them below and without an ending that says so; and other things."""
    files = {
        "b.jsonl": ROW,
        "below/a": ROW * 2,
        "README.md": "# What this is",
        "infos.json": '{"version": 1}',
        "empty.txt": " \n",
        "model.bin": "GGUF\0\1\2",
        ".git/config": ROW,
        ".hidden.jsonl": ROW,
    }
    for name, text in files.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "data" / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    return tmp_path / "data"


def names(*given):
    found, left_out = expand([Source.of(g) for g in given], Schema())
    return [s.path.name for s in found], {path.name: reason for path, reason in left_out}


def test_a_folder_is_its_files_with_data_and_names_the_others(folder):
    found, left_out = names(folder)
    assert found == ["b.jsonl", "a"], "sorted by path"
    assert left_out == {
        "README.md": "is plain text beside files of rows",
        "empty.txt": "is empty, wanted text",
        "infos.json": "is JSON without the names of rows",
        "model.bin": "is a GGUF file, wanted text: -m names a model, -f data",
        "picture.png": "is neither text in UTF-8 nor rows",
    }


def test_a_folder_of_texts_is_its_texts(tmp_path):
    for name in ("z.txt", "a.md"):
        (tmp_path / name).write_text("words")
    assert names(tmp_path) == (["a.md", "z.txt"], {})


def test_a_row_with_a_fault_is_refused_not_left_out(folder):
    (folder / "b.jsonl").write_text('{"text": 1}\n')
    with pytest.raises(DataError, match=r'b.jsonl: line 1 is an object whose "text" is a number'):
        read_corpus(folder, Bytes(), DataConfig(ctx=8))


def test_files_of_a_pattern_and_of_a_folder_have_its_weight(folder):
    (folder / "a.jsonl").write_text(ROW)
    found, _ = expand([Source.of(f"{folder}/*.jsonl:2")], Schema())
    assert [(s.path.name, s.weight) for s in found] == [("a.jsonl", 2.0), ("b.jsonl", 2.0)]
    found, _ = expand([Source.of(f"{folder}:0.5")], Schema())
    assert [s.weight for s in found] == [0.5] * 3
    assert names(f"{folder}/**/a*")[0] == ["a.jsonl", "a"]


def test_what_holds_nothing_is_refused_all_at_once(tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "x").write_bytes(b"\0")
    with pytest.raises(DataError) as refused:
        names(tmp_path / "none", f"{tmp_path}/*.csv")
    text = str(refused.value)
    assert "none: this folder holds no data: x is neither text in UTF-8 nor rows" in text
    assert "*.csv: no file fits this pattern" in text


def test_several_files_are_held_out(folder):
    config = DataConfig(ctx=18, val_file=(str(folder / "b.jsonl"), str(folder / "below")))
    corpus = read_corpus(folder / "b.jsonl", Bytes(), config)
    assert len(corpus.train) == 2 and len(corpus.validation) == 6
    assert [f.n_held_out for f in corpus.files] == [0, 1, 2]


def test_preferences_take_folders_too(tmp_path):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    for name in "xy":
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    (tmp_path / "notes").write_text("words")
    corpus = read_corpus([tmp_path], Bytes(), DataConfig(ctx=16, val_split=0.0), rows="pairs")
    assert len(corpus.files) == 2 and [p.name for p, _ in corpus.left_out] == ["notes"]


def test_tokens_of_preferences_are_kept(tmp_path, monkeypatch):
    """A second run reads the same windows without encoding a row: pairs, and single answers."""
    answers = {"prompt": "a", "chosen": "bc", "rejected": "d"}
    labelled = [{"prompt": "a", "completion": "b" * i, "label": i % 3 == 0} for i in range(1, 6)]
    cache = TokenCache(tmp_path / "tokens")
    for kind, rows in (("pairs", [answers] * 3), ("labels", labelled)):
        path = tmp_path / f"{kind}.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        os.utime(path, (0, 0))
        read = partial(read_corpus, [path], Known(), DataConfig(ctx=16, val_split=0.3), rows=kind)
        first, plain = read(cache), read()
        with monkeypatch.context() as patch:
            patch.setattr("pyggml.lora.data.preferences.documents_of", None)
            again = read(cache)
        assert [c.files[0].was_kept for c in (first, plain, again)] == [False, False, True]
        assert first.digest() == plain.digest() == again.digest()
        others = [c.train.mismatched for c in (plain, again)]
        assert (others[0] is None) == (kind == "pairs")
        if kind == "labels":
            np.testing.assert_array_equal(others[0].tokens, others[1].tokens)
        assert again.train.documents.tolist() == plain.train.documents.tolist()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_copied_once(tmp_path):
    pipe = tmp_path / "rows"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(ROW * 3))
    writer.start()
    for _ in range(2):  # the second time nobody writes
        corpus = read_corpus(pipe, Bytes(), DataConfig(ctx=18, val_split=0.0))
        assert (corpus.kind, corpus.n_documents) == ("JSON Lines", 3)
    writer.join()
    assert corpus.files[0].source.path.name == "rows"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_that_nobody_writes_to_says_what_is_awaited(tmp_path, monkeypatch):
    monkeypatch.setattr("pyggml.lora.data.reading.expand.PATIENCE", 0.05)
    pipe = tmp_path / "rows"
    os.mkfifo(pipe)
    writer = threading.Timer(1.0, pipe.write_text, [ROW])
    writer.start()
    with pytest.warns(RuntimeWarning, match="rows: nothing has come through this pipe yet, wait"):
        assert read_corpus(pipe, Bytes(), DataConfig(ctx=18, val_split=0.0)).n_documents == 1
    writer.join()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_that_goes_on_late_is_not_awaited_once_it_has_begun(tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr("pyggml.lora.data.reading.expand.PATIENCE", 0.5)
    pipe, begun = tmp_path / "rows", threading.Event()
    os.mkfifo(pipe)

    def pour():
        with pipe.open("w") as out:
            out.write(ROW)
            out.flush()
            begun.wait(1.0)
            out.write(ROW)

    writer = threading.Thread(target=pour)
    writer.start()
    assert read_corpus(pipe, Bytes(), DataConfig(ctx=18, val_split=0.0)).n_documents == 2
    writer.join()
    assert [str(w.message) for w in recwarn if "pipe" in str(w.message)] == []


def test_nothing_is_awaited_of_what_cannot_be_opened(tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr("pyggml.lora.data.reading.expand.PATIENCE", 0.1)
    with pytest.raises(FileNotFoundError), _open_pipe(tmp_path / "gone"):
        pass
    time.sleep(0.3)
    assert [str(w.message) for w in recwarn] == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("byte, wrong", [(b"\0", "holds a NUL"), (b" ", "MiB of white space")])
def test_a_pipe_without_an_end_that_holds_no_row(tmp_path, monkeypatch, byte, wrong):
    monkeypatch.setattr("pyggml.lora.data.reading.expand.MOST_BYTES", 3 << 20)
    pipe, n_blocks = tmp_path / "rows", 0
    os.mkfifo(pipe)

    def pour():
        nonlocal n_blocks
        with contextlib.suppress(BrokenPipeError), pipe.open("wb", buffering=0) as out:
            for _ in range(200):
                out.write(byte * (1 << 20))
                n_blocks += 1

    writer = threading.Thread(target=pour)
    writer.start()
    with pytest.raises(DataError, match=f"rows: .*{wrong}"):
        read_corpus(pipe, Bytes(), DataConfig(ctx=18, val_split=0.0))
    writer.join()
    assert n_blocks < 8


@pytest.mark.parametrize("cached", [False, True])
def test_a_device_is_refused(tmp_path, cached):
    cache = TokenCache(tmp_path) if cached else None
    with pytest.raises(DataError, match="it is a pipe or device"):
        read_corpus("/dev/zero", Known(), DataConfig(ctx=8), cache)


@pytest.mark.parametrize("cached", [False, True])
def test_a_link_to_itself_is_refused(tmp_path, cached):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    cache = TokenCache(tmp_path / "cache") if cached else None
    with pytest.raises(DataError, match="loop: cannot be read: Too many levels"):
        read_corpus(tmp_path / "loop", Known(), DataConfig(ctx=8), cache)
