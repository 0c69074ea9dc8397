"""Python's clocks jump and stand still: commands end as ever, with the same bytes."""

import itertools
import json
import os
import subprocess
import sys

import pytest

from attacks.kills import JUMPING_CLOCK, ROOT, SCENARIOS, environment, write_inputs
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


def test_training_writes_the_same_bytes(tmp_path, jumping):
    """Its lines of speed and of the time left divide by seconds, which may be none."""
    train, written = SCENARIOS[0], []
    write_inputs(tmp_path)
    for i, env in enumerate(({**jumping, "PYTHONPATH": str(ROOT)}, jumping)):
        output, folder = tmp_path / f"{i}.gguf", tmp_path / f"points-{i}"
        given = [{"a.gguf": output, "points": folder}.get(a, a) for a in train.arguments]
        command = [sys.executable, "-m", "pyggml.cli", *map(str, given)]
        ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        assert sorted(p.name for p in folder.glob("*.gguf")) == [
            "step-00000014.gguf",
            "step-00000016.gguf",
        ]
        written.append(output.read_bytes())
    assert written[0] == written[1]


@pytest.mark.quick
def test_a_clock_that_stands_still_is_no_division_by_zero():
    step = StepReport(1, 2, 0, 1.0, 1e-3, 1.0, n_tokens=10, seconds=0.0)
    assert step.tokens_per_second == 0
    assert speed(10, 0.0) == "0.0 tokens/s" and speed(10, 4.0) == "2.5 tokens/s"
