"""How many threads this process may have: its cores, or what a container is granted of them."""

import os
from functools import cache
from math import ceil

from numba.core import config

from pyggml import granted


@cache
def n_cores() -> int:
    """NUMBA_NUM_THREADS; or the cores that the process may run on, at most as many as its control
    group is granted the time of."""
    most = int(config.NUMBA_NUM_THREADS)
    if "NUMBA_NUM_THREADS" in os.environ:
        return most
    return ceil(max(1, min(most, granted.cores())))
