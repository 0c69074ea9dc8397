"""Mutants: one change at a place of the sources, and whether a test fails by it."""

import os

os.environ.setdefault("NUMBA_BOUNDSCHECK", "1")  # before anything imports numba, as under pytest
