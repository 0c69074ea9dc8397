"""The tests of tests/backends/card under Numba's CUDA simulator, which is chosen when Numba is
imported: hence a process of its own. Where there is a card, they also run on it by themselves."""

import os
import subprocess
import sys
from pathlib import Path

from extras import need

CARD = Path(__file__).parent / "card"


def test_kernels_under_the_simulator():
    need("numba_cuda")
    arguments = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CARD)]
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
