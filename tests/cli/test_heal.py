"""`pyggml heal`: an adapter or better scales for a quantised model, measured before and after."""

import re
import shlex

import pytest

import pyggml as library
from pyggml.cli import demo
from pyggml.requantize import requantize

SHORT = ("--ctx", 32, "--max-steps", 4, "--val-windows", 4, "--prompt", "ROMEO:")
ATTENTION = ("--lora-modules", "attn_q,attn_v")  # each is taken apart into its singular values


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The demo's model, which has learned something, in a coarse type; and some of its text."""
    folder = tmp_path_factory.mktemp("packed")
    requantize(demo.BASE, folder / "q.gguf", "Q2_0", allow_requantize=True)
    (folder / "text.txt").write_text(demo.TEXT.read_text()[:8000])
    return folder / "q.gguf", folder / "text.txt"


def figures(line):
    """The numbers of a row, intervals among them."""
    return [float(x) for x in re.findall(r"\d+\.\d+", line)]


@pytest.mark.parametrize(
    "how",
    [("--lora-rank", 4, *ATTENTION), ("--train", "scales"), ("--train", "full")],
    ids=["lora", "scales", "full"],
)
def test_a_run_is_measured_before_and_after(pyggml, packed, tmp_path, how):
    model, text = packed
    out = tmp_path / "out.gguf"
    ended = pyggml("heal", "--from", demo.BASE, "-m", model, "-f", text, "-o", out, *SHORT, *how)
    assert ended.code == 0, ended.err
    _, _, after = ended.out.rpartition("held out")
    rows = {line.split()[0]: figures(line) for line in after.splitlines()[1:] if line}
    assert rows["original"][0] < rows["quantised"][0], "packing took something"
    assert rows["quantised"][3] > 0 and len(rows["healed"]) == 6
    assert "of that in perplexity is closed" in after
    healed = re.search(r"healed +perplexity (.*?\])", after)[1]
    assert f"<td>{healed}</td>" in out.with_suffix(".html").read_text()
    assert ended.out.count("quantised") == 2, "before the first step, and at the end"
    if how[0] == "--train":
        assert out.stat().st_size == model.stat().st_size
        of_file, of_run = figures(ended.row("file"))
        assert of_file == pytest.approx(of_run, rel=1e-3), "the file has what was trained"
        assert ("lr: 0.0001" in out.with_suffix(".yaml").read_text()) == ("full" in how)
    else:
        (pairs,) = library.load(model, out).adapters
        assert {p.rank for p in pairs.values()} == {4}
        assert 'lora_init: "loftq"' in out.with_suffix(".yaml").read_text()


def test_random_weights_are_refused(pyggml, tiny, text, tmp_path):
    requantize(tiny, tmp_path / "q.gguf", "Q4_0")
    given = ("--from", tiny, "-m", tmp_path / "q.gguf", "-f", text, "-o", tmp_path / "a.gguf")
    ended = pyggml("heal", *given, *SHORT, "--lora-rank", 4)
    assert ended.code == 2 and "no better than chance" in ended.err and "pointless" in ended.err
    assert not (tmp_path / "a.gguf").exists()


def test_an_original_of_other_tokens_is_refused(pyggml, tiny, packed, text, tmp_path):
    given = ("--from", tiny, "-m", packed[0], "-f", text, "-o", tmp_path / "a.gguf")
    ended = pyggml("heal", *given)
    assert ended.code == 2 and "has another vocabulary than" in ended.err


def test_a_stopped_run_goes_on_by_the_line_that_it_prints(pyggml, packed, tmp_path, signal_after):
    model, text = packed
    given = ("heal", "--from", demo.BASE, "-m", model, "-f", text, *SHORT, "--train", "scales")
    assert pyggml(*given, "-o", tmp_path / "whole.gguf").code == 0
    signal_after(2)
    ended = pyggml(*given, "-o", tmp_path / "out.gguf", "--checkpoint-dir", tmp_path / "c")
    assert ended.code == 130 and "healed" not in ended.out
    first, second, *words = shlex.split(ended.row("resume"))
    assert (first, second) == ("pyggml", "heal")
    rest = pyggml("heal", *words)
    assert rest.code == 0 and "healed" in rest.out, rest.err
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_help_is_of_healing(pyggml):
    said = " ".join(pyggml("heal", "--help-all").out.split())
    for words in ("--reward ", "--answers ", "--pooling", "--qat", "dpo"):
        assert words not in said
    for words in ("default: distill]", "default: that of --from]", "default: the rank]"):
        assert words in said


@pytest.mark.parametrize("word", [("--objective", "dpo"), ("--train", "all")])
def test_what_heals_nothing_is_refused(pyggml, packed, tmp_path, word):
    given = ("--from", demo.BASE, "-m", packed[0], "-f", packed[1], "-o", tmp_path / "a.gguf")
    ended = pyggml("heal", *given, *word)
    assert ended.code == 2 and f"{word[0]} is {word[1]!r}, heal wants" in ended.err
