"""`pyggml control-vector` and what adds its files: what is made, for which blocks, and refused."""

import json

import numpy as np
import pytest

import pyggml as library
from pyggml.look.control import AFTER_FIRST, ControlVector, control_vector

WANTED = ["the path to", "to the other thing", "on the path"]
UNWANTED = ["a thing", "other", "no other path there"]
EXACT = ("--compute", "f32")


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = zip(WANTED, UNWANTED, strict=True)
    path.write_text("".join(json.dumps({"positive": a, "negative": b}) + "\n" for a, b in rows))
    return path


@pytest.fixture
def vectors(tmp_path, tiny):
    """A random direction for block 1, and for block 2, which the tiny model has not."""
    path = tmp_path / "v.gguf"
    n = library.load(tiny).config.n_embd
    direction = np.random.default_rng(0).normal(0, 5, n).astype(np.float32)
    ControlVector({1: direction, 2: direction}, "llama").save(path)
    return path


@pytest.mark.quick
@pytest.mark.parametrize("method", ["mean", "pca"])
@pytest.mark.parametrize(
    ("positions", "chosen"),
    [("rest", AFTER_FIRST), ("all", slice(None)), ("last", slice(-1, None))],
)
def test_it_makes_the_librarys_vector(pyggml, tiny, pairs, tmp_path, method, positions, chosen):
    out = tmp_path / "v.gguf"
    how = ("--method", method, "--positions", positions)
    ended = pyggml("control-vector", "-m", tiny, "-f", pairs, "-o", out, *how, *EXACT)
    assert ended.code == 0 and ended.row("vector").startswith(str(out)), ended.err
    model = library.load(tiny, compute="f32")
    ids = ([model.tokenizer.encode_prompt(t) for t in texts] for texts in (WANTED, UNWANTED))
    ours, found = control_vector(model, *ids, method, chosen), ControlVector.read(out)
    assert {*found.directions} == {*ours.directions} and found.architecture == "llama"
    for block, direction in ours.directions.items():
        np.testing.assert_array_equal(found.directions[block], direction)
    seen = pyggml("inspect", out)
    assert seen.row("holds").startswith("a control vector: 1 tensor")


def test_files_of_texts_are_llama_cpps(pyggml, tiny, pairs, tmp_path):
    r"""One a line, blank ones left out, \n in it a new line."""
    for name, texts in (("a", ["one\\ntwo", "", "three"]), ("b", ["four"])):
        (tmp_path / name).write_text("\n".join(texts) + "\n")
    files = ("--positive-file", tmp_path / "a", "--negative-file", tmp_path / "b")
    ended = pyggml("control-vector", "-m", tiny, *files, "-o", tmp_path / "v.gguf", *EXACT)
    assert ended.code == 0 and "2 positive, 1 negative texts" in ended.err
    model = library.load(tiny, compute="f32")
    ids = (
        [model.tokenizer.encode_prompt(t) for t in kind]
        for kind in (["one\ntwo", "three"], ["four"])
    )
    ours, found = control_vector(model, *ids), ControlVector.read(tmp_path / "v.gguf")
    np.testing.assert_array_equal(found.directions[1], ours.directions[1])


def test_a_vector_replaces_a_vector_and_no_model(pyggml, tiny, pairs, vectors, tmp_path):
    made = ("control-vector", "-m", tiny, "-f", pairs, *EXACT, "-o")
    assert pyggml(*made, vectors).code == 0
    copy = tmp_path / "model.gguf"
    copy.write_bytes(tiny.read_bytes())
    ended = pyggml(*made, copy)
    assert ended.code == 2 and "is not a control vector: --force" in ended.err
    quantized = pyggml("quantize", tiny, vectors, "Q8_0")
    assert quantized.code == 2 and "is not a model: --force" in quantized.err


REFUSED = {
    "no texts": ((), "wanted -f PAIRS, or --positive-file FILE and"),
    "one kind": (("--positive-file", "PAIRS"), "and --negative-file FILE"),
    "a row": (("-f", "rows"), """line 1 is {'text': 'a'}, wanted {"positive": TEXT"""),
    "a number": (("-f", "number"), 'line 1 has a "negative" that is a number'),
    "no JSON": (("-f", "broken"), "line 1 is no JSON"),
    "nothing": (("-f", "empty"), "has no pairs"),
    "blank lines": (("--positive-file", "empty", "--negative-file", "rows"), "has no texts"),
    "pairs": (
        ("--positive-file", "rows", "--negative-file", "number", "--method", "pca"),
        "for pairs",
    ),
    "blocks": (("-f", "PAIRS", "--layers", 2, 1), "--layers is 2 1, wanted the first"),
    "block": (("-f", "PAIRS", "--layers", 1, 9), "blocks has 2, wanted 1 to 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_sentence(pyggml, tiny, pairs, tmp_path, name):
    words, said = REFUSED[name]
    content = {
        "rows": '{"text": "a"}\n',
        "number": '{"positive": "a", "negative": 1}\n{}\n',
        "broken": "{",
        "empty": "\n\n",
        "PAIRS": pairs.read_text(),
    }
    for file, text in content.items():
        (tmp_path / file).write_text(text)
    given = [tmp_path / word if word in content else word for word in words]
    ended = pyggml("control-vector", "-m", tiny, "-o", tmp_path / "v.gguf", *given)
    assert ended.code == 2 and said in ended.err and ended.err.count("\n") <= 2, ended.err
    assert not (tmp_path / "v.gguf").exists()


def test_layers_choose_blocks_and_llama_cpps_names_are_known(pyggml, tiny, vectors, text):
    """Of a file that has a direction for a block more than the model."""

    def ended(*words):
        return pyggml("perplexity", "-m", tiny, "-f", text, "--ctx", 32, *EXACT, *words)

    refused = ended("--control-vector", vectors)
    assert refused.code == 2 and "a direction for block 2 of 2" in refused.err
    ours = ended("--control-vector", f"{vectors}:2", "--control-vector-layers", 1, 1)
    names = ("--control-vector-scaled", f"{vectors}:2", "--control-vector-layer-range", 1, 1)
    assert ours.code == 0 and ended(*names).out == ours.out != ended().out
    for words, said in (
        ((1, 1), "wanted --control-vector FILE beside it"),
        ((2, 1, "--control-vector", vectors), "is 2 1, wanted the first block before the last"),
        (
            (5, 9, "--control-vector", vectors),
            "no direction for blocks 5 to 9, wanted",
        ),
    ):
        refused = ended("--control-vector-layers", *words)
        assert refused.code == 2 and said in refused.err, refused.err


def test_eval_compares_a_model_with_its_steered_self(pyggml, tiny, vectors, text):
    steered = ("--control-vector", f"{vectors}:1.5", "--control-vector-layers", 1, 1)
    given = ("eval", "-f", text, "--ctx", 32, "--json", *EXACT, "-m", tiny)
    ended = pyggml(*given, *steered, "--compare", tiny)
    assert ended.code == 0, ended.err
    (file,) = json.loads(ended.out)["files"]
    plain = json.loads(pyggml(*given).out)["files"][0]
    first, second = file["models"]
    alone = plain["models"][0]["perplexity"]
    assert second["perplexity"] == alone != first["perplexity"]
    assert "v.gguf:1.5" in first["model"]
