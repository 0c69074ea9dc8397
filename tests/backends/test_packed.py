"""Words of packed weights: a lane of the card's products multiplies what the CPU unpacks."""

import numpy as np
import pytest
from extras import reason

from pyggml.quants import QUANTS, dequantize

pytest.importorskip("numba_cuda", reason=reason("numba_cuda"))

from pyggml.backends.cuda.code.byte_ptx import EXCESS
from pyggml.backends.cuda.gemm import packed_tile
from pyggml.backends.cuda.gemm.packed_dots import source_of
from pyggml.backends.cuda.weights import readers
from pyggml.backends.cuda.weights.packed import grid_words_of, unit_of

NAMES = [name for name, quant in QUANTS.items() if quant.dtype.quantised]
F_AT = 4096  # where factors of A begin in the memory of the test
GRIDS_AT = 1 << 14


def number_at(memory, at, n):
    assert at % n == 0, f"{n} bytes are read at {at}"
    return word_of(memory[at : at + n])


def words_at(n):
    return lambda memory, at: tuple(number_at(memory[at:], 4 * i, 4) for i in range(n))


def bytes_of(*words):
    return b"".join((int(word) & 0xFFFFFFFF).to_bytes(4, "little") for word in words)


def word_of(raw):
    return np.uint32(int.from_bytes(bytes(raw), "little"))


def pick_bytes(low, high, which):
    both = bytes_of(low, high)
    return word_of(both[int(which) >> 4 * i & 7] for i in range(4))


def dot_bytes(a, b, c):
    pairs = zip(*(np.frombuffer(bytes_of(w), np.int8).tolist() for w in (a, b)), strict=True)
    return np.int32(int(c) + sum(x * y for x, y in pairs))


def look_up(indices, *words):
    return word_of(bytes_of(*words)[i] for i in bytes_of(indices))


def even_signs(seven, first):
    bits = [int(seven) >> i & 1 for i in range(7)]
    return word_of(255 * bit for bit in [*bits, sum(bits) % 2][int(first) :][:4])


def negate_bytes(word, where):
    pairs = zip(bytes_of(word), bytes_of(where), strict=True)
    return word_of((-x if negative else x) & 255 for x, negative in pairs)


def digits_of(word, power):
    return word_of(3 * (x * int(power) % 256) // 256 for x in bytes_of(word))


KNOWN = {
    "np": np,
    "ZERO": np.float32(0),
    "shared_word": lambda memory, at: number_at(memory, at, 4),
    "shared_pair": words_at(2),
    "shared_words": words_at(4),
    "pick_bytes": pick_bytes,
    "dot_bytes": dot_bytes,
    "look_up": look_up,
    "digits_of": digits_of,
    "even_signs": even_signs,
    "mask_of": lambda four: word_of((int(four) >> i & 1) * 255 for i in range(4)),
    "negate_bytes": negate_bytes,
    "negate_no_zeros": negate_bytes,
    "spread_pairs": lambda byte: word_of(int(byte) >> 2 * i & 3 for i in range(4)),
    "half_of": lambda word: np.uint16(int(word) & 0xFFFF).view(np.float16).astype("f4"),
    "half_e8m0": lambda e: np.ldexp(np.float32(1), int(e) - 128),
    "as_float": lambda word: np.uint32(int(word)).view(np.float32),
}


def in_digits(x):
    """The digits and the factors of rows of groups of 32 numbers, as bytes: see digits.py, with the
    sums of halves."""
    step = abs(x).max(-1, keepdims=True) / 32639
    whole = np.rint(x / step).astype(int)
    low = (whole + 128) % 256 - 128
    high = (whole - low) // 256
    both = np.stack([high, low], -2).reshape(*x.shape[:-1], 2, 2, 4, 4).astype(np.int8)
    lanes = np.moveaxis(both, (-4, -3, -2), (-2, -3, -4))  # (…, q, half, digit, four)
    halves = whole.reshape(*x.shape[:-1], 2, 16).sum(-1)
    factors = np.concatenate([step, x.sum(-1, keepdims=True), halves], -1).astype("f4")
    return lanes.tobytes(), factors.tobytes()


@pytest.mark.parametrize(
    ("name", "k"), [(n, k) for n in NAMES for k in (32, 64, 128, 256) if unit_of(n, k)]
)
def test_a_unit_times_rows_of_a_is_what_the_cpu_unpacks_times_them(name, k):
    unit = unit_of(name, k)
    rng = np.random.default_rng(7)
    raw = rng.integers(0, 64, unit.n_bytes, np.uint8)  # scales stay far from infinity
    x = rng.standard_normal((2, unit.n_groups, 32))
    digits, factors = in_digits(x)
    at = (1 << 13) + 16 * unit.n_bytes + (unit.n_bytes & 2)  # its place, also in mid-word
    grids = grid_words_of(unit).view(np.uint8)
    memory = np.zeros(GRIDS_AT + grids.size, np.uint8)
    memory[GRIDS_AT:] = grids
    memory[at : at + unit.n_bytes] = raw
    memory[: len(digits)] = np.frombuffer(digits, np.uint8)
    memory[F_AT : F_AT + len(factors)] = np.frombuffer(factors, np.uint8)
    known = dict(KNOWN)
    exec(source_of(unit, 2, True), known)
    steps = 64 * unit.n_groups, 16 * unit.n_groups
    with np.errstate(all="ignore"):
        sums = known["multiply_unit"](memory, at, GRIDS_AT, 0, F_AT, *steps)
    weights = dequantize(raw, name).astype(float)
    largest = abs(weights).sum() * abs(x).max()
    np.testing.assert_allclose(sums, x.reshape(2, -1) @ weights, atol=1e-4 * largest)


@pytest.mark.parametrize("name", NAMES)
def test_the_groups_of_a_unit_are_what_the_cpu_unpacks(name):
    unit, found = unit_of(name, 256), []

    def multiply(_memory, x, _apart, words, factors, _sums):
        for n, word in enumerate(words):
            q = np.frombuffer(bytes_of(word), np.int8) + (
                0 if packed_tile.is_exact(unit) else EXCESS
            )
            found.extend(q * factors[n // 4] + factors[2 + n // 4])

    raw = np.random.default_rng(8).integers(0, 64, unit.n_bytes, np.uint8)
    at, grids = 16 + (unit.n_bytes & 2), grid_words_of(unit).view(np.uint8)
    memory = np.zeros(GRIDS_AT + grids.size, np.uint8)
    memory[GRIDS_AT:], memory[at : at + unit.n_bytes] = grids, raw
    known = {**KNOWN, "EXCESS": np.float32(EXCESS), "multiply": multiply}
    for i in range(8):
        exec(packed_tile.source_of(unit, i), known)
        known["add"](memory, at, GRIDS_AT, 0, 0, ())
    wanted = dequantize(raw, name)
    np.testing.assert_allclose(found, wanted, atol=1e-3 * abs(wanted).max())


@pytest.mark.parametrize("name", ["IQ1_M", "IQ2_XXS", "IQ3_S"])
def test_a_function_names_a_table_once(name):
    """Each mention of a constant array is a copy of it, and a card has 64 KiB for all."""
    source = readers.source_of(QUANTS[name].decode, 4)
    assert source.tables
    assert all(source.text.count(f"table{i}") == 1 for i in range(len(source.tables)))
