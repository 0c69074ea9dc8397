"""What became of mutants: the file of results, and the figures."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attacks.mutants.changes import Mutant

DEAD = ("killed", "hung", "crashed")
Results = dict[str, dict[str, Any]]  # the mutant's name -> how it ended


def read_results(path: Path, drawn: Iterable[Mutant], again: bool) -> Results:
    """Those of the mutants drawn; without survivors if they are tried again."""
    names = {m.name for m in drawn}
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    rows = {row["mutant"]: row for row in map(json.loads, lines)}
    if others := rows.keys() - names:
        print(f"{len(others)} results are of other sources or another draw, and do not count")
    dead = {name for name, row in rows.items() if row["end"] in DEAD}
    return {name: row for name, row in rows.items() if name in (dead if again else names) & names}


def report(drawn: Iterable[Mutant], results: Results, rooms: Mapping[str, str]) -> str:
    """The figures of each room, which has a folder, then every survivor."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    left = []
    for mutant in drawn:
        row = results.get(mutant.name, {"end": "not tried"})
        room = next(name for name, folder in rooms.items() if mutant.file.startswith(f"{folder}/"))
        counts[room][row["end"]] += 1
        counts["all"][row["end"]] += 1
        if row["end"] in ("survived", "unreached"):
            left.append(f"{row['end']} ({row.get('tests', 'no test')}) {mutant}")
    lines = []
    for room in (*rooms, "all"):
        c = counts[room]
        n_dead, n = sum(c[end] for end in DEAD), c.total() - c["not tried"]
        ends = ", ".join(f"{c[end]} {end}" for end in (*DEAD, "survived", "unreached") if c[end])
        share = f"{100 * n_dead / n:.1f} % died" if n else "none died"
        lines.append(f"{room:9} {c.total()} drawn, {n} tried: {share} ({ends})")
    return "\n".join([*lines, *sorted(left)])
