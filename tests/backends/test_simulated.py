"""The tests of tests/backends/card under Numba's CUDA simulator, which is chosen when Numba is
imported: hence a process of its own. Where there is a card, they also run on it by themselves."""

from pathlib import Path

from extras import need
from processes import python

CARD = Path(__file__).parent / "card"


def test_kernels_under_the_simulator():
    need("numba_cuda")
    words = "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", CARD
    done = python(*words, NUMBA_ENABLE_CUDASIM="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
