"""The orders of a module's rows and columns in a GGUF file, and factors of its rows.

llama.cpp's converter reorders weights; a low-rank update s·BA follows with the rows of B and the
columns of A.

Source: llama.cpp, conversion/*.py (`modify_tensors`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """Heads of a layer's attention, and of its delta net: keys, values and their size; the number
    of the layer, and after how many layers RWKV halves what it adds to."""

    n: int
    n_kv: int
    n_keys: int = 0
    n_values: int = 0
    size: int = 0
    layer: int = 0
    rescale_every: int = 0


# A module's rows (or columns), numbered, → those of each of its tensors.
Order = Callable[[np.ndarray, HeadCounts], list[np.ndarray]]
# Likewise, → what each row of the tensor is multiplied by. Powers of two: nothing is rounded.
Factor = Callable[[np.ndarray, HeadCounts], np.ndarray]


def _pairs(rows: np.ndarray, n_head: int) -> np.ndarray:
    """Rotary pairs (i, i + d/2) of each head → (2i, 2i + 1)."""
    return rows.reshape(n_head, 2, -1).swapaxes(1, 2).ravel()


def q_pairs(rows: np.ndarray, heads: HeadCounts) -> list[np.ndarray]:
    return [_pairs(rows, heads.n)]


def k_pairs(rows: np.ndarray, heads: HeadCounts) -> list[np.ndarray]:
    return [_pairs(rows, heads.n_kv)]


def groups(rows: np.ndarray, heads: HeadCounts) -> list[np.ndarray]:
    """Groups of the queries of a key, the key and its value → q, k, v."""
    n_q = heads.n // heads.n_kv
    by_key = rows.reshape(heads.n_kv, n_q + 2, -1)
    return [part.ravel() for part in (by_key[:, :n_q], by_key[:, n_q], by_key[:, n_q + 1])]


def joined_groups(rows: np.ndarray, heads: HeadCounts) -> list[np.ndarray]:
    return [np.concatenate(groups(rows, heads))]


def paired_groups(rows: np.ndarray, heads: HeadCounts) -> list[np.ndarray]:
    q, k, v = groups(rows, heads)
    return [_pairs(q, heads.n), _pairs(k, heads.n_kv), v]


def halves(rows: np.ndarray, heads: HeadCounts) -> list[np.ndarray]:
    return np.split(rows, 2)


def turns(rows: np.ndarray, heads: HeadCounts) -> list[np.ndarray]:
    return [rows[::2], rows[1::2]]


def values_apart(rows: np.ndarray, heads: HeadCounts) -> list[np.ndarray]:
    """Value heads of the same key, which lie together, as far apart as there are keys."""
    return [rows.reshape(heads.n_keys, heads.n_values // heads.n_keys, -1).swapaxes(0, 1).ravel()]


def qk_and_values_apart(rows: np.ndarray, heads: HeadCounts) -> list[np.ndarray]:
    n = 2 * heads.n_keys * heads.size
    return [np.concatenate([rows[:n], *values_apart(rows[n:], heads)])]


def keys_together(rows: np.ndarray, heads: HeadCounts) -> list[np.ndarray]:
    """q, k, v and z by keys → all q, k and v; all z."""
    wide = heads.n_values // heads.n_keys * heads.size
    at = np.cumsum([heads.size, heads.size, wide])
    q, k, v, z = (part.ravel() for part in np.split(rows.reshape(heads.n_keys, -1), at, 1))
    return [np.concatenate([q, k, v]), z]


def queries_by_group(rows: np.ndarray, heads: HeadCounts) -> list[np.ndarray]:
    """Queries that take keys by turns → all of the first key, all of the second and so on."""
    return [rows.reshape(heads.n // heads.n_kv, heads.n_kv, -1).swapaxes(0, 1).ravel()]


def pairs_and_values(rows: np.ndarray, heads: HeadCounts) -> list[np.ndarray]:
    """All q, all k, all v, with rotary pairs moved."""
    size = len(rows) // (heads.n + 2 * heads.n_kv)
    q, k, v = np.split(rows, np.cumsum([size * heads.n, size * heads.n_kv]))
    return [_pairs(q, heads.n), _pairs(k, heads.n_kv), v]


def _second_half_negated(n_rows: int, n_head: int) -> np.ndarray:
    signs = np.ones((n_head, 2, n_rows // n_head // 2), np.float32)
    signs[:, 1] = -1
    return signs.ravel()


def negated_q(rows: np.ndarray, heads: HeadCounts) -> np.ndarray:
    """Rotated the other way: the second halves of heads change sign."""
    return _second_half_negated(len(rows), heads.n)


def negated_k(rows: np.ndarray, heads: HeadCounts) -> np.ndarray:
    """The same for keys."""
    return _second_half_negated(len(rows), heads.n_kv)


def halves_by_layer(rows: np.ndarray, heads: HeadCounts) -> np.ndarray:
    """Halved once more after every few layers, as what they are added to is."""
    halved = heads.layer // heads.rescale_every if heads.rescale_every else 0
    return np.full(len(rows), 0.5**halved, np.float32)
