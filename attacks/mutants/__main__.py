"""Mutants: changes of one place in the sources, drawn by a seed. At least one test must fail.

python -m attacks.mutants --n 1000 --seed 0 --resume FILE

Each line that can be changed is as likely as any other. Which tests run a line is measured once and
kept in FILE.tests; a mutant's tests run until one fails, the quickest first. What was tried is in
FILE and is not tried again: a run that is ended goes on where it was. Nothing is written into the
checkout.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attacks.mutants.changes import ROOT, Mutant, draw
from attacks.mutants.fork import in_fork
from attacks.mutants.report import DEAD, Results, read_results, report
from attacks.mutants.table import Table
from attacks.mutants.tests import Plan
from attacks.mutants.trial import Collected, Trial

ROOMS = {
    "backward": "pyggml/backward",
    "alloc": "pyggml/alloc",
    "lora": "lora",
    "products": "pyggml/kernels/gemm",
}
OF_COMMANDS = (  # tests of commands that run more of `lora`, in this process
    *("chat_templates", "config_file", "convert_lora", "device", "eval", "help", "preferences"),
    "unused",
)
PLAN = Plan(
    folders=(
        *("tests/backward", "tests/alloc", "tests/lora", "tests/kernels/gemm"),
        "tests/ops/test_experts.py",
        *(f"tests/cli/test_{name}.py" for name in OF_COMMANDS),
    ),
    left_out=("tests/kernels/gemm/test_isa.py",),
)


def sources(folders: Iterable[str]) -> list[str]:
    """The files of these folders, named from the checkout's root."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def attempt(mutant: Mutant, table: Table, collected: Collected, seconds: float) -> dict[str, Any]:
    """How a mutant ends: killed, hung, crashed, survived, or unreached by any test."""
    tests = table.tests_of(mutant)
    compiles = "kernels" in mutant.file or "pyggml.jit" in (ROOT / mutant.file).read_text("utf-8")
    if not tests:
        return {"end": "unreached"}
    start = time.monotonic()
    trial = Trial(mutant, tests, 3 * seconds if compiles else seconds, compiles)
    ended = None if table.is_imported(mutant) else collected.do(trial)
    if ended is None or any("cannot" in told for told in ended.told):
        ended = in_fork(lambda tell: trial.run_anew(collected.plan, tell), trial.limit)
    told = {name: value for line in ended.told for name, value in line.items()}
    if told.get("end"):
        raise RuntimeError(f"{mutant}: {told['end']}")
    n_tried = sum("test" in line for line in ended.told)
    return {
        "end": ended.why or ("killed" if "failed" in told else "survived"),
        "by": told.get("failed") or told.get("test", ""),
        "tests": f"{n_tried} of {len(tests)}",
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> int:
    """The exit code: 1 if fewer than nine in ten of those tried died."""
    parser = argparse.ArgumentParser(prog="attacks.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("rooms", nargs="*", choices=[[], *ROOMS], help="parts; none: all")
    parser.add_argument("--n", type=int, default=100, help="mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--resume", type=Path, required=True, help="file of the results")
    parser.add_argument("--again", action="store_true", help="try those that survived once more")
    parser.add_argument("--seconds", type=float, default=30, help="tests of a mutant, at most")
    parser.add_argument("--report", action="store_true", help="print the figures, try nothing")
    given = parser.parse_args()
    files = sources(ROOMS[room] for room in given.rooms or ROOMS)
    drawn = draw(files, given.n, given.seed)
    results = read_results(given.resume, drawn, given.again and not given.report)
    if not given.report:
        try_all(drawn, results, given.resume, given.seconds, PLAN, sources(ROOMS.values()))
    print(report(drawn, results, ROOMS))
    n_dead = sum(row["end"] in DEAD for row in results.values())
    return int(n_dead < 0.9 * len(results))


def try_all(
    drawn: Iterable[Mutant],
    results: Results,
    path: Path,
    seconds: float,
    plan: Plan,
    files: Sequence[str],
) -> None:
    """Try what has no result, and append each to the file; files: those that are mutated."""
    table = Table(path.with_name(f"{path.name}.tests"), files)
    table.fill(plan)
    collected = Collected(plan)
    with path.open("a", encoding="utf-8") as out:
        for mutant in drawn:
            if mutant.name not in results:
                row = {"mutant": mutant.name, **attempt(mutant, table, collected, seconds)}
                results[mutant.name] = row
                out.write(json.dumps(row) + "\n")
                out.flush()
                print(f"{row['end']:9} {row.get('seconds', 0):6.1f} s {mutant}", flush=True)
    collected.end()


if __name__ == "__main__":
    sys.exit(main())
