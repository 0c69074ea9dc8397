"""Memory refused: commands under a limit on their address space, from what starts to what suffices.

python -m attacks.starve --levels 60          each command under so many limits
python -m attacks.starve train

A command that gets too little memory must say so in a line, without a traceback, and leave its
output absent or whole; the same command without a limit must then make the very bytes that it makes
undisturbed. LLVM and OpenBLAS end the process themselves, with a line of their own.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import psutil

from attacks.kills import (
    COMMAND,
    SCENARIOS,
    Fresh,
    Scenario,
    Undisturbed,
    environment,
    faults,
    fresh,
    run_undisturbed,
    take,
    write_inputs,
)

_OF_LIBRARIES = (b"LLVM ERROR: out of memory", b"OpenBLAS error: Memory allocation")


def least() -> int:
    """The bytes with which the command line starts at all, to a MiB."""
    low, high = 1 << 20, 8 << 30
    while high - low > 1 << 20:
        middle = (low + high) // 2
        done = subprocess.run(
            [*COMMAND, "inspect", "--machine"],
            env=environment(), capture_output=True,
            preexec_fn=partial(take, {resource.RLIMIT_AS: middle}), check=False,
        )  # fmt: skip
        low, high = (low, middle) if done.returncode == 0 else (middle, high)
    return high


def most(scenario: Scenario, inputs: Path) -> int:
    """The most address space that the command takes."""
    peak = 0
    with fresh(inputs) as folder:
        process = Fresh(scenario, folder).process
        while process.poll() is None:
            try:
                peak = max(peak, psutil.Process(process.pid).memory_info().vms)
            except psutil.NoSuchProcess:
                break
            time.sleep(0.002)
        process.communicate()
    return peak


def attack(
    scenario: Scenario, inputs: Path, whole: Undisturbed, n_bytes: int
) -> tuple[str, list[str]]:
    """How the command ends under this limit, and what is wrong then."""
    with fresh(inputs) as folder:
        code, words = Fresh(scenario, folder, {resource.RLIMIT_AS: n_bytes}).end()
        by_library = any(line in words for line in _OF_LIBRARIES)
        wrong = faults(scenario, folder, words, whole)
    if code == 0:
        return "done", wrong
    if by_library:
        return "ended by a library", wrong
    says = code == 2 and b"emory" in words
    return "refused", wrong if says else [*wrong, f"{code}: {words[-400:]!r}"]


def attack_often(scenario: Scenario, inputs: Path, n_levels: int, low: int) -> int:
    """Run a command under n_levels limits, and print what came of it; the faults."""
    whole, high = run_undisturbed(scenario, inputs), most(scenario, inputs)
    n_faults, counts = 0, Counter[str]()
    for i in range(n_levels):
        n_bytes = low + (high + (32 << 20) - low) * i // max(n_levels - 1, 1)
        how, wrong = attack(scenario, inputs, whole, n_bytes)
        counts[how] += 1
        n_faults += len(wrong)
        for fault in wrong:
            print(f"{scenario.name} with {n_bytes >> 20} MiB: {fault}", flush=True)
    ends = ", ".join(f"{n} {how}" for how, n in counts.items())
    sizes = f"{low >> 20} to {high >> 20} MiB"
    print(f"{scenario.name:9} {n_levels} limits, {sizes} ({ends}): {n_faults} faults", flush=True)
    return n_faults


def main() -> int:
    """The exit code: 1 if a fault was met."""
    parser = argparse.ArgumentParser(prog="attacks.starve", description=__doc__.partition("\n")[0])
    names = [s.name for s in SCENARIOS]
    parser.add_argument("scenarios", nargs="*", choices=[[], *names], help="commands; none: all")
    parser.add_argument("--levels", type=int, default=20, help="limits of each command")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        write_inputs(inputs := Path(made))
        low, n_faults = least(), 0
        for scenario in SCENARIOS:
            if scenario.name in (given.scenarios or names):
                n_faults += attack_often(scenario, inputs, given.levels, low)
    return int(n_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
