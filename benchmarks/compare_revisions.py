"""Two revisions of pyggml side by side: a training step of each in turn, medians over the rounds.

usage: compare_revisions.py OLD_PYTHON OLD_CHECKOUT MODEL.gguf … [--rounds 9] [--tokens 512]
                            [--compute auto|int8|bf16|f32] [--prompt]

OLD_PYTHON is an interpreter in which the old checkout is installed (`pip install -e .`); the new
revision is the one that this script belongs to. With --prompt a prompt is read instead of a step
made, by this revision's script for both. Prints every process' JSON line, then a table of ratios:
seconds and peak memory, new to old.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from turns import Runner

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old_python")
    parser.add_argument("old_checkout", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", default="512")
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--prompt", action="store_true", help="read a prompt instead of a step")
    options = parser.parse_args()
    new_script = HERE / ("prompt.py" if options.prompt else "step.py")
    old_script = new_script if options.prompt else options.old_checkout / "benchmarks" / "step.py"

    common = ("--tokens", options.tokens, "--steps", str(options.rounds))
    print(f"{'model':<28}{'old s':>8}{'new s':>8}{'ratio':>8}{'memory':>8}")
    for model in options.models:
        ours = (model, "--compute", options.compute, *common)
        old = Runner(options.old_python, old_script, *ours)
        new = Runner(sys.executable, new_script, *ours)
        for _ in range(options.rounds):
            lines = old.turn(), new.turn()
        before, after = (json.loads(line) for line in lines)
        print(*lines, sep="", file=sys.stderr)
        seconds = [result["seconds"] for result in (before, after)]
        memory = after["peak_rss_gb"] / before["peak_rss_gb"]
        name = after["model"]
        ratio = seconds[1] / seconds[0]
        print(f"{name:<28}{seconds[0]:>8.3f}{seconds[1]:>8.3f}{ratio:>8.3f}{memory:>8.3f}")


if __name__ == "__main__":
    main()
