"""What a result was measured on, as fields of its JSON line."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any


def about(*packages: str) -> dict[str, Any]:
    """Processor, cores, commit and versions."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": _commit(),
        "versions": {name: _version(name) for name in packages},
    }


def peak_rss_gb() -> float:
    """The most memory this process has had resident, in GB (Linux counts KiB, macOS bytes)."""
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def median_seconds(step: Callable[[], None], n_steps: int, in_turns: bool) -> float:
    """Median seconds of n_steps steps; a first one, which may compile, is not counted.

    in_turns: say when ready and wait for a line before each step, so that two processes that are
    compared take turns and a machine that grows slow is slow for both.
    """
    step()
    seconds = []
    for _ in range(n_steps):
        if in_turns:
            print("ready", flush=True)
            sys.stdin.readline()
        began = perf_counter()
        step()
        seconds.append(perf_counter() - began)
    return median(seconds)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    here = Path(__file__).parent
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
