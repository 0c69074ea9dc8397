"""What is planned before a run: --dry-run writes nothing, --max-memory holds."""

import json
import re
import sys
import tempfile

import pytest
from processes import printed

from pyggml import threads
from pyggml.cli.commands.finetune import memory
from pyggml.cli.terminal.options import Size
from pyggml.cli.terminal.show import size
from pyggml.lora.objectives import OBJECTIVES
from pyggml.lora.objectives.rewarded import RewardObjective

GROWN = ("--epochs", 4, "--batch", 4096)  # so that the graph counts beside the interpreter


def test_a_dry_run_says_the_plan_and_writes_nothing(finetune, tmp_path, monkeypatch):
    (tmp_path / "points").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    points = ("--checkpoint-dir", tmp_path / "points")
    ended = finetune("--dry-run", *points, "--checkpoint-every", 1)
    assert (ended.code, ended.err) == (0, "")
    assert [p.name for p in tmp_path.rglob("*")] == ["points"]
    assert ended.row("windows") == "0 % padding, 100 % of the tokens learned"
    for part in ("arena", "optimizer state", "all 140 kB stay", "KV cache", "interpreter"):
        assert part in ended.out
    assert re.fullmatch(r".* a step: .* and the validations", ended.row("time"))
    assert "result" not in ended.out and "-- before" not in ended.out


def test_what_is_capped_is_said_if_it_was_given(finetune):
    ended = finetune("--dry-run", "--max-steps", 500, "--epochs", 1, "--threads", 99)
    n_steps = int(ended.row("steps").partition(",")[0])
    said = f"settings   --max-steps is 500: the run ends with step {n_steps}, as epochs is 1\n"
    assert said in ended.out and n_steps < 500
    assert "\n           --threads is 99: " in ended.out
    assert "--checkpoint-every" not in ended.out and "--val-every" not in ended.out
    assert "settings" not in finetune("--dry-run", "--max-steps", 500, "--val-every", 0).out


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_defaults_of_the_objective_are_in_the_plan(finetune, tiny, tmp_path, objective):
    rows = {
        "pairs": {"prompt": "the {} ", "chosen": "yes", "rejected": "no"},
        "labels": {"prompt": "the {} ", "completion": "a", "label": 1},
        "classes": {"text": "the {} ", "label": "{}"},
        "groups": {"anchor": "the {} ", "positive": "a {}"},
    }
    row = json.dumps(rows.get(OBJECTIVES[objective].rows, {"prompt": "the {} ", "completion": "b"}))
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(row.replace("{}", str(i % 3)) + "\n" for i in range(9)))
    run = ("--dry-run", "--ctx", 32, "--max-steps", 0, "--objective", objective)
    if OBJECTIVES[objective].rows == "prompts":
        run += ("--answer-tokens", 20)
    if issubclass(OBJECTIVES[objective], RewardObjective):
        (tmp_path / "r.py").write_text("length = len\n")
        run += ("--reward", tmp_path / "r.py:length")
    run += ("--teacher", tiny) if hasattr(OBJECTIVES[objective], "teacher") else ()
    ended, lr = finetune(*run, data=data), OBJECTIVES[objective].defaults["lr"]
    assert f"learning rate {lr:g}, cosine" in ended.row("steps")
    (usual,) = re.findall(rf"by default, as for {objective}: (.*)", ended.out)
    assert f"--lr {lr:g}, --epochs {OBJECTIVES[objective].defaults['epochs']}, --warmup-" in usual
    (warmup,) = re.findall(r"after (\d+) steps? of warm-up", ended.row("steps")) or [None]
    assert ("--warmup-steps" in usual) == (f"--warmup-steps 10 (here {warmup})" in usual)
    assert ("--preference-beta " in usual) == hasattr(OBJECTIVES[objective], "beta")
    given = finetune(*run, "--lr", 0.5, data=data)
    assert "learning rate 0.5" in given.row("steps") and "--lr " not in given.out


def test_the_parts_of_the_plan_are_what_the_run_takes(finetune, monkeypatch):
    planned = []
    whole = memory.parts

    def seen(trainer, *more):
        planned.append((whole(trainer, *more), trainer.reserve()))
        return planned[-1][0]

    monkeypatch.setattr(memory, "parts", seen)
    ended = finetune("--dry-run")
    ((parts, reserved),) = planned
    assert 0 < parts.scratch < parts.arena
    assert f"at most {size(parts.scratch)} of it scratch of {threads.most()} thread" in ended.out
    assert parts.arena == reserved.arena
    assert parts.state == 3 * reserved.parameters // 4, "gradient, two moments; the copy has room"
    assert parts.own == parts.process + parts.after > parts.process + parts.arena + parts.state
    n_rows = 3 + 60 + 15  # tokens, and those that fill a pass
    monkeypatch.setattr(memory, "LANGUAGES", 0)
    assert finetune("--dry-run").code == 0
    parts = planned[-1][0]
    assert parts.after == 2 * 2 * n_rows * 16 * 2, "K, V; 2 blocks; 16 numbers; halves"
    assert parts.own == parts.process + parts.arena + parts.state


def test_steps_in_the_backward_pass_take_no_memory_for_gradients(finetune, monkeypatch):
    planned, whole = [], memory.parts
    monkeypatch.setattr(memory, "parts", lambda *a: planned.append(whole(*a)) or planned[-1])
    within = ("--dry-run", "--step-in-backward", "--optimiser", "sgd")
    ended = finetune(*within, "--clip", 0.5)
    assert ended.code == 0 and planned[0].state == 0
    said = "each tensor's step follows its gradient: "
    assert f"{said}clipped to 0.5 by the gradient's norm of the step before, the first" in ended.out
    assert f"{said}not clipped" in finetune(*within, "--clip", 0).out


def test_padding_and_samples_are_told(finetune, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "what?", "completion": "so"}\n' * 3)
    out = finetune("--dry-run", "--val-split", 0, data=path)
    assert (
        out.row("windows")
        == "3 samples, 1.5 to a window; 29 % padding, 28.1 % of the tokens learned"
    )


def test_windows_of_single_rows_are_as_long_as_these(finetune, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "what?", "completion": "so"}\n' * 3)
    out = finetune("--dry-run", "--val-split", 0, "--no-packing", data=path)
    assert "3 windows of 7, " in out.row("data")
    assert out.row("windows").startswith("3 samples, 1 to a window; 0 % padding")


@pytest.mark.parametrize(
    "text, n", [("4GB", 4 * 10**9), ("800 mb", 800 * 10**6), ("1.5GiB", 3 << 29), ("1000", 1000)]
)
def test_a_size_is_bytes(text, n):
    assert Size().convert(text, None, None) == n


@pytest.mark.parametrize("text", ["much", "", "0", "-1GB", "4XB", "4GB4"])
def test_what_is_no_size_is_refused(finetune, text):
    ended = finetune("--max-memory", text)
    assert ended.code == 2 and "wanted a size such as 4GB or 800MB" in ended.err


@pytest.fixture(autouse=True)
def first_of_its_kind(monkeypatch):
    """Whatever other tests have compiled."""
    monkeypatch.setattr(memory.compile_ahead, "share_to_compile", lambda *_: 1.0)


def limit_for(n_more):
    """A limit that leaves a run so many bytes beside this process."""
    return memory.resident() + memory.COMPILING + memory.RUNNING + memory.MARGIN + n_more


def test_no_memory_is_set_aside_for_a_compiler_without_work(finetune, monkeypatch):
    """In a process of a fixed size: the one that tests grows."""
    monkeypatch.setattr(memory, "resident", lambda: 200 * 10**6)
    peaks = []
    for share in (1.0, 0.0):
        monkeypatch.setattr(memory.compile_ahead, "share_to_compile", lambda *_, s=share: s)
        _, value, unit, *_ = finetune("--dry-run").row("peak").split()  # about 420 MB, of which
        assert unit == "MB"
        peaks.append(float(value) * 1e6)
    assert peaks[0] - peaks[1] == pytest.approx(memory.COMPILING, abs=2e6)


def test_windows_are_no_longer_than_the_model_s_context(pyggml, tiny, text):
    """Whose own is 64; a length that was given is refused."""
    of = ("finetune", "-m", tiny, "-f", text, "--lora-rank", 2, "--dry-run")
    ended = pyggml(*of)
    assert ended.row("context") == "windows of 64 tokens, all that the model has, not of 256"
    assert "windows of 64" in ended.row("data")
    assert "--ctx is 100, wanted at most the model's 64" in pyggml(*of, "--ctx", 100).err


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_limit_is_that_of_the_graphs_of_preferences(kind, finetune, tmp_path, monkeypatch):
    """With pairs and the reference's scores, not those of text."""
    path = tmp_path / "rows.jsonl"
    row = {"prompt": "the path ", "chosen": "to the other ", "rejected": "thing"}
    labelled = {"prompt": "the path ", "completion": "to the other", "label": True}
    rows = [row | {"prompt": "the " * (1 + i)} for i in range(6)]
    rows = rows if kind == "dpo" else [labelled | {"label": i % 2 == 0} for i in range(6)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = []
    whole = memory.fit
    monkeypatch.setattr(memory, "fit", lambda *a: found.append(whole(*a)) or found[-1])
    run = ("--objective", kind, "--max-memory", limit_for(300 << 20), "--max-steps", 1)
    ended = finetune(*run, "--ctx", 60, data=path)
    assert ended.code == 0, ended.err
    ((fitted, fits),) = found
    arena = re.search(r"([\d.]+ .?B) for the graph", ended.out)[1]
    assert fits and size(fitted.arena) == arena
    least = finetune(*run, "--ctx", 60, "--max-memory", "20MB", data=path)
    assert least.code == 2 and "--max-memory 20.0 MB is too little: --ctx" in least.err


def test_languages_are_left_out_where_they_do_not_fit(finetune, tmp_path, monkeypatch):
    def run_within(limit):
        path = tmp_path / "adapter.metrics.jsonl"
        ended = finetune("--max-steps", 1, "--max-memory", limit)
        assert ended.code == 0, ended.err
        return "languages" in json.loads(path.read_text().splitlines()[-1]), ended.out

    monkeypatch.setattr(memory, "LANGUAGES", 400 << 20)
    is_told, out = run_within(limit_for(300 << 20))
    assert is_told and "languages of rows" not in out
    monkeypatch.setattr(memory, "LANGUAGES", 4 << 30)
    is_told, out = run_within(limit_for(300 << 20))
    assert not is_told and re.search(
        r"^languages +of rows are not told: it takes 4.3 GB", out, re.M
    )


def test_a_limit_is_kept_by_smaller_passes(finetune, monkeypatch):
    ended = finetune(*GROWN, "--max-memory", limit_for(100 << 20))
    said = ended.row("limit")
    batch, passes = map(int, re.search(r"--batch (\d+) --grad-accum (\d+) ", said).groups())
    assert ended.code == 0 and batch * passes == 4096 and batch < 4096
    assert re.search(r"; --ctx \d+ --batch 4096 --grad-accum 1, as given, would take \d", said)
    assert ended.row("steps").startswith("4, 24 windows each;"), "all of an epoch"


def test_what_the_user_gave_stays_and_what_would_fit_is_told(finetune, tmp_path):
    ended = finetune(*GROWN, "--grad-accum", 1, "--max-memory", limit_for(50 << 20))
    assert ended.code == 2 and "is too little: --ctx 16 --batch 4096 --grad-accum 1" in ended.err
    assert "the least that the given settings can take; --ctx 16 --batch " in ended.err
    assert list(tmp_path.iterdir()) == []
    ended = finetune("--max-memory", "20MB")
    assert ended.code == 2 and "--max-memory 20.0 MB is too little: --ctx 16 --ba" in ended.err


def test_a_limited_run_is_resumed_with_the_settings_that_it_had(finetune, signal_after, tmp_path):
    signal_after(1)
    limit = limit_for(100 << 20)
    ended = finetune(*GROWN, "--max-memory", limit, "--checkpoint-dir", tmp_path / "points")
    said = re.search(r"--batch \d+ --grad-accum \d+", ended.row("limit"))[0]
    assert ended.code == 130 and said in ended.row("resume")
    identity = (tmp_path / "adapter.yaml").read_text()
    assert said.split()[1] in identity and "max_memory" not in identity


# Runs a command and prints the peak of its memory, and its pages of files at the end; VmHWM, as
# ru_maxrss starts with what the parent has.
PEAK = """import re, sys
from pyggml.cli.__main__ import main
code = main(sys.argv[1:])
table = dict(re.findall(r"(\\w+):\\s+(\\d+) kB", open("/proc/self/status").read()))
print(*(1024 * int(table[name]) for name in ("VmHWM", "RssFile")))
sys.exit(code)"""
on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads the peak from /proc"
)


@on_linux
def test_a_small_run_takes_what_was_planned(tiny, text, tmp_path):
    """Of which most is the interpreter and the table of languages; 3 % is measured."""
    run = ["finetune", "-m", tiny, "-f", text, "--max-steps", 2, "--lora-rank", 2]
    run += ["-o", tmp_path / "a.gguf", "--no-report"]
    printed(PEAK, *run)  # whatever it compiles
    plan = re.search(r"peak +about (\d+) MB of its own", printed(PEAK, *run, "--dry-run"))[1]
    peak, files = map(int, printed(PEAK, *run).splitlines()[-1].split())
    assert 1e6 * int(plan) == pytest.approx(peak - files, rel=0.05)


@on_linux
def test_the_real_peak_stays_below_the_limit(tiny, text, tmp_path):
    """Without the limit this run's graph alone takes more than all of it."""
    limit, run = 720 * 10**6, ["finetune", "-m", tiny, "-f", text, "-o", tmp_path / "a.gguf"]
    run += ["--batch", 8192, "--ctx", 64, "--max-steps", 2, "--lora-rank", 2, "--prompt", "the "]
    out = printed(PEAK, *run, "--max-memory", limit)
    batch = int(re.search(r"--batch (\d+)", out)[1])
    arena = float(re.search(r"\nmemory .*?: ([\d.]+) MB for the graph", out)[1])
    assert arena * 8192 / batch > limit / 1e6
    peak, _ = map(int, out.splitlines()[-1].split())
    assert arena * 1e6 < peak < limit
