"""What the command says and does, from the first line to the last."""

import os

import psutil
import pytest

import pyggml as library
from pyggml.cli import demo
from pyggml.lora import Trainer
from pyggml.lora.record import read_records


@pytest.mark.quick
def test_it_says_what_it_will_do_then_does_it(finetune, tiny, text, tmp_path):
    ended = finetune("--lr", "0.01", "--val-every", 2)
    assert (ended.code, ended.err) == (0, "")
    out, adapter = ended.out, tmp_path / "adapter.gguf"
    assert ended.row("model").startswith("tiny (llama), 35.1 k parameters, 2 blocks, context 64")
    assert ended.row("adapter").startswith("rank 2, alpha 16, on 14 matrices: 2,048 parameters")
    assert ended.row("data").startswith("text.txt: 384 tokens to learn, 24 windows of 16, 1 ")
    assert ended.row("memory").endswith("140 kB of weights stay in the file")
    assert ended.row("steps").startswith("4, 1 window each; learning rate 0.01, cosine after 2 ")
    assert " a step, " in ended.row("time") and ended.row("time").endswith(" left")
    for step in (0, 2, 4):
        assert f"step {step}     validation loss" in out
    assert "step 1/4  loss" in out and "step 4/4  loss" in out
    first, last = ended.row("result").split("validation ")[1].split(" → ")
    assert float(last) < float(first)
    order = [
        "model ",
        "memory ",
        "steps ",
        "step 1/4",
        "result ",
        "-- before",
        "-- after",
        "use it",
    ]
    assert sorted(order, key=out.index) == order
    before, after = out.split("-- before")[1].split("-- after")
    assert "the " in before and before.split("\n", 1)[1] != after.split("\n", 1)[1]
    given = f"-m {tiny} --lora {adapter} -p"
    assert f"pyggml generate {given}" in out and f"llama-cli {given}" in out
    assert len(library.load(tiny, adapter).adapters[0]) == 14


def test_settings_reach_the_run(finetune, tiny, tmp_path):
    ended = finetune("--lora-modules", "attn_q, output", "--skip-layers", 1, "--lora-rank", 3,
                     "--lora-alpha", 6, "--batch", 2, "--grad-accum", 3, "--epochs", 2,
                     "--val-split", 0, "--threads", 1, "--max-steps", 0)  # fmt: skip
    assert ended.code == 0
    (pairs,) = library.load(tiny, tmp_path / "adapter.gguf").adapters
    assert list(pairs) == ["blk.1.attn_q.weight", "output.weight"]
    assert {p.a.shape[0] for p in pairs.values()} == {3} and pairs["output.weight"].scale == 2
    assert ended.row("steps").startswith("10, 6 windows each, ")
    assert ended.row("steps").endswith("1 thread")
    assert ", 0 held out" in ended.out and "validation" not in ended.out


def test_the_memory_is_said_before_it_is_taken(finetune, monkeypatch):
    monkeypatch.setattr(Trainer, "run", lambda self, *_, **how: (_ for _ in ()).throw(MemoryError))
    ended = finetune()
    assert ended.code == 2 and ended.err.endswith("pyggml: there is not enough memory\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError("x.so: failed to map segment from shared object"),
         "there is not enough memory: x.so: failed to map segment from shared object"),
        (OSError("Could not find/load shared object file"),
         "Could not find/load shared object file"),
    ],
)  # fmt: skip
def test_a_library_that_is_not_loaded_is_a_sentence(error, said, finetune, monkeypatch):
    monkeypatch.setattr(Trainer, "run", lambda self, *_, **how: (_ for _ in ()).throw(error))
    ended = finetune()
    assert ended.code == 2 and ended.err.endswith(f"pyggml: {said}\n")
    assert "for the graph" in ended.row("memory")


def test_grad_checkpointing_says_what_it_takes_and_can_be_resumed(finetune, signal_after, tmp_path):
    signal_after(2)
    ended = finetune("--grad-checkpointing", "--checkpoint-dir", tmp_path / "points")
    assert "for the graph, gradient checkpointing," in ended.row("memory")
    assert " --grad-checkpointing " in ended.row("resume") + " "


def test_a_run_that_this_machine_cannot_hold_is_refused(finetune, monkeypatch):
    """Also on Windows, which has no sysconf."""
    monkeypatch.delattr(os, "sysconf", raising=False)
    there = psutil.virtual_memory()._replace(total=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: there)
    ended = finetune()
    assert ended.code == 2 and "this machine has 1.0 kB: a smaller --batch" in ended.err


def test_without_a_prompt_the_text_gives_one(pyggml, tiny, text, tmp_path):
    out = tmp_path / "adapter.gguf"
    arguments = ("-m", tiny, "-f", text, "-o", out, "--ctx", 40, "--max-steps", 1)
    ended = pyggml("finetune", *arguments)  # what is held out is 10 bytes: too short
    assert ended.code == 0 and ended.out.count("\nthe path to the") == 2


def test_the_prompt_is_answered_on_the_way(finetune, tmp_path):
    """By the model of that step: as a run that ends there answers."""
    steady = ("--lr", 1, "--warmup-steps", 0, "--lr-scheduler", "constant")
    ended = finetune(*steady, "--answer-every", 2)
    page = (tmp_path / "adapter.html").read_text()
    assert "<h2>Answers on the way</h2>" in page and "earned</th>" not in page
    assert ended.code == 0 and ended.out.count("-- step ") == 1, "that of step 4 is the last"
    (sampled,) = (r for r in read_records(tmp_path / "adapter.metrics.jsonl") if "sampled" in r)
    assert sampled["step"] == 2 and sampled["sampled"]["answer"] in ended.out
    shorter = finetune(*steady, "--max-steps", 2)
    assert sampled["sampled"]["answer"] in shorter.out.split("-- after")[1]
    ended = finetune("--objective", "embed", "--answer-every", 2)
    assert "--answer-every does nothing with embed, whose models write no text" in ended.err


# -- an adapter trained further -------------------------------------------------------------------


def answer(text):
    """What stands below a line of dashes and above the next one."""
    return text.split("-\n", 1)[1].split("\n--")[0].strip()


def test_a_finished_adapter_is_trained_further(finetune, pyggml, tiny, text, tmp_path):
    """The first loss of the second run is about the last one of the first, far from the base's."""
    out, lr = tmp_path / "adapter.gguf", ("--lr", 0.02, "--warmup-steps", 0, "--val-windows", 1)
    short = ("--lora-alpha", 6, "--lora-modules", "ffn_up,attn_q", "--max-steps", 12)
    first = finetune("--lora-rank", 3, *short, *lr)
    further = tmp_path / "further.gguf"
    places = ("-m", tiny, "-f", text, "-o", further, "--init", out, "--prompt", "the ")
    ended = pyggml("finetune", *places, "--max-steps", 2, "--ctx", 16, *lr)
    assert ended.code == 0, ended
    assert ended.row("adapter").startswith("rank 3, alpha 6, on 4 matrices")
    validated = [e.row("result").split("validation ")[1] for e in (first, ended)]
    assert validated[0].split(" → ")[1] == validated[1].split(" → ")[0]
    after, before = first.out.split("-- after")[1], ended.out.split("-- before")[1]
    assert "the " in before and answer(before) == answer(after)
    (pairs,) = library.load(tiny, further).adapters
    assert list(pairs) == [f"blk.{i}.{m}.weight" for i in (0, 1) for m in ("attn_q", "ffn_up")]


def test_what_the_file_settles_cannot_be_given(finetune, tmp_path):
    out = tmp_path / "adapter.gguf"
    assert finetune("--max-steps", 1).code == 0
    before = out.read_bytes()
    ended = finetune("--init", out, "--lora-alpha", 3)
    assert ended.code == 2 and out.read_bytes() == before
    said = "--init takes rank, alpha and modules from its file: leave out --lora-rank, --lora-alpha"
    assert said in ended.err


# -- the demo -------------------------------------------------------------------------------------


@pytest.fixture
def planted_demo(tiny, text, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "BASE", tiny)
    monkeypatch.setattr(demo, "TEXT", text)
    monkeypatch.setitem(demo.SETTINGS, "ctx", 16)
    monkeypatch.setitem(demo.SETTINGS, "max_steps", 3)
    monkeypatch.chdir(tmp_path)


def test_the_demo_needs_nothing_and_what_is_given_wins(pyggml, planted_demo, tmp_path):
    ended = pyggml("finetune", "--demo", "--max-steps", 2)
    assert ended.code == 0 and ended.row("steps").startswith("2, 4 windows each;")
    assert ended.out.count("ROMEO:") == 2
    endings = ("gguf", "html", "metrics.jsonl", "yaml")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"demo-adapter.{e}" for e in endings]
    assert pyggml("finetune", "--demo", "--val-split", 0, "--dry-run").code == 0


def test_a_stopped_demo_is_resumed_as_it_was_begun(pyggml, planted_demo, signal_after, tmp_path):
    signal_after(1)
    ended = pyggml("finetune", "--demo", "--checkpoint-dir", "points")
    words = "--checkpoint-dir points --resume points --demo"
    assert (ended.code, ended.row("resume")) == (130, f"pyggml-finetune {words}")


def test_a_demo_without_its_files_is_one_sentence(pyggml, planted_demo, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "BASE", tmp_path / "base.gguf")
    ended = pyggml("finetune", "--demo")
    assert ended.code == 2 and "lacks base.gguf, which --demo needs" in ended.err


# -- the terminal ---------------------------------------------------------------------------------


def test_a_terminal_gets_a_bar(finetune, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    ended = finetune("--val-every", 2)
    assert ended.code == 0 and "4/4" in ended.out and "tokens/s" in ended.out
    assert "step 4/4  loss" not in ended.out and "time       " in ended.out
