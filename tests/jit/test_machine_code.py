"""What is compiled for ARM processors and x86 without AVX-512, on any machine: which instruction
set each has, that its instructions are in the code, and, on ARM, how many of them a type takes."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
from processes import python

from pyggml.quants.registry import QUANTS

CODE = Path(__file__).parents[1] / "support" / "machine_code.py"
# Their rows are read from tables one by one: eight to sixteen loads, each of an index that is taken
# out of a vector, for 32 weights.
TABLES = {"IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"}


BYTES, PAIRS = (
    ("one row", "several", "tile of bytes"),
    ("tile of pairs", "tile of attention", "rounding"),
)
FEW_BITS = "tile of few bits", "tile of few bits back"
COUNTED = "unpack", "one row", "one row in float32"
TWO, NONE = "Q8_0,Q4_0", (("none",), "none")
# A processor and its set → the kernels and the weight types that the tests look at: one process.
ASKED = {
    ("neoverse-n1", "auto"): (COUNTED, "all"),
    ("cortex-a72", "neon"): (BYTES, TWO),
    ("neoverse-n1", "neondot"): (BYTES, TWO),
    ("neoverse-v1", "neoni8mm"): (BYTES + PAIRS, TWO),
    ("neoverse-v1", "neonbf16"): (BYTES + PAIRS, TWO),
    ("alderlake", "auto"): ((*BYTES, "four rows"), TWO),
    ("haswell", "auto"): ((*BYTES, *FEW_BITS, "four rows"), TWO),
}


@cache
def code(cpu, isa="auto"):
    kernels, weights = ASKED.get((cpu, isa), NONE)
    ended = python(CODE, cpu, isa, ",".join(kernels), weights)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


def instructions(loop):
    return {line.split()[0] for line in loop}


@pytest.mark.parametrize(
    ("cpu", "isa", "auto"),
    [
        ("generic", "neon", "f32"),
        ("cortex-a72", "neon", "f32"),
        ("neoverse-n1", "neondot", "int8"),
        ("apple-m1", "neondot", "int8"),
        ("apple-m2", "neoni8mm", "int8"),
        ("neoverse-v1", "neoni8mm", "int8"),
        ("haswell", "avx2", "int8"),
        ("alderlake", "avxvnni", "int8"),
    ],
)
def test_each_processor_has_its_instruction_set(cpu, isa, auto):
    kernels = code(cpu)
    assert (kernels["isa"], kernels["auto"]) == (isa, auto)


ISA_OF = {
    "neon": "cortex-a72", "neondot": "neoverse-n1", "neoni8mm": "neoverse-v1",
    "neonbf16": "neoverse-v1",
}  # fmt: skip
# Of the signed bytes of Q8_0, and of the unsigned ones of Q4_0.
SIGNED = {"neon": "smull", "neondot": "sdot", "neoni8mm": "sdot", "neonbf16": "sdot"}
UNSIGNED = SIGNED | {"neoni8mm": "usdot", "neonbf16": "usdot"}
TILES = SIGNED | {"neoni8mm": "smmla", "neonbf16": "smmla"}
DOTS = {"sdot", "usdot", "smmla", "bfdot", "bfmmla", "bfcvtn"}


@pytest.mark.parametrize("isa", ISA_OF)
def test_bytes_are_multiplied_by_the_instructions_of_the_set(isa):
    kernels = code(ISA_OF[isa], isa)
    for loop, instruction in (
        (kernels["one row"]["Q8_0"], SIGNED[isa]),
        (kernels["one row"]["Q4_0"], UNSIGNED[isa]),
        (kernels["several"]["Q8_0"], SIGNED[isa]),
        (kernels["tile of bytes"][""], TILES[isa]),
    ):
        assert instructions(loop) & (DOTS | {"smull"}) == {instruction}
    # 6 rows, 8 columns, 32 deep: 16 products an instruction, or 32
    tile = kernels["tile of bytes"][""]
    n = sum(line.startswith(TILES[isa]) for line in tile)
    assert n == {"smull": 2 * 96, "sdot": 96, "smmla": 48}[TILES[isa]]
    assert isa == "neon" or not any("[sp" in line for line in tile), "sums stay in registers"


def test_avx_vnni_multiplies_bytes_in_one_instruction():
    """12 vectors of sums, 32 deep, with four products a lane; encoded without AVX-512's prefix."""
    kernels = code("alderlake")
    loops = [loop for kernel in (*BYTES, "four rows") for loop in kernels[kernel].values()]
    for loop in loops:
        ours = [line for line in loop if "vpdpbusd" in line]
        assert ours and all(line.startswith("{vex}") for line in ours)
        assert not any("zmm" in line or "vpmadd" in line for line in loop)
    tile = kernels["tile of bytes"][""]
    assert sum("vpdpbusd" in line for line in tile) == 12 * 8


def test_avx2_multiplies_signed_bytes_without_spilling():
    """6 vectors of sums, 32 deep: a weight's sign to x, products of pairs, their widened sums."""
    kernels = code("haswell")
    tile = kernels["tile of bytes"][""]
    for instruction in ("vpsignb", "vpmaddubsw", "vpmaddwd"):
        assert sum(line.startswith(instruction) for line in tile) == 6 * 8
    assert not any("%rsp" in line or "zmm" in line for line in tile)
    for kernel in ("one row", "four rows"):
        for loop in kernels[kernel].values():
            assert "vpmaddubsw" in instructions(loop) and not any("vpdp" in line for line in loop)


@pytest.mark.parametrize("kernel", FEW_BITS)
def test_avx2_adds_up_products_of_few_bits_before_they_are_widened(kernel):
    """6 vectors of sums, 32 deep, two words together. Of what 16 registers do not hold, six floats,
    each is read and written once."""
    tile = code("haswell")[kernel][""]
    found = {"vpmaddubsw": 6 * 8, "vpmaddwd": 6 * 4, "vpaddw": 6 * 4, "vpaddd": 6 * 4}
    for instruction, n in found.items():
        assert sum(line.startswith(instruction) for line in tile) == n
    assert sum("%rsp" in line for line in tile) <= 14
    assert not any("vpsignb" in line or "zmm" in line for line in tile)


def test_pairs_of_bfloat16_are_multiplied_by_the_instructions_of_the_set():
    kernels = code("neoverse-v1", "neonbf16")
    pairs = dict(zip(PAIRS, ("bfmmla", "bfdot", "bfcvtn"), strict=True))
    for kernel, instruction in pairs.items():
        ours = {name.removesuffix("2") for name in instructions(kernels[kernel][""])}
        assert ours & DOTS == {instruction}
    without = code("neoverse-v1", "neoni8mm")
    assert not any(instructions(without[kernel][""]) & DOTS for kernel in pairs)


def counts(cpu):
    """{kernel: {weight type: instructions for 32 weights}}"""
    kernels = code(cpu)

    def of(kernel, name, loop):
        block = kernels["blocks"][name]
        return 32 * len(loop) / max(block, 256 if kernel == "one row" else 32)

    return {k: {n: of(k, n, loop) for n, loop in kernels[k].items()} for k in COUNTED}


def test_every_type_is_unpacked_in_less_than_twice_the_instructions_of_q4_0():
    lengths = counts("neoverse-n1")
    assert set(lengths["unpack"]) == {name for name, q in QUANTS.items() if q.dtype.block > 1}
    for kernel, most in (("unpack", 45), ("one row in float32", 52)):
        limit = lengths[kernel]["Q4_0"]
        assert limit <= most
        too_many = {name: n for name, n in lengths[kernel].items() if n >= 2 * limit}
        assert not too_many


def test_bytes_of_a_row_are_multiplied_in_few_instructions():
    """SDOT leaves so little of Q4_0 that twice as many and a half is a bound for types made of
    arithmetic alone; those of tables stay below twice Q4_0 in float32."""
    lengths = counts("neoverse-n1")
    ours, floats = lengths["one row"], lengths["one row in float32"]
    assert ours["Q8_0"] < 12.5 and ours["Q4_0"] < 14
    limits = {n: (floats if n in TABLES else ours)["Q4_0"] for n in ours}
    assert not {name: n for name, n in ours.items() if n > 2 * limits[name] + 0.5}
    faster = {name: floats[name] / n for name, n in ours.items() if name in floats}
    assert min(faster.values()) > 2 and faster["Q8_0"] > 3.5


FLAGS, TABLE = ("Q5_0", "Q5_1", "Q1_0"), ("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4")


@pytest.mark.parametrize("name", FLAGS + TABLE)
def test_bits_and_tables_need_no_lane_by_lane_moves(name):
    """NEON has no register of bits; a table of 16 bytes is one TBL."""
    loop = code("neoverse-n1")["unpack"][name]
    moves = [line for line in loop if re.match(r"(umov|smov|ins|mov)\s+(w\d+, v|v\d+\.\w\[)", line)]
    assert len(moves) <= 8
    assert "tbl" in instructions(loop) and not instructions(loop) & {"bif", "bit", "bsl"}
