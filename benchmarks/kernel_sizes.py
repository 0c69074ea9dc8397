"""How much machine code each launch of a generated token has on an NVIDIA card. Needs no card.

usage: kernel_sizes.py MODEL.gguf [--past 511] [--capability 9.0]

A launch of generation runs for a few microseconds, and the less code it has, the faster it is
(docs/cards.md). The kernels are compiled for the compute capability, by the compilers that come
with pyggml[cuda]. One JSON line for each kernel: the ops that it computes, its launches in a token,
bytes of code (ptxas also places rare branches there), registers, and bytes that it spills.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import pyggml
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.launches import launches
from pyggml.generation import Session

from machine import about

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from dry_card import DryCard


class NotingCard(DryCard):
    """Keeps the calls of the last program that was bound."""

    def join(self, calls):
        self.calls = calls
        return []


def calls_of_a_token(path: str, past: int) -> list[Any]:
    card = NotingCard()
    session = Session(pyggml.load(path, compute="bf16", backends=[card]), past + 1)
    session.feed([0])
    return card.calls


def kernels(path: str, past: int) -> Iterator[tuple[str, int, Any, Any]]:
    """The ops, launches, kernel and argument types of each."""
    from numba.cuda import types
    from numba.cuda.typing.typeof import typeof

    counts = Counter[tuple[str, Any, Any]]()
    for call in calls_of_a_token(path, past):
        name = call.site.node.op.name
        for kernel, arguments in launches(call):
            counts[name, kernel, types.void(*map(typeof, arguments))] += 1
    for (name, kernel, signature), n in counts.items():
        yield name, n, kernel, signature


def assembler() -> str:
    from cuda.pathfinder import find_nvidia_binary_utility

    program = find_nvidia_binary_utility("ptxas")
    if program is None:
        sys.exit("ptxas is not found, wanted pip install 'pyggml[cuda]'")
    return program


def stand_in(capability: tuple[int, int]) -> None:
    """Let Numba compile device functions for a card of this capability where there is none."""
    from numba.cuda import dispatcher

    dispatcher.get_current_device = type("Card", (), {"compute_capability": capability})


def code_of(kernel: Any, signature: Any, capability: tuple[int, int]) -> dict[str, int]:
    ptx, _ = cuda.compile(
        kernel.py_func, signature, device=False, abi="numba", cc=capability,
        launch_bounds=kernel.targetoptions.get("launch_bounds"),  # which bound its registers
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        arch = f"sm_{capability[0]}{capability[1]}"
        command = [assembler(), "-v", "-arch", arch, source, "-o", made]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        n_bytes = text_bytes(made.read_bytes())
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    return {
        "code_bytes": n_bytes,
        "registers": int(registers[1]) if registers else 0,
        "spilled_bytes": int(spilled[1]) if spilled else 0,
    }


def text_bytes(cubin: bytes) -> int:
    """The bytes of the sections of an ELF file whose names begin with .text."""
    header = np.frombuffer(cubin, "<u8", 1, 0x28)[0]
    size, n, names = np.frombuffer(cubin, "<u2", 3, 0x3A)
    sections = [cubin[header + i * size :][:size] for i in range(int(n))]

    def field(section: bytes, at: int, kind: str) -> int:
        return int(np.frombuffer(section, kind, 1, at)[0])

    strings = field(sections[names], 0x18, "<u8")
    return sum(
        field(section, 0x20, "<u8")
        for section in sections
        if cubin[strings + field(section, 0, "<u4") :].startswith(b".text")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--past", type=int, default=511)
    parser.add_argument("--capability", default="9.0")
    options = parser.parse_args()
    major, minor = map(int, options.capability.split("."))
    stand_in((major, minor))
    facts = about("pyggml", "numba-cuda")
    for name, n, kernel, signature in kernels(options.model, options.past):
        line = {"benchmark": "kernel sizes", "ops": name, "launches": n}
        print(json.dumps(line | code_of(kernel, signature, (major, minor)) | facts), flush=True)


if __name__ == "__main__":
    main()
