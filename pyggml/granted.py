"""What of the machine this process may have: memory, and time of its cores. A container has less.

Linux limits a group of processes, and the groups that it is in: of both versions of its control
groups the files are read that a container sees.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def total_memory() -> int:
    """Bytes of memory."""
    return min([int(psutil.virtual_memory().total), *(most for _, most in _limits())])


def free_memory() -> int:
    """Bytes that programs can have, those of files that are kept to be read again among them."""
    free = [int(psutil.virtual_memory().available)]
    for group, most in _limits():
        with suppress(OSError, ValueError, KeyError):
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = _first_number(group, "memory.current", "memory.usage_in_bytes")
            files = int(stat.get("total_inactive_file") or stat["inactive_file"])
            free.append(max(0, most - max(0, used - files)))
    return min(free)


def cores() -> float:
    """The cores' worth of time, inf where nothing limits it."""
    granted = [float("inf")]
    for group in _groups("cpu"):
        with suppress(OSError, ValueError):  # "max", no limit; -1 likewise
            quota, period = (group / "cpu.max").read_text().split()
            granted.append(int(quota) / int(period))
        with suppress(OSError, ValueError):
            quota, period = (
                (group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
            )
            granted += [int(quota) / int(period)] if int(quota) > 0 else []
    return min(granted)


def _limits() -> Iterator[tuple[Path, int]]:
    """The groups that have one, and their most bytes."""
    for group in _groups("memory"):
        with suppress(OSError, ValueError):
            yield group, _first_number(group, "memory.max", "memory.limit_in_bytes")


def _first_number(group: Path, *names: str) -> int:
    """Of the first of these files that there is. OSError for none, ValueError for no number."""
    path = next((group / name for name in names if (group / name).exists()), group / names[-1])
    return int(path.read_text())


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's groups, each with those that it is in."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for _, controllers, own in (line.split(":", 2) for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        root = _GROUPS / controller if controllers else _GROUPS
        group = root / own.strip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))
