"""Kinds of adapters from the command line: what is said, what is written, and what is refused."""

import re
import warnings

import numpy as np
import pytest

from pyggml import gguf, load
from pyggml.lora import History

IDS = np.arange(12) * 5 % 250


def logits(model, *adapters):
    return load(model, [*adapters], "f32").logits(IDS)


def test_every_kind_that_a_file_can_hold(finetune, tiny, tmp_path):
    """The file gives what was trained, in this program and by llama.cpp's rule."""
    out = tmp_path / "a.gguf"
    options = ("--rslora", "--rank-pattern", "ffn_*=3,blk.0.*=1", "--alpha-pattern", "attn_q=5")
    options += ("--lora-dropout", 0.1, "--lora-plus-ratio", 8, "--lora-init", "pissa", "--lr", 0.01)
    ended = finetune(*options, output=out)
    assert ended.code == 0, ended.err
    said = "rsLoRA, 3 patterns of ranks and alphas, dropout 0.1, PiSSA, so the file has twice"
    assert said in ended.out and "LoRA+ 8" in ended.out
    with gguf.open(out) as file:
        ranks = {n: t.shape[-1] for n, t in file.tensors.items() if n.endswith("lora_b")}
        assert ranks["blk.1.ffn_up.weight.lora_b"] == 6
        assert ranks["blk.1.attn_q.weight.lora_b"] == 4
        assert ranks["blk.0.ffn_up.weight.lora_b"] == 2
    assert np.abs(logits(tiny, out) - logits(tiny)).max() > 1e-3
    again = tmp_path / "b.gguf"
    ended = finetune(
        *("--init", out, "--lora-dropout", 0.2, "--max-steps", 2),
        output=again,
        rank=None,
    )
    assert ended.code == 0, ended.err
    assert np.abs(logits(tiny, out) - logits(tiny, again)).max() > 0


def test_a_dora_run_writes_a_model(finetune, tiny, tmp_path):
    out = tmp_path / "model.gguf"
    ended = finetune("--dora", "--lr", 0.02, output=out)
    assert ended.code == 0, ended.err
    assert "an adapter cannot hold DoRA, so the output is the whole model" in ended.out
    assert ended.out.index("cannot hold DoRA") < ended.out.index("result")
    assert f"pyggml generate -m {out} -p" in ended.out
    assert ended.row("update").startswith("100 % of it is in the file; least 100 %, blk.")
    file, trained = re.fullmatch(
        r"validation loss ([\d.]+), ([\d.]+) before it was packed", ended.row("file")
    ).groups()
    assert float(file) == pytest.approx(float(trained), abs=2e-4)
    with gguf.open(out) as merged, gguf.open(tiny) as base:
        assert dict(merged.metadata) == dict(base.metadata)
        assert {n: (t.shape, t.dtype) for n, t in merged.tensors.items()} == {
            n: (t.shape, t.dtype) for n, t in base.tensors.items()
        }
    assert np.abs(logits(out) - logits(tiny)).max() > 1e-3


def test_chosen_tensors_of_the_model_are_trained(finetune, tiny, tmp_path):
    out = tmp_path / "model.gguf"
    names = "output_norm.weight,blk.*.attn_norm.weight"
    ended = finetune("--train-tensors", names, "--lr", 0.05, output=out, rank=None)
    assert ended.code == 0, ended.err
    assert "3 tensors of the model: 96 parameters trained" in ended.out
    with gguf.open(out) as after, gguf.open(tiny) as before:
        changed = [n for n in before.tensors if (after.data(n) != before.data(n)).any()]
    assert sorted(changed) == [f"blk.{i}.attn_norm.weight" for i in (0, 1)] + ["output_norm.weight"]
    ended = finetune("--train-tensors", "output_norm", output=out)
    assert (
        ended.err == "pyggml: --train-tensors trains the model itself, no adapter: leave out "
        "--lora-rank\n"
    )


def test_a_model_is_trained_as_the_file_that_it_will_be(finetune, tiny, tmp_path):
    out = tmp_path / "model.gguf"
    full = ("--train", "full", "--lr", 0.01)
    ended = finetune(*full, "--qat", "q4_0", output=out, rank=None)
    assert ended.code == 0, ended.err
    assert "100 % of the model's" in ended.out and "read as Q4_0" in ended.row("trained")
    file, trained = re.findall(r"[\d.]+\d", ended.row("file"))
    assert file == trained
    assert 'qat: "Q4_0"' in out.with_suffix(".yaml").read_text()
    with gguf.open(out) as written:
        assert written.tensors["blk.0.ffn_up.weight"].dtype.name == "Q4_0"
    ended = finetune("--qat", "Q4_0", output=out, rank=None)
    assert ended.code == 2 and "--qat wants --train full" in ended.err
    ended = finetune(*full, "--qat", "Q4", output=out, rank=None)
    assert ended.code == 2 and "'Q4' is no file type" in ended.err


def test_a_run_resumed_with_other_blocks_names_no_rate_that_follows(finetune, tmp_path):
    full, more = (
        ("--train", "full", "--max-steps", 1),
        {"output": tmp_path / "m.gguf", "rank": None},
    )
    points = tmp_path / "points"
    assert finetune(*full, "--qat", "Q8_0", "--checkpoint-dir", points, **more).code == 0
    ended = finetune(*full, "--resume", points, **more)
    assert (
        ended.code == 2 and "another run: --qat is Q8_0 there and not given here; le" in ended.err
    )
    ended = finetune(*full, "--lr", 1e-3, "--resume", points, **more)
    assert "--qat is Q8_0 there and not given here; --lr is" in ended.err
    ended = finetune(*full, "--qat", "Q8_0", "--lr", 1e-3, "--resume", points, **more)
    assert "is of another run: --lr is" in ended.err


@pytest.mark.filterwarnings("ignore:b.gguf was trained on top of")
def test_adapters_add_up(finetune, pyggml, tiny, text, tmp_path):
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    assert finetune("--lr", 0.05, output=a).code == 0
    ended = finetune("--lora", f"{a}:0.5", "--lr", 0.05, "--seed", 3, output=b)
    assert ended.code == 0, ended.err
    assert "on top of 1 adapter" in ended.out
    assert f"llama-cli -m {tiny} --lora-scaled {a}:0.5 --lora {b}" in ended.out
    both = logits(tiny, (a, 0.5), b)
    with pytest.warns(RuntimeWarning, match="was trained on top of a.gguf:0.5, which is not here"):
        one = logits(tiny, b)
    assert np.abs(both - one).max() > 1e-4

    def perplexity(*adapters):
        words = [w for adapter in adapters for w in ("--lora", adapter)]
        ended = pyggml("perplexity", "-m", tiny, "-f", text, "--ctx", 16, *words)
        assert ended.code == 0, ended.err
        return ended.out

    found = {perplexity(), perplexity(a), perplexity(f"{a}:0.5", b)}
    with warnings.catch_warnings(action="default"):  # the command makes a note of it
        found.add(perplexity(a, b))
    assert len(found) == 4
    ended = pyggml("generate", "-m", tiny, "-p", "the", "-n", 3, "--lora", f"{a}:0.5", "--lora", b)
    assert ended.code == 0, ended.err


REFUSED = [
    (("--rank-pattern", "ffn_up"), "'ffn_up' is no PATTERN=NUMBER, such as ffn_*=16"),
    (("--rank-pattern", "ffm*=4"), "--rank-pattern has 'ffm*', wanted a pattern that fits a"),
    (("--rank-pattern", "ffn_*=99"), "--rank-pattern is 99, wanted at most 32: blk.0.ffn_gate"),
    (("--lora-dropout", 1), "--lora-dropout is 1.0, wanted 0 to below 1"),
    (("--lora-init", "olora"), "--lora-init is 'olora', wanted one of kaiming, pissa, loftq"),
    (("--lora-plus-ratio", 0), "--lora-plus-ratio is 0.0, wanted above 0"),
    (("--dora", "--lora-modules", "token_embd"), "--dora wants plain matrices, and token_embd"),
    (("--lora", "none.gguf"), "none.gguf"),
]


@pytest.mark.parametrize("options, message", REFUSED)
def test_what_cannot_be_is_one_sentence(finetune, options, message):
    ended = finetune(*options)
    assert ended.code == 2 and ended.err.count("\n") == 1 and message in ended.err


def test_a_best_that_was_not_trained_is_said(finetune, monkeypatch):
    """As where every validation is worse than the one before the first step."""
    assert "no validation was better" not in finetune("--lr", 0.02, "--keep-best").out
    monkeypatch.setattr(History, "best", property(lambda self: self.validations[0]))
    ended = finetune("--lr", 0.02, "--keep-best")
    assert ended.code == 0, ended.err
    assert ended.row("warning").startswith("no validation was better than before the first step")


@pytest.mark.filterwarnings("default:.*was of a run of 2 steps")
def test_a_finished_run_can_be_longer(finetune, tmp_path):
    points = tmp_path / "points"
    assert finetune("--checkpoint-dir", points, "--max-steps", 2).code == 0
    ended = finetune("--resume", points, "--max-steps", 3)
    assert ended.code == 0, ended.err
    assert "result     step 3 of 3" in ended.out
    assert "was of a run of 2 steps, this one has 3" in ended.err
