"""Rows of a program, which stand in no file."""

import json
from pathlib import Path

import numpy as np
import pytest
from extras import need

import pyggml
from pyggml.cli import demo
from pyggml.errors import DataError
from pyggml.lora import DataConfig, Source, corpus, read_corpus
from pyggml.lora.data import CompletionRow, RowPlace
from pyggml.lora.objectives import DPO

RECORDS = [{"prompt": f"{i} and {i}?", "completion": f" {2 * i}, I say."} for i in range(1, 31)]
CONFIG = DataConfig(ctx=32)


@pytest.fixture(scope="module")
def model():
    return pyggml.load(demo.BASE)


@pytest.fixture(scope="module")
def of_file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return read_corpus(path, model.tokenizer, CONFIG)


def same(one, other):
    pairs = zip(one.arrays, other.arrays, strict=True)
    return all((a is None and b is None) or np.array_equal(a, b) for a, b in pairs)


WAYS = {
    "a list": list,
    "a generator": lambda records: (record for record in records),
    "rows": lambda records: [CompletionRow(RowPlace("", "", 0), **r) for r in records],
}


@pytest.mark.quick
@pytest.mark.parametrize("way", WAYS)
def test_windows_are_those_of_the_same_rows_in_a_file(model, of_file, way):
    given = corpus(WAYS[way](RECORDS), model, CONFIG)
    assert given.digest() == of_file.digest()
    assert (given.n_documents, given.n_held_out) == (30, of_file.n_held_out)


def test_a_dataset_of_the_library_datasets(model, of_file):
    datasets = need("datasets")
    data = datasets.Dataset.from_list(RECORDS)
    assert corpus(data, model, CONFIG).digest() == of_file.digest()
    assert corpus(data.to_iterable_dataset(), model, CONFIG).digest() == of_file.digest()
    with pytest.raises(DataError, match=r"of 'train', wanted the rows of one, rows\[...\]"):
        corpus(datasets.DatasetDict(train=data), model, CONFIG)


def test_strings_are_texts(model, tmp_path):
    texts = ["To be, or not to be.", "That is the question."] * 4
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert corpus(texts, model, CONFIG).digest() == (
        read_corpus(path, model.tokenizer, CONFIG).digest()
    )


def test_held_out_rows_may_be_given(model, of_file):
    given = corpus(RECORDS, model, CONFIG, held_out=RECORDS[:3])
    assert (given.n_documents, given.n_held_out) == (33, 3)
    assert given.validation is not None
    assert given.train.n_targets() > of_file.train.n_targets(), "of RECORDS none is held out"


def test_rows_stand_beside_files_with_a_weight(model, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS[:9]))
    files = [path, Source(Path("more"), 2.0, rows=RECORDS[9:])]
    both = read_corpus(files, model.tokenizer, CONFIG)
    assert [str(f.source.path) for f in both.files] == [str(path), "more"]
    assert set(both.train.repeats) == {1.0, 2.0}


def test_pairs_are_for_an_objective_that_prefers(model):
    rows = [{"prompt": "a", "chosen": f" b {i}", "rejected": " c"} for i in range(8)]
    pairs = corpus(rows, model, CONFIG, purpose=DPO.rows)
    assert (pairs.n_documents, len(pairs.train) > 0) == (8, True)


BAD = [
    ("a text", "rows is of the type str, wanted rows; read_corpus reads files"),
    ({"train": [], "test": []}, r"of 'train', 'test', wanted the rows of one, rows\[...\]"),
    (7, "rows is of the type int, wanted a list, a generator or a datasets.Dataset"),
    ([], "rows: has no rows"),
    ([*RECORDS, {"question": 1}], 'row 31 is an object without "text"'),
    ([7], "row 1 is a JSON number"),
]


@pytest.mark.parametrize(("rows", "sentence"), BAD, ids=[sentence[:30] for _, sentence in BAD])
def test_what_are_no_rows_is_said(model, rows, sentence):
    for read in (
        lambda: corpus(rows, model, CONFIG),
        lambda: read_corpus(Source(Path("rows"), rows=rows), model.tokenizer, CONFIG),
    ):
        with pytest.raises(DataError, match=sentence):
            read()


def test_a_bad_row_may_be_left_out(model, of_file):
    config = DataConfig(ctx=32, skip_bad_rows=True)
    given = corpus([*RECORDS, {"none": 1}], model, config)
    assert given.files[0].skipped.total == 1
    assert given.digest() == of_file.digest()
