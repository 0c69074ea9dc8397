"""pyggml and PEFT side by side: all loaded, then a step of each in turn, medians over the rounds.

usage: compare_peft.py MODEL.gguf … --peft-python PATH/TO/python [--rounds 5] [--dtype f32|bf16]
                       [--tokens 512] [--size 0.6B|1.7B|8B] [--compute auto|f32]

The models should have the shape that --size names (`make_model.py` writes one). PATH is an
interpreter that has torch, transformers and peft. Prints every process' JSON line, then a table of
ratios.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from turns import Runner

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--peft-python", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", default="512")
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--size", default="0.6B")
    parser.add_argument("--compute", default="auto")
    options = parser.parse_args()

    common = ("--tokens", options.tokens, "--steps", str(options.rounds))
    theirs = ("--dtype", options.dtype, "--size", options.size)
    runners = [Runner(options.peft_python, HERE / "peft_step.py", *theirs, *common)]
    for model in options.models:
        ours = (model, "--compute", options.compute)
        runners.append(Runner(sys.executable, HERE / "step.py", *ours, *common))
    for _ in range(options.rounds):
        lines = [runner.turn() for runner in runners]
    results: list[dict[str, Any]] = [json.loads(line) for line in lines]
    for line in lines:
        print(line, end="")
    first = results[0]
    print(f"\n{'':<28}{'tok/s':>8}{'ratio':>8}{'peak GB':>9}{'share':>8}")
    for result in results:
        name = result["model"] if result is not first else f"PEFT {options.dtype}"
        speed, rss = result["tokens_per_second"], result["peak_rss_gb"]
        ratio, share = speed / first["tokens_per_second"], rss / first["peak_rss_gb"]
        print(f"{name:<28}{speed:>8.1f}{ratio:>8.2f}{rss:>9.2f}{share:>8.2f}")


if __name__ == "__main__":
    main()
