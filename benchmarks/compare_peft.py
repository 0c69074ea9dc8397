"""pyggml and PEFT side by side: each in a process of its own, in turns, medians over the rounds.

usage: compare_peft.py MODEL.gguf … --peft-python PATH/TO/python [--rounds 2] [--dtype f32]

The models should have the shape of Qwen3-0.6B (`make_model.py` writes one). PATH is an interpreter
that has torch, transformers and peft. Prints every run's JSON line, then a table of ratios.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent


def run(python: str, script: str, *arguments: str) -> dict[str, Any]:
    command = [python, str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = done.stdout.strip().splitlines()[-1]
    print(line, flush=True)
    return dict(json.loads(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--peft-python", required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", default="512")
    parser.add_argument("--dtype", default="f32")
    options = parser.parse_args()

    peft, ours = [], {m: [] for m in options.models}
    for _ in range(options.rounds):
        arguments = ("--dtype", options.dtype, "--tokens", options.tokens, "--steps", "2")
        peft.append(run(options.peft_python, "peft_step.py", *arguments))
        for model, results in ours.items():
            arguments = (model, "--tokens", options.tokens, "--steps", "3")
            results.append(run(sys.executable, "step.py", *arguments))
    theirs = median(r["tokens_per_second"] for r in peft)
    memory = max(r["peak_rss_gb"] for r in peft)
    print(f"\n{'':<28}{'tok/s':>8}{'ratio':>8}{'peak GB':>9}{'share':>8}")
    print(f"{'PEFT ' + options.dtype:<28}{theirs:>8.1f}{1:>8.2f}{memory:>9.2f}{1:>8.2f}")
    for model, results in ours.items():
        speed = median(r["tokens_per_second"] for r in results)
        rss = max(r["peak_rss_gb"] for r in results)
        name = Path(model).stem
        print(f"{name:<28}{speed:>8.1f}{speed / theirs:>8.2f}{rss:>9.2f}{rss / memory:>8.2f}")


if __name__ == "__main__":
    main()
