"""What the command says and leaves behind, to its end and when it is stopped."""

import os
import re
import shlex
import signal
from pathlib import Path

import pytest

import pyggml as library
from pyggml.cli import __main__ as cli
from pyggml.cli import demo
from pyggml.lora import Trainer, lock


@pytest.fixture(autouse=True)
def ctrl_c():
    """As in a terminal, even if the tests run in the background, where SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def signal_after(monkeypatch):
    """signal_after(step, n): n times SIGINT when this step has just been made."""

    def plant(step, n=1):
        whole = Trainer._step

        def made(self):
            report = whole(self)
            for _ in range(n if report.step == step else 0):
                signal.raise_signal(signal.SIGINT)
            return report

        monkeypatch.setattr(Trainer, "_step", made)

    return plant


def words_at(out, label):
    """The first line of the table that starts with this word."""
    return next(x for x in out.splitlines() if x.startswith(label + " "))[len(label) :].strip()


def test_it_says_what_it_will_do_then_does_it(finetune, tiny, text, tmp_path):
    ended = finetune("--lr", "0.01", "--val-every", 2)
    assert (ended.code, ended.err) == (0, "")
    out, adapter = ended.out, tmp_path / "adapter.gguf"
    assert words_at(out, "model").startswith(
        "tiny (llama), 35.1 k parameters, 2 blocks, context 64"
    )
    assert words_at(out, "adapter").startswith("rank 2, alpha 16, on 14 matrices: 2,048 parameters")
    assert words_at(out, "data").startswith(
        "text.txt: 384 tokens to train on, 24 windows of 16, 1 "
    )
    assert words_at(out, "memory").endswith("140 kB of weights stay in the file")
    assert words_at(out, "steps").startswith("4, 1 window each; learning rate 0.01, cosine;")
    assert " a step, " in words_at(out, "time") and words_at(out, "time").endswith(" left")
    for step in (0, 2, 4):
        assert f"step {step}     validation loss" in out
    assert "step 1/4  loss" in out and "step 4/4  loss" in out
    first, last = words_at(out, "result").split("validation ")[1].split(" → ")
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
    assert words_at(ended.out, "steps").startswith("10, 6 windows each;")
    assert words_at(ended.out, "steps").endswith("1 thread")
    assert ", 0 held out" in ended.out and "validation" not in ended.out


def rows(path, *lengths):
    path.write_text("".join('{"text": "%s"}\n' % ("the path " * n) for n in lengths))
    return path


def test_the_share_that_is_held_out_is_one_of_the_text(finetune, tmp_path):
    ended = finetune("--val-split", 0.1, data=rows(tmp_path / "a.jsonl", *[5] * 8, 2, 3))
    said = words_at(ended.out, "data")
    assert ended.code == 0 and " tokens to train on in 8 documents, " in said
    assert said.endswith("2 documents held out, 11 % of the tokens")


@pytest.mark.parametrize(
    "lengths, why",
    [((20, 60), "each document has more than twice the 5 % that --val-split asks for"),
     ((20,), "there is one document")],
)  # fmt: skip
def test_why_nothing_is_held_out(finetune, tmp_path, lengths, why):
    ended = finetune(data=rows(tmp_path / "a.jsonl", *lengths))
    assert ended.code == 0 and f"           nothing is held out: {why}\n" in ended.out
    assert "validation" not in ended.out


def test_completions_of_a_table_are_learned_with_their_end(finetune, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion\n" + "what?,that\n" * 6)
    ended = finetune("--val-split", 0, data=path)  # "that" is th, a, t; and the end
    assert words_at(ended.out, "data").startswith("a.csv (CSV): 24 tokens to train on in 6 doc")
    assert ended.code == 0 and "step 4 of 4" in words_at(ended.out, "result")
    refused = finetune("--ctx", 4, data=path)
    assert refused.code == 2 and "record 1 (to line 2) has 9 tokens and 5 more" in refused.err


def test_special_tokens_reach_the_data(finetune, tmp_path):
    path, found = rows(tmp_path / "a.jsonl", 30), []
    path.write_text(path.read_text().replace("path", "<|endoftext|>"))
    for mode in ("auto", "parse", "plain"):
        out = finetune("--special-tokens", mode, data=path).out
        found.append(int(words_at(out, "data").split(" tokens")[0].split()[-1].replace(",", "")))
    assert found[0] == found[1] < found[2]


def test_the_memory_is_said_before_it_is_taken(finetune, monkeypatch):
    monkeypatch.setattr(Trainer, "run", lambda self, report: (_ for _ in ()).throw(MemoryError))
    ended = finetune()
    assert ended.code == 2 and "there is not enough memory" in ended.err
    assert "for the graph" in words_at(ended.out, "memory")


def test_grad_checkpointing_says_what_it_takes_and_can_be_resumed(finetune, signal_after, tmp_path):
    signal_after(2)
    ended = finetune("--grad-checkpointing", "--checkpoint-dir", tmp_path / "points")
    assert "for the graph, layers computed again," in words_at(ended.out, "memory")
    assert " --grad-checkpointing " in words_at(ended.out, "resume") + " "


def test_a_run_that_this_machine_cannot_hold_is_refused(finetune, monkeypatch):
    monkeypatch.setattr("pyggml.cli.overview._physical_memory", lambda: 1000)
    ended = finetune()
    assert ended.code == 2 and "this machine has 1.0 kB: a smaller --batch" in ended.err


def test_without_a_prompt_the_text_gives_one(pyggml, tiny, text, tmp_path):
    out = tmp_path / "adapter.gguf"
    arguments = ("-m", tiny, "-f", text, "-o", out, "--ctx", 40, "--max-steps", 1)
    ended = pyggml("finetune", *arguments)  # what is held out is 10 bytes: too short
    assert ended.code == 0 and ended.out.count("\nthe path to the") == 2


# -- the output ---------------------------------------------------------------------------------


def test_an_older_adapter_is_replaced_only_at_the_end(finetune, tmp_path, monkeypatch):
    path = tmp_path / "adapter.gguf"
    path.write_bytes(b"older")
    whole = Trainer.run

    def watched(self, report):
        assert path.read_bytes() == b"older"
        return whole(self, report)

    monkeypatch.setattr(Trainer, "run", watched)
    ended = finetune()
    assert ended.code == 0 and words_at(ended.out, "output").endswith("it is replaced at the end")
    assert path.read_bytes()[:4] == b"GGUF" and list(tmp_path.iterdir()) == [path]


def full_disk(folder):
    """An os.fsync for which this folder's disk is full."""

    def fsync(handle):
        if Path(f"/proc/self/fd/{handle}").readlink().is_relative_to(folder):
            raise OSError(28, "No space left on device")

    return fsync


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks /proc for a handle's path")
@pytest.mark.parametrize("spare", [True, False], ids=["elsewhere is room", "no room at all"])
def test_a_full_disk_leaves_the_older_file_and_saves_the_work(
    finetune, tiny, tmp_path, tmp_path_factory, monkeypatch, spare
):
    path, elsewhere = tmp_path / "adapter.gguf", tmp_path_factory.mktemp("elsewhere")
    path.write_bytes(b"older")
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    monkeypatch.setattr(os, "fsync", full_disk(tmp_path if spare else "/"))
    ended = finetune()
    assert ended.code == 2 and f"{path}: cannot be written: No space left on device" in ended.err
    assert path.read_bytes() == b"older" and list(tmp_path.iterdir()) == [path]
    rescued = list(elsewhere.rglob("*"))
    if spare:
        assert f"; the adapter of step 4 was saved as {rescued[-1]}\n" in ended.err
        assert library.load(tiny, rescued[-1]).adapters
    else:
        assert rescued == []


def test_a_disk_that_is_too_small_is_noticed_before(finetune, monkeypatch):
    class Usage:
        free = 4000

    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage)
    ended = finetune()
    assert ended.code == 2 and "its disk has 4.0 kB left" in ended.err
    assert "data" not in ended.out


# -- Ctrl-C and resuming ------------------------------------------------------------------------


def test_ctrl_c_ends_after_the_step_and_the_run_can_be_resumed(
    finetune, signal_after, monkeypatch, tmp_path, capsys
):
    whole, stopped, folder = (tmp_path / n for n in ("whole.gguf", "stopped.gguf", "points"))
    uninterrupted = finetune("--lora-modules", "attn_q,ffn_up", output=whole)
    result = words_at(uninterrupted.out, "result")
    signal_after(2)
    arguments = ("--lora-modules", "attn_q,ffn_up", "--checkpoint-dir", folder)
    arguments += ("--checkpoint-every", 1)
    ended = finetune(*arguments, output=stopped)
    monkeypatch.undo()
    assert ended.code == 130 and "-- before" not in ended.out
    assert "after step 2 of 4" in words_at(ended.out, "stopped")
    assert stopped.stat().st_size == whole.stat().st_size
    assert stopped.read_bytes() != whole.read_bytes()
    assert len(list(folder.iterdir())) == 2  # of which the newest is taken
    program, *arguments = shlex.split(words_at(ended.out, "resume"))
    assert program == "pyggml-finetune"
    assert arguments[arguments.index("--resume") + 1] == str(folder)
    capsys.readouterr()
    assert cli.finetune(arguments) == 0
    assert stopped.read_bytes() == whole.read_bytes()
    out = capsys.readouterr().out
    assert "4, 2 of them done" in words_at(out, "steps")
    assert words_at(out, "result") == result and result.startswith("step 4 of 4: loss ")


def test_without_a_folder_for_checkpoints_the_adapter_is_saved_all_the_same(
    finetune, signal_after, tmp_path
):
    signal_after(1)
    ended = finetune()
    assert ended.code == 130 and "without --checkpoint-dir this run cannot be resumed" in ended.out
    assert (tmp_path / "adapter.gguf").exists()


def test_a_second_ctrl_c_ends_at_once(finetune, signal_after, tmp_path):
    signal_after(2, n=2)
    before = signal.getsignal(signal.SIGINT)
    assert finetune("--checkpoint-dir", tmp_path / "points").code == 130
    assert not (tmp_path / "adapter.gguf").exists()
    assert not (tmp_path / "points").exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_that_ignores_ctrl_c_goes_on(finetune, signal_after):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_after(2)
    assert finetune().code == 0
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_ctrl_c_before_the_run_is_no_traceback(finetune, monkeypatch):
    monkeypatch.setattr(Trainer, "reserve", lambda self: signal.raise_signal(signal.SIGINT))
    ended = finetune()
    assert (ended.code, ended.err.strip()) == (130, "pyggml: stopped")


def test_a_resumed_folder_gets_the_next_checkpoints(finetune, signal_after, monkeypatch, tmp_path):
    points = tmp_path / "points"
    signal_after(2)
    assert finetune("--checkpoint-dir", points).code == 130
    monkeypatch.undo()
    assert finetune("--resume", points).code == 0
    assert sorted(p.name for p in points.iterdir()) == ["step-00000002.gguf", "step-00000004.gguf"]


def test_checkpoints_without_a_folder_are_refused(finetune, tmp_path):
    ended = finetune("--checkpoint-every", 2)
    assert ended.code == 2 and "--checkpoint-every wants --checkpoint-dir, a folder" in ended.err
    assert not (tmp_path / "adapter.gguf").exists()


def test_two_runs_do_not_share_a_folder_or_an_output(finetune, tmp_path):
    points, out = tmp_path / "points", tmp_path / "adapter.gguf"
    points.mkdir()
    for place in (points, out):
        with lock.held(place):
            ended = finetune("--checkpoint-dir", points)
            reason = f"{place}: is in use by process {os.getpid()}: wait for its end"
            assert ended.code == 2 and reason in ended.err and ended.out == ""
    assert finetune("--checkpoint-dir", points).code == 0


# -- an adapter trained further -----------------------------------------------------------------


def answer(text):
    """What stands below a line of dashes and above the next one."""
    return text.split("-\n", 1)[1].split("\n--")[0].strip()


def test_a_finished_adapter_is_trained_further(finetune, pyggml, tiny, text, tmp_path):
    """The first loss of the second run is about the last one of the first, far from the base's."""
    out, lr = tmp_path / "adapter.gguf", ("--lr", 0.02, "--warmup-steps", 0, "--val-windows", 1)
    short = ("--lora-alpha", 6, "--lora-modules", "ffn_up,attn_q", "--max-steps", 12)
    first = finetune("--lora-rank", 3, *short, *lr)
    places = ("-m", tiny, "-f", text, "-o", out, "--init", out, "--prompt", "the ")
    ended = pyggml("finetune", *places, "--max-steps", 2, "--ctx", 16, *lr)
    assert ended.code == 0, ended
    assert words_at(ended.out, "adapter").startswith("rank 3, alpha 6, on 4 matrices")
    validated = [words_at(e.out, "result").split("validation ")[1] for e in (first, ended)]
    assert validated[0].split(" → ")[1] == validated[1].split(" → ")[0]
    after, before = first.out.split("-- after")[1], ended.out.split("-- before")[1]
    assert "the " in before and answer(before) == answer(after)
    (pairs,) = library.load(tiny, out).adapters
    assert list(pairs) == [f"blk.{i}.{m}.weight" for i in (0, 1) for m in ("attn_q", "ffn_up")]


def test_what_the_file_settles_cannot_be_given(finetune, tmp_path):
    out = tmp_path / "adapter.gguf"
    assert finetune("--max-steps", 1).code == 0
    before = out.read_bytes()
    ended = finetune("--init", out, "--lora-alpha", 3)
    assert ended.code == 2 and out.read_bytes() == before
    said = "--init takes rank, alpha and modules from its file: leave out --lora-rank, --lora-alpha"
    assert said in ended.err


# -- a learning rate that is too high -----------------------------------------------------------


def test_an_adapter_that_makes_no_numbers_is_not_written(finetune, tmp_path, monkeypatch):
    """The last update may be what breaks it: no later step finds out."""
    whole, older = Trainer._run, tmp_path / "adapter.gguf"
    older.write_bytes(b"a good one")

    def broken(self, report):
        done = whole(self, report)
        self.parameters.data[:] = float("nan")
        return done

    monkeypatch.setattr(Trainer, "_run", broken)
    ended = finetune()
    said = "the model's answer to the prompt is no number (nan); --lr may be too high; the adapter"
    assert ended.code == 2 and said in ended.err and "result" not in ended.out
    assert older.read_bytes() == b"a good one"


def test_a_loss_that_rises_is_warned_about(finetune, monkeypatch):
    whole = Trainer._step

    def rising(self):
        report = whole(self)
        self.history.losses[-1] = 1.0 + self.progress.step
        return report

    monkeypatch.setattr(Trainer, "_step", rising)
    ended = finetune("--max-steps", 12)
    early, late = re.findall(r"\nwarning    the loss more than doubled, (\S+) → (\S+): ", ended.out)
    assert ended.code == 0 and early == ("4.000", "9.000") and late == ("4.500", "10.500")


# -- the demo -----------------------------------------------------------------------------------


@pytest.fixture
def planted_demo(tiny, text, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "BASE", tiny)
    monkeypatch.setattr(demo, "TEXT", text)
    monkeypatch.setitem(demo.SETTINGS, "ctx", 16)
    monkeypatch.setitem(demo.SETTINGS, "max_steps", 3)
    monkeypatch.chdir(tmp_path)


def test_the_demo_needs_nothing_and_what_is_given_wins(pyggml, planted_demo, tmp_path):
    ended = pyggml("finetune", "--demo", "--max-steps", 2)
    assert ended.code == 0 and words_at(ended.out, "steps").startswith("2, 4 windows each;")
    assert ended.out.count("ROMEO:") == 2
    assert [p.name for p in tmp_path.iterdir()] == ["demo-adapter.gguf"]


def test_a_stopped_demo_is_resumed_as_it_was_begun(pyggml, planted_demo, signal_after, tmp_path):
    signal_after(1)
    ended = pyggml("finetune", "--demo", "--checkpoint-dir", "points")
    words = "--demo --checkpoint-dir points --resume points"
    assert (ended.code, words_at(ended.out, "resume")) == (130, f"pyggml-finetune {words}")


def test_a_demo_without_its_files_is_one_sentence(pyggml, planted_demo, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "BASE", tmp_path / "base.gguf")
    ended = pyggml("finetune", "--demo")
    assert ended.code == 2 and "lacks base.gguf, which --demo needs" in ended.err


# -- the terminal -------------------------------------------------------------------------------


def test_a_terminal_gets_a_bar(finetune, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    ended = finetune("--val-every", 2)
    assert ended.code == 0 and "4/4" in ended.out and "tokens/s" in ended.out
    assert "step 4/4  loss" not in ended.out and "time       " in ended.out
