"""Kernels under test check their array bounds; Hypothesis has no deadline, as kernels compile."""

import os

os.environ.setdefault("NUMBA_BOUNDSCHECK", "1")  # before anything imports numba

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

GRADIENTS = pytest.StashKey[Counter]()


def pytest_configure(config):
    config.stash[GRADIENTS] = Counter()


@pytest.fixture
def gradients(request):
    """Op name -> how many of its gradients were compared with a slope in this session."""
    return request.config.stash[GRADIENTS]


def pytest_terminal_summary(terminalreporter, config):
    found = config.stash[GRADIENTS]
    if found:
        terminalreporter.write_line(f"gradients compared: {found.total()} over {len(found)} ops")


@pytest.fixture(scope="session")
def shared():
    """The folder of models, vocabularies and golden values that lies beside a checkout."""
    folder = Path(__file__).parents[1] / "../shared"
    if not folder.is_dir():
        pytest.skip("../shared (models, vocabularies, golden values) is not there")
    return folder


@pytest.fixture
def rng():
    """The same numbers in every run."""
    import numpy as np

    return np.random.default_rng(0)
