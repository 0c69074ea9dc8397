"""Tensors, with those that only differ in their block as one row: blk.0..27 attn_q.weight Q4_K."""

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from math import prod
from typing import Any

from pyggml.gguf import TensorInfo

_BLOCK = re.compile(r"((?:\w+\.)*?blk)\.([0-9]{1,9})\.(.+)", re.DOTALL)


def fold(tensors: Mapping[str, TensorInfo]) -> list[dict[str, Any]]:
    """Rows of equal tensors, in the file's order of names; the most common type of each first.

    name     with * for the number of the block
    blocks   "0..27", "0, 3, 9..12"; "" outside of blocks
    among    all blocks that have a tensor of this name, of any type and shape
    n, type, shape (outermost axis first), n_parameters, n_bytes (of all of them)
    """
    rows: dict[tuple[str, str, tuple[int, ...]], list[tuple[int, TensorInfo]]] = {}
    for t in tensors.values():
        inside = _BLOCK.fullmatch(t.name)
        name = f"{inside[1]}.*.{inside[3]}" if inside else t.name
        number = int(inside[2]) if inside else -1
        rows.setdefault((name, t.dtype.name, t.shape), []).append((number, t))
    among: dict[str, list[int]] = {}
    for (name, *_), members in rows.items():
        among.setdefault(name, []).extend(number for number, _ in members)
    first = {name: i for i, (name, *_) in reversed(list(enumerate(rows)))}
    keys = sorted(rows, key=lambda key: (first[key[0]], -len(rows[key])))
    return [_row(*key, rows[key], among[key[0]]) for key in keys]


def _row(
    name: str,
    kind: str,
    shape: tuple[int, ...],
    members: list[tuple[int, TensorInfo]],
    among: list[int],
) -> dict[str, Any]:
    return {
        "name": name,
        "blocks": ranges(number for number, _ in members if number >= 0),
        "among": ranges(number for number in among if number >= 0),
        "n": len(members),
        "type": kind,
        "shape": list(shape),
        "n_parameters": len(members) * prod(shape),
        "n_bytes": sum(t.n_bytes for _, t in members),
    }


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> "0..2, 5"."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ends = [(members[0][1], members[-1][1]) for _, group in runs if (members := list(group))]
    return ", ".join(f"{a}..{b}" if b > a else str(a) for a, b in ends)
