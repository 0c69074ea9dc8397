"""Rewards on the command line: a run, its report, its files, and what is told of faults."""

import json
import re

import pytest

REWARD = """
def length(completion): return len(completion)
def letters(completion, n): return len(set(completion)) / n
def fails(completion, n): return 1 / (n - 3)
"""


@pytest.fixture
def rewarded(finetune, tmp_path):
    """Runs a short `--objective grpo` with these functions of a file."""
    (tmp_path / "r.py").write_text(REWARD)
    rows = "".join(json.dumps({"prompt": f"the {i} ", "n": 1 + i}) + "\n" for i in range(9))
    (tmp_path / "p.jsonl").write_text(rows)

    def call(*functions, more=(), objective="grpo"):
        words = [word for f in functions for word in ("--reward", tmp_path / f"r.py:{f}")]
        sizes = ("--ctx", 32, "--answers", 3, "--answer-tokens", 6, "--batch", 2)
        sizes += ("--max-steps", 3, "--val-split", 0.3)
        given = ("--objective", objective, *words, *sizes, *more)
        return finetune(*given, data=tmp_path / "p.jsonl")

    return call


@pytest.mark.filterwarnings("default:.*was of a run of 3 steps")
def test_a_run_and_what_it_leaves(rewarded, tmp_path):
    ended = rewarded("length", "letters:0.5", more=("--checkpoint-dir", tmp_path / "c"))
    assert (ended.code, ended.err) == (0, "")
    assert re.search(
        r"p.jsonl \(JSON Lines\): \d prompts of up to \d tokens, \d held out", ended.out
    )
    assert "3, 2 prompts each" in ended.row("steps") and "findings" not in ended.out
    assert "reward " in ended.out and "step 3     validation loss -" in ended.out
    records = [*map(json.loads, (tmp_path / "adapter.metrics.jsonl").read_text().splitlines())]
    step = next(r for r in records if r["event"] == "step")
    assert step["answers"]["length"] > 0 and {*step["sampled"]["rewards"]} == {"length", "letters"}
    page = (tmp_path / "adapter.html").read_text()
    for words in ("Answers on the way", '"Reward by function"', '"Answer length"', '"Reward"'):
        assert words in page
    settings = (tmp_path / "adapter.yaml").read_text()
    assert "reward:" in settings and "letters:0.5" in settings
    longer = ("--checkpoint-dir", tmp_path / "c", "--max-steps", 4)
    assert rewarded("length", "letters:0.5", more=("--resume", "auto", *longer)).code == 0
    other = rewarded("length", more=("--resume", "auto", *longer))
    assert other.code == 2 and "is of another run: --reward is" in other.err
    (tmp_path / "r.py").write_text(REWARD + "# another\n")
    changed = rewarded("length", "letters:0.5", more=("--resume", "auto", *longer))
    said = " ".join(changed.err.split())
    assert changed.code == 2 and "--reward has another text than in that run" in said


@pytest.mark.filterwarnings("default:.*the answer is left out")
def test_faults_are_told_by_row_in_a_sentence(rewarded, tmp_path):
    ended = rewarded("fails")
    assert ended.code == 2 and "Traceback" not in ended.err
    assert "p.jsonl: line 3: reward fails raised ZeroDivisionError: division by zero" in ended.err
    ended = rewarded("fails", more=("--reward-faults", "skip"))
    assert ended.code == 0
    said = "line 3: reward fails raised ZeroDivisionError: division by zero: the answer is left out"
    assert said in " ".join(ended.err.split())
    for function, more, fault in (
        ("none", (), "has no function none"),
        ("length:x", (), "wanted FILE.py:FUNCTION"),
        ("length", ("--answers", 1), "wanted at least 2"),
        ("length", ("--ctx", 8), "ctx is 8: the longest prompt has "),
        ("length", ("--no-packing",), "keeps whole answers together"),
        ("length", ("--neftune-alpha", 5), "--neftune-alpha is 5, but grpo compares"),
    ):
        ended = rewarded(function, more=more)
        assert ended.code == 2 and fault in " ".join(ended.err.split()), ended.err
    assert "reward" in rewarded().err
    assert "is for grpo" in rewarded("length", objective="dpo").err
