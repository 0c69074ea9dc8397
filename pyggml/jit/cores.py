"""How many threads this process may have: its cores, or what a container is granted of them."""

import os
from functools import cache
from math import ceil
from pathlib import Path

from numba.core import config

_GROUPS, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@cache
def n_cores() -> int:
    """NUMBA_NUM_THREADS; or the cores that the process may run on, at most as many as its control
    group is granted the time of."""
    most = int(config.NUMBA_NUM_THREADS)
    if "NUMBA_NUM_THREADS" in os.environ:
        return most
    return ceil(max(1, min(most, _quota())))


def _quota() -> float:
    """The cores' worth of time that Linux grants this process, inf where nothing limits it."""
    granted = [float("inf")]
    try:
        own = _OWN_GROUP.read_text().rpartition("::")[2].strip("\n/")
    except OSError:  # not Linux
        return granted[0]
    for group in (_GROUPS / own, *(_GROUPS / own).parents):
        try:
            quota, period = (group / "cpu.max").read_text().split()
            granted.append(int(quota) / int(period))
        except (OSError, ValueError):  # no group of this kind; "max", no limit
            continue
    return min(granted)
