"""Products of few rows, thread by thread, where there is no card."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

SCRIPT = Path(__file__).with_name("few_rows_by_thread.py")


def test_the_kernel_thread_by_thread_agrees_with_numpy():
    ran = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    errors = dict(line.rsplit(" ", 1) for line in ran.stdout.splitlines())
    assert len(errors) == 11
    assert {what for what, error in errors.items() if not float(error) < 2e-4} == set()
