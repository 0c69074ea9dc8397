"""How many threads this process may have: its cores, or what a container is granted of them."""

from functools import cache
from math import ceil

from numba.core import config

from pyggml import granted


@cache
def n_cores() -> int:
    """The cores that the process may run on, at most as many as its control group is granted the
    time of, and at most NUMBA_NUM_THREADS.

    Of more threads some would wait for a turn with a task begun, and the others for that task.
    """
    most = min(int(config.NUMBA_NUM_THREADS), int(config.NUMBA_DEFAULT_NUM_THREADS))
    return ceil(max(1, min(most, granted.cores())))
