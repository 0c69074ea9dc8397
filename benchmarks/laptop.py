"""What a large model takes on a small machine: the first token, the first step, memory.

usage: laptop.py MODEL.gguf TEXT [--ctx 512,2048] [--options=--grad-checkpointing] [--no-start]

Every command runs in a process of its own; nothing is written but a kernel cache, empty at first.
A JSON line for each:

start    seconds that `generate -n 1` takes, and a dry run's two steps at the first context, with no
         kernel compiled and with all
memory   at each context, without options and with them: the peak that `finetune --dry-run` plans,
         and what a run of two steps and its answers took: anonymous memory, pages of files, and
         both; tokens a second in the second step. Answers read the whole file, the plan is of
         training: with `--options="--max-memory 1TB"` they let go of weights as training does
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from machine import about

COMMAND = [sys.executable, "-P", "-m", "pyggml.cli"]  # -P: not the checkout that lies here
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


def run(
    arguments: list[str], cache: str, until: str | None = None
) -> tuple[float, dict[str, int], str]:
    """Seconds that a command takes, the peaks of /proc/PID/status in bytes, and what it prints.

    until: the command is ended once it has printed this.
    """
    environment = os.environ | {"XDG_CACHE_HOME": cache}
    began, peaks = time.perf_counter(), {"RssAnon": 0, "RssFile": 0, "VmRSS": 0}
    with TemporaryFile() as out:
        process = subprocess.Popen(
            [*COMMAND, *arguments], env=environment, stdout=out, stderr=subprocess.STDOUT
        )
        printed = ""
        while process.poll() is None and (until is None or until not in printed):
            note_peaks(process.pid, peaks)
            time.sleep(0.01)
            printed = os.pread(out.fileno(), 1 << 20, 0).decode(errors="replace")
        seconds = time.perf_counter() - began
        process.kill()
        printed = os.pread(out.fileno(), 1 << 20, 0).decode(errors="replace")
    if process.wait() and (until is None or until not in printed):
        raise SystemExit(f"{' '.join(arguments)}: {printed}")
    return seconds, peaks, printed


def note_peaks(pid: int, peaks: dict[str, int]) -> None:
    """Raise each peak to what a process has now; one that has just ended has nothing."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        lines = dict(line.split(":", 1) for line in status.splitlines())
        for key in peaks.keys() & lines.keys():
            peaks[key] = max(peaks[key], int(lines[key].split()[0]) * 1024)


def start(model: str, text: str, ctx: str, cache: str) -> dict[str, float]:
    generate = ["generate", "-m", model, "-p", "Once upon a time", "-n", "1", "--temp", "0"]
    steps = ["--dry-run", "--ctx", ctx, "--val-every", "0"]
    train = ["finetune", "-m", model, "-f", text, *steps]
    row = {}
    for kernels in ("compiled now", "compiled before"):
        row[f"first token, {kernels}"] = round(run(generate, cache)[0], 1)
    for kernels in ("compiled now", "compiled before"):
        row[f"two steps, {kernels}"] = round(run(train, cache)[0], 1)
    return row


def memory(model: str, text: str, ctx: str, options: list[str], cache: str) -> dict[str, Any]:
    settings = ["--max-steps", "2", "--val-split", "0", "--no-report", "-o", f"{cache}/a.gguf"]
    train = ["finetune", "-m", model, "-f", text, "--ctx", ctx, *settings, *options]
    *_, plan = run([*train, "--dry-run"], cache, until="which answers read")
    _, peaks, printed = run(train, cache)
    planned = re.search(r"peak +about ([\d.]+) (\w+) (?:.|\n)*files +and ([\d.]+) (\w+)", plan)
    speed = re.search(r"step 2/2 .*?([\d.]+) tokens/s", printed)
    assert planned is not None and speed is not None, printed
    own, files = (float(planned[i]) * UNITS[planned[i + 1]] / 1e9 for i in (1, 3))
    return {
        "ctx": int(ctx),
        "options": " ".join(options),
        "planned_gb": round(own, 3),
        "anonymous_gb": round(peaks["RssAnon"] / 1e9, 3),
        "planned_files_gb": round(files, 3),
        "files_gb": round(peaks["RssFile"] / 1e9, 3),
        "resident_gb": round(peaks["VmRSS"] / 1e9, 2),
        "tokens_per_second": float(speed[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--ctx", default="512,2048")
    parser.add_argument("--options", default="--grad-checkpointing")
    parser.add_argument("--no-start", action="store_true", help="memory alone")
    given = parser.parse_args()
    with TemporaryDirectory() as cache:
        sizes = given.ctx.split(",")
        if not given.no_start:
            row = start(given.model, given.text, sizes[0], cache)
            print(json.dumps({"row": "start", **row, **about("pyggml", "numba")}), flush=True)
        for ctx in sizes:
            for options in ([], given.options.split()):
                row = memory(given.model, given.text, ctx, options, cache)
                print(json.dumps({"row": "memory", **row, **about("pyggml")}), flush=True)


if __name__ == "__main__":
    main()
