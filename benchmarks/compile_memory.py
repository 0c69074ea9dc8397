"""What a first run takes of memory for compiling: its peak with no kernel compiled, and with all.

usage: compile_memory.py MODEL.gguf TEXT [OPTION …]

Runs `pyggml finetune` for two steps, twice, in processes of their own. Their kernel cache is empty
at first, and no second process compiles ahead (`--max-memory`). Prints a JSON line: the most
resident memory of both runs in MB, and the difference, which is what compiling takes.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from machine import about

COMMAND = [sys.executable, "-P", "-m", "pyggml.cli", "finetune"]  # -P: not the checkout here
SETTINGS = ["--max-steps", "2", "--val-every", "0", "--max-memory", "1TB", "--no-report"]


def peak_mb(arguments: list[str], folder: str) -> float:
    """The most resident memory of a run."""
    environment = os.environ | {"XDG_CACHE_HOME": folder, "LOCALAPPDATA": folder}
    output = str(Path(folder, "adapter.gguf"))
    command = [*COMMAND, *arguments, *SETTINGS, "-o", output]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    unit = 1 if platform.system() == "Darwin" else 1024
    return used.ru_maxrss * unit / 1e6


def main() -> None:
    model, text, *options = sys.argv[1:]
    arguments = ["-m", model, "-f", text, *options]
    with TemporaryDirectory() as folder:
        first, again = (peak_mb(arguments, folder) for _ in range(2))
    result = {
        "benchmark": "compile_memory",
        "model": model.rsplit("/", 1)[-1],
        "options": options,
        "first_mb": round(first, 1),
        "again_mb": round(again, 1),
        "compiling_mb": round(first - again, 1),
        **about("pyggml", "numba", "llvmlite"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
