"""`--objective classify` and `embed`, and `pyggml eval` of what they made, as a user runs them."""

import json

import pytest

import pyggml as library

LABELS = ("good", "bad", "odd")
CLASSES = [{"text": f"{'xyz'[i % 3] * 4}{i}", "label": LABELS[i % 3]} for i in range(18)]
GROUPS = [{"anchor": w, "positive": w[::-1], "negative": f"{w}."} for w in ("abc", "def", "ghi")]
SETTINGS = ("--ctx", 32, "--max-steps", 4, "--batch", 2, "--lr", 0.02, "--val-split", 0.2)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for name, some in (("classify", CLASSES), ("embed", 4 * GROUPS)):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def trained(pyggml, tiny, rows, out, objective, *more):
    data = rows / f"{objective}.jsonl"
    given = ("-m", tiny, "-f", data, "-o", out, "--objective", objective, *SETTINGS, "--no-report")
    return pyggml("finetune", *given, *more)


def figures(pyggml, *given):
    return json.loads(pyggml("eval", *given, "--json").out)["files"][0]


def test_classes_are_trained_evaluated_and_merged(pyggml, tiny, rows, tmp_path):
    out, merged, data = tmp_path / "a.gguf", tmp_path / "m.gguf", rows / "classify.jsonl"
    ended = trained(pyggml, tiny, rows, out, "classify", "--class-weights", "balanced")
    assert ended.code == 0, ended.err
    assert "is, taken for   bad" in ended.out and "pyggml eval" in ended.out
    assert "-- before" not in ended.out and "ends a turn" not in ended.out
    found = figures(pyggml, "-m", tiny, "-f", data, "--compare", out)
    base, ours = found["models"]
    assert (found["kind"], found["n"]) == ("texts", 18) and found["chance"] == pytest.approx(1 / 3)
    assert ours["confusion"]["labels"] == ["bad", "good", "odd"]
    counts = ours["confusion"]["counts"]
    assert sum(map(sum, counts)) == 18 and base["confusion"]["counts"] != counts
    assert ours["acc"]["value"] == sum(counts[i][i] for i in range(3)) / 18
    table = pyggml("eval", "-m", tiny, "--lora", out, "-f", data)
    assert table.code == 0 and "precision   recall" in table.out and "F1" in table.out
    assert pyggml("merge", "-m", tiny, "--lora", out, "-o", merged).code == 0
    again = figures(pyggml, "-m", merged, "-f", data)["models"][0]
    assert again["confusion"] == ours["confusion"]


def test_embeddings_are_trained_and_evaluated(pyggml, tiny, rows, tmp_path):
    out, data = tmp_path / "a.gguf", rows / "embed.jsonl"
    ended = trained(pyggml, tiny, rows, out, "embed", "--pooling", "mean", "--temperature", 0.1)
    assert ended.code == 0 and "nearest" in ended.out, ended.err
    assert library.load(tiny, out).adapters[0].pooling == "mean"
    (found,) = figures(pyggml, "-m", tiny, "--lora", out, "-f", data)["models"]
    assert 0 < found["mean_reciprocal_rank"] <= 1 and found["of_10"]["value"] == 1
    table = pyggml("eval", "-m", tiny, "--lora", out, "-f", data)
    assert "mean reciprocal rank" in table.out and "12 texts and the one that" in table.out


@pytest.mark.parametrize("way", [("full", "--qat", "Q8_0"), ("scales",)])
def test_a_whole_model_learns_embeddings(pyggml, tiny, rows, tmp_path, way):
    """Its output matrix, which no vector is made of, stays."""
    packed = tmp_path / "q.gguf"
    assert pyggml("quantize", tiny, packed, "Q8_0").code == 0
    base = packed if way == ("scales",) else tiny
    ended = trained(pyggml, base, rows, tmp_path / "a.gguf", "embed", "--train", *way)
    assert ended.code == 0, ended.err
    assert "output keeps theirs" in ended.out or "output.weight stays" in ended.out


REFUSED = {
    "other labels": (
        ("eval", "-f", "OTHER"),
        "line 1 has the label 'new', wanted one of bad",
    ),
    "one class": (("finetune", "-f", "ONE"), "all rows have the label 'new', wanted 2 to 200"),
    "packing of chats": (("finetune", "-f", "DATA", "--train-on", "all"), "--train-on is all, but"),
    "weights": (("finetune", "-f", "DATA", "--class-weights", "x=2"), "names 'x', wanted some of"),
    "rows of a chat": (
        ("finetune", "-f", "PAIRS"),
        "anchor and positive, which --objective em",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_sentence(pyggml, tiny, rows, tmp_path, name):
    (command, *given), said = REFUSED[name]
    files = {"DATA": rows / "classify.jsonl", "PAIRS": rows / "embed.jsonl"}
    files |= {word: tmp_path / f"{word}.jsonl" for word in ("OTHER", "ONE")}
    for word in ("OTHER", "ONE"):
        files[word].write_text('{"text": "a", "label": "new"}\n' * 3)
    words = [files.get(word, word) for word in given]
    if command == "eval":
        adapter = tmp_path / "a.gguf"
        assert trained(pyggml, tiny, rows, adapter, "classify").code == 0
        words += ["--lora", adapter]
    else:
        words += ["-o", tmp_path / "o.gguf", "--objective", "classify", *SETTINGS]
    ended = pyggml(command, "-m", tiny, *words)
    assert ended.code == 2 and said in ended.err and ended.err.count("\n") == 1, ended.err
    assert not (tmp_path / "o.gguf").exists()
