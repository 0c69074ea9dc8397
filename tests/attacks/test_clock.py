"""Python's clocks jump and stand still: commands end as ever, with the same bytes."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attacks.kills import JUMPING_CLOCK, ROOT, SCENARIOS, environment, write_inputs
from pyggml.cli.__main__ import main
from pyggml.cli.terminal.show import speed
from pyggml.lora import StepReport

_READINGS = """
import json, time
clocks = time.time, time.monotonic, time.perf_counter
print(json.dumps([[clock() for _ in range(1000)] for clock in clocks]))
"""


@pytest.fixture
def jumping(monkeypatch):
    """Clocks jump in the processes that this one starts."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(JUMPING_CLOCK), str(ROOT)]))
    return environment()


def test_the_clocks_jump(jumping):
    words = subprocess.check_output([sys.executable, "-c", _READINGS], env=jumping)
    of_day, *others = json.loads(words)
    assert max(of_day) - min(of_day) > 86400 * 7000
    assert sum(b < a for a, b in itertools.pairwise(of_day)) > 100
    for readings in others:
        steps = [b - a for a, b in itertools.pairwise(readings)]
        assert min(steps) == 0 and max(steps) > 3000


def test_training_writes_the_same_bytes(tmp_path, jumping, monkeypatch):
    """Those of this process. Lines of speed and of the time left divide by seconds, which may be
    none."""
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)

    def words(name):
        return [
            {"a.gguf": f"{name}.gguf", "points": name}.get(a, a) for a in SCENARIOS[0].arguments
        ]

    assert main(words("still")) == 0
    command = [sys.executable, "-m", "pyggml.cli", *words("jumping")]
    ended = subprocess.run(command, env=jumping, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    points = sorted(p.name for p in Path("jumping").iterdir())
    assert points == ["step-00000014.gguf", "step-00000016.gguf"]
    assert Path("jumping.gguf").read_bytes() == Path("still.gguf").read_bytes()


@pytest.mark.quick
def test_a_clock_that_stands_still_is_no_division_by_zero():
    step = StepReport(1, 2, 0, 1.0, 1e-3, 1.0, n_tokens=10, seconds=0.0)
    assert step.tokens_per_second == 0
    assert speed(10, 0.0) == "0.0 tokens/s" and speed(10, 4.0) == "2.5 tokens/s"
