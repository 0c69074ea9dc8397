"""What healing gives back: a table of perplexities and divergences, by type and by what is trained.

usage: healing.py ORIGINAL.gguf TEXT HELD_OUT [--types Q2_K,IQ2_XS] [--what adapter,scales,full]
       [--steps 120] [--folder FOLDER]

The original is packed as each type (IQ2 and IQ1 by an importance matrix of TEXT), and `pyggml heal`
trains an adapter for it, then its scales, then all weights (not of IQ types: that has no matrix) on
TEXT; HELD_OUT, which nothing trains on, is measured.
What a folder has already is not made again; a run that was stopped goes on. Prints Markdown.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

WHAT = ("adapter", "scales", "full")  # of `pyggml heal --train`
SETTINGS = "--batch 2 --ctx 256 --val-every 0 --val-windows 1000 --no-report --checkpoint-every 20"
HEAD = "| type | | perplexity | KL from the original | of the gap closed |\n|---|---|---|---|---|"


def pyggml(*words: object) -> str:
    command = [sys.executable, "-m", "pyggml", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def pack(original: Path, text: Path, kind: str, folder: Path) -> Path:
    """The original as this type."""
    packed, importance = folder / f"{kind}.gguf", folder / "importance.gguf"
    if packed.exists():
        return packed
    given: list[object] = []
    if kind.startswith("IQ"):
        if not importance.exists():
            pyggml("imatrix", "-m", original, "-f", text, "-o", importance, "--chunks", 60)
        given = ["--imatrix", importance]
    pyggml("quantize", original, packed, kind, "--allow-requantize", *given)
    return packed


def heal(options: argparse.Namespace, packed: Path, what: str) -> str:
    """What the command printed of its run, at the end of which the measures are."""
    stem = options.folder / f"{packed.stem}-{what}"
    said = stem.with_suffix(".txt")
    if not said.exists():
        files = ["--from", options.original, "-m", packed, "-f", options.text]
        files += ["--val-file", options.held_out, "-o", stem.with_suffix(".gguf"), "--force"]
        run = ["--max-steps", options.steps, "--checkpoint-dir", stem, "--resume", "auto"]
        train = [] if what == "adapter" else ["--train", what]
        text = pyggml("heal", *files, *SETTINGS.split(), *run, *train)
        said.write_text(text, "utf-8")
    return said.read_text("utf-8").rpartition("held out")[2]


def lines_of(kind: str, by_what: dict[str, str]) -> Iterator[str]:
    """The rows of a type: those of original and packed model once."""
    for i, (what, text) in enumerate(by_what.items()):
        found = {line.split()[0]: line for line in text.splitlines()[1:] if line.strip()}
        gap = re.search(r"-?\d+ % \[[^]]*\]", found["gap"])
        closed = {"healed": gap[0] if gap else "no gap"}
        for name in ("original", "quantised", "healed") if not i else ("healed",):
            figures = re.findall(r"\d+\.\d+ \[[^]]*\]", found[name])
            called = {"healed": f"healed, {what.replace('full', 'all weights')}"}.get(name, name)
            cells = [kind, called, *figures, *[""] * (2 - len(figures)), closed.get(name, "")]
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("original", "text", "held_out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--types", default="Q2_K,IQ2_XS")
    parser.add_argument("--what", default=",".join(WHAT))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--folder", type=Path, default=Path("healing"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print(HEAD)
    for kind in options.types.split(","):
        packed = pack(options.original, options.text, kind, options.folder)
        rows = [w for w in options.what.split(",") if w != "full" or not kind.startswith("IQ")]
        by_what = {what: heal(options, packed, what) for what in rows}
        print("\n".join(lines_of(kind, by_what)), flush=True)


if __name__ == "__main__":
    main()
