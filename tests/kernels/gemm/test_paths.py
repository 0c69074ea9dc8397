"""Which path computes which product, with how much scratch."""

from dataclasses import replace

import numpy as np
import pytest
from processes import printed
from rooms import Rooms
from scales_in_dy import with_scales_in_dy

from pyggml.backends.cpu import CPU
from pyggml.graph.dtypes import dtype
from pyggml.jit.isa import ISAS, why_not
from pyggml.kernels import gemm
from pyggml.kernels.gemm import CHOSEN, Problem, int8, reference
from pyggml.kernels.gemm.by_rows import MOST as BY_ROWS
from pyggml.kernels.gemm.few import FEW
from pyggml.kernels.gemm.paths import PATHS
from pyggml.kernels.gemm.several import MOST
from pyggml.kernels.gemm.thin import WIDEST
from pyggml.quants.scales import scale_places

from measures import nmse

NUMPY = not CHOSEN.compiled
FLOATS = "bf16" if gemm.FLOATS == "bf16" else "f32"


def weight(form, kind, compute, m=40, n=64, k=256):
    return Problem(form, m, n, k, dtype(kind), compute)


def strided(m, n, k, **given):
    return Problem("strided", m, n, k, **given)


TILES = CHOSEN.tiles
SOME = "amx, few tokens"
IN_PAIRS = CHOSEN.name == "avx2"
FEW_BITS = "int8, few bits" if IN_PAIRS else "int8"
SEVERAL = f"{FEW_BITS}, few tokens" if IN_PAIRS else "several int8"
SERVED = {
    "enough tokens for tiles": (
        weight("mul_mat", "Q4_K", "int8", m=64),
        "amx" if TILES else FEW_BITS,
    ),
    "whole numbers of 8 bits": (weight("mul_mat", "Q8_0", "int8"), "int8"),
    "whole numbers in bytes": (weight("mul_mat", "Q4_K", "int8"), FEW_BITS),
    "whole numbers backward": (weight("out_prod", "Q4_K", "int8", n=256, k=64), FEW_BITS),
    "of 16 with one scale": (
        weight("mul_mat", "Q6_K", "int8"),
        f"{FEW_BITS}, two scales" if IN_PAIRS else "int8",
    ),
    "of 16 with one scale, backward": (
        weight("out_prod", "Q6_K", "int8", n=256, k=64),
        f"{FEW_BITS}, two scales" if IN_PAIRS else "int8",
    ),
    "of 8 bits, several tokens": (
        weight("mul_mat", "Q8_0", "int8", m=MOST),
        "int8, few tokens" if IN_PAIRS else SEVERAL,
    ),
    "a sum over half a block of rows": (
        weight("out_prod", "Q8_0", "int8", n=256, k=40),
        SOME if TILES else FLOATS,
    ),
    "floats where bytes are wanted": (weight("mul_mat", "F16", "int8"), SOME if TILES else FLOATS),
    "rounded": (weight("mul_mat", "Q4_K", "bf16"), SOME if TILES else "bf16"),
    "rounded backward": (weight("out_prod", "F16", "bf16", n=256, k=64), SOME if TILES else "bf16"),
    "exact": (weight("mul_mat", "Q4_K", "f32"), "f32"),
    "float32, never rounded": (weight("mul_mat", "F32", "bf16"), "f32"),
    "few tokens": (weight("mul_mat", "Q4_K", "bf16", m=FEW), "few"),
    "few tokens in bytes": (weight("mul_mat", "Q4_K", "int8", m=1), "int8 by rows"),
    "several tokens in bytes": (weight("mul_mat", "Q4_K", "int8", m=MOST), SEVERAL),
    "several tokens, few rows": (
        weight("mul_mat", "Q4_K", "int8", m=MOST, n=3),
        SEVERAL if IN_PAIRS else "int8",
    ),
    "few tokens of floats": (weight("mul_mat", "F16", "int8", m=1), "few"),
    "few tokens, very long rows": (
        weight("mul_mat", "Q8_0", "int8", m=1, k=1 << 17),
        "int8 by rows",
    ),
    "few tokens, points of a grid": (weight("mul_mat", "IQ3_S", "int8", m=FEW), "int8 by rows"),
    "several tokens, points of a grid": (
        weight("mul_mat", "IQ3_S", "int8", m=BY_ROWS),
        "int8 by rows",
    ),
    "few tokens backward": (weight("out_prod", "Q4_K", "f32", m=1, n=256, k=64), "f32"),
    "an adapter's A": (weight("mul_mat", "F32", "int8", n=WIDEST), "thin"),
    "an adapter's B, backward": (weight("out_prod", "F32", "int8", n=8), "thin"),
    "an adapter's B": (weight("mul_mat", "F32", "int8", m=18, n=1030, k=8), "low rank"),
    "an adapter's A, backward": (weight("out_prod", "F32", "int8", m=18, n=1030, k=7), "low rank"),
    "few tokens and A": (weight("mul_mat", "F32", "int8", m=1, n=8), "few"),
    "wider than an adapter": (weight("mul_mat", "F32", "int8", n=WIDEST + 1), "f32"),
    "an adapter's gradient": (strided(8, 64, 40, b_in_columns=True), "thin outer"),
    "its transpose": (strided(64, 8, 40, a_in_columns=True), "thin outer, transposed"),
    "in batches": (strided(8, 64, 40, b_in_columns=True, n_batches=2), "strided"),
    "rows and columns": (strided(8, 64, 40), "strided"),
}


@pytest.mark.parametrize("name", SERVED)
def test_each_product_finds_its_path(name):
    problem, wanted = SERVED[name]
    assert gemm.path_of(problem).name == ("numpy" if NUMPY else wanted)


def test_every_path_is_named_above():
    named = (
        {wanted for _, wanted in SERVED.values()}
        | {"bf16", "f32"}
        | ({"numpy"} if NUMPY else set())
    )
    assert named == {path.name for path in PATHS}
    assert len({path.name for path in PATHS}) == len(PATHS)


def test_bytes_take_less_scratch_than_floats():
    """The reservation is that of the path that runs."""
    if NUMPY:
        pytest.skip("NumPy needs none")
    ints, floats = (gemm.packing(weight("mul_mat", "Q4_K", c)) for c in ("int8", "f32"))
    assert (ints[1], floats[1]) == (FEW_BITS, "f32")
    assert ints[0] < floats[0] / 2
    assert gemm.packing(weight("mul_mat", "F32", "f32")) == (0, "")
    one, other = (gemm.packing(weight("mul_mat", t, "int8", m=1)) for t in ("Q4_K", "Q6_K"))
    assert 0 < one[0] < other[0] and one[1] != other[1]  # each type's order is its own


def test_scratch_for_fewer_rows_is_the_most_of_any():
    problem = weight("mul_mat", "Q4_K", "int8", m=30, k=1024)
    each = [gemm.scratch_bytes(replace(problem, m=m)) for m in range(1, 31)]
    assert gemm.scratch_bytes(problem, fewer_rows=True) == max(each)


# -- what they compute --------------------------------------------------------------------------


def operands(p, rng):
    """C's shape, A and B of a problem, as their memory lies."""
    if p.form == "strided":
        a = numbers(rng, (p.n_batches, p.m, p.k), p.a_in_columns)
        return (p.n_batches, p.m, p.n), a, numbers(rng, (p.n_batches, p.n, p.k), p.b_in_columns)
    shape, kind = (p.n, p.k) if p.form == "mul_mat" else (p.k, p.n), p.weight_type
    w = blocks(rng, shape, kind) if kind.quantised else numbers(rng, shape).astype(kind.numpy)
    return (p.m, p.n), numbers(rng, (p.m, p.k)), w


def blocks(rng, shape, kind):
    """All bits at random, but that scales are below two: packing compiles for seconds."""
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // kind.block, kind.block_bytes), np.uint8)
    raw[..., scale_places(kind.name)[:, -1, 0]] &= 0xBF
    return raw.reshape(*shape[:-1], -1)


def numbers(rng, shape, in_columns=False):
    """Normal numbers, the last two axes column by column if wanted."""
    if not in_columns:
        return rng.standard_normal(shape).astype(np.float32)
    return numbers(rng, (shape[0], shape[2], shape[1])).swapaxes(1, 2)


def bound(p, c, a, b, memory, accumulate):
    """The product through the functions that the ops call."""
    if p.form == "strided":
        return gemm.strided(c, a, b, memory, accumulate)
    multiply = gemm.mul_mat if p.form == "mul_mat" else gemm.out_prod
    return multiply(c, a, gemm.Weight(b, p.weight_type, p.compute), memory, accumulate)


# Paths that round both factors to bfloat16, and those that round to bytes; the others are exact.
ROUND_TO_BF16 = {"amx", SOME, "bf16"}
ROUND_TO_BYTES = {path.name for path in PATHS if "int8" in path.name}


# Of 16 weights with one scale both scales of 32 are rounded, to 12 bits, or become one.
OF_TWO_SCALES = {("Q6_K", "int8, few bits, two scales"): 1e-7, ("Q6_K", "int8"): 3e-5}


def compute_slowly(p, c, a, b):
    """c += the product by NumPy, with the factors rounded as its path rounds them."""
    name = gemm.path_of(p).name
    if p.form == "strided":
        return reference.strided(c, a, b, True)
    if p.form == "out_prod" and name.startswith("int8, few bits"):
        c += with_scales_in_dy(a, b, p.weight_type.name)
        return None
    multiply = reference.forward if p.form == "mul_mat" else reference.backward
    pairs = p.rounds if NUMPY else name in ROUND_TO_BF16
    in_bytes = int8.takes(p) if NUMPY else name in ROUND_TO_BYTES
    return multiply(c, a, b, p.weight_type, True, pairs, in_bytes)


@pytest.mark.parametrize("name", SERVED)
def test_every_path_computes_what_the_reference_does(name, rng):
    """A new C, and one that is added to; scratch holds NaN before."""
    p, _ = SERVED[name]
    shape, a, b = operands(p, rng)
    memory = CPU().alloc(gemm.scratch_bytes(p))
    for accumulate in (False, True):
        c, start = np.full(shape, np.nan, np.float32), np.zeros(shape, np.float32)
        if accumulate:
            start = c = numbers(rng, shape)
        wanted = start.astype(np.float64)
        compute_slowly(p, wanted, a, b)
        c = c.copy()
        memory[:] = 255
        bound(p, c, a, b, memory, accumulate)()
        # Backward, a weight on the edge between two bytes may be rounded either way.
        name = gemm.path_of(p).name
        rounds_twice = p.form == "out_prod" and name in ROUND_TO_BYTES
        most = 1e-6 if rounds_twice else OF_TWO_SCALES.get((p.weight_type.name, name), 1e-11)
        assert nmse(c, wanted) < most


@pytest.mark.parametrize("form", ["mul_mat", "out_prod", "strided"])
def test_a_sum_of_no_products_is_zero(form, rng):
    """A new C is zeros, one that is added to stays."""
    p = strided(3, 5, 0) if form == "strided" else weight(form, "F32", "f32", m=3, n=5, k=0)
    shape, a, b = operands(p, rng)
    for accumulate in (False, True):
        c = np.full(shape, 7, np.float32)
        bound(p, c, a, b, CPU().alloc(gemm.scratch_bytes(p)), accumulate)()
        assert (c == 7 * accumulate).all()


@pytest.mark.parametrize("name", SERVED)
def test_no_array_of_scratch_is_written_past(name, rng, monkeypatch):
    rooms, (p, _) = Rooms(monkeypatch), SERVED[name]
    shape, a, b = operands(p, rng)
    memory = CPU().alloc(gemm.scratch_bytes(p))
    bound(p, np.zeros(shape, np.float32), a, b, memory, False)()
    assert NUMPY or not gemm.scratch_bytes(p) or not rooms.written_past()


@pytest.mark.parametrize("name", SERVED)
def test_a_path_keeps_to_its_scratch(name, rng):
    """With guards around exactly as many bytes as it asks for, and one byte less is refused."""
    p, _ = SERVED[name]
    shape, a, b = operands(p, rng)
    n_bytes = gemm.scratch_bytes(p)
    memory = CPU().alloc(n_bytes + 256)
    memory[:] = 255
    c = np.empty(shape, np.float32)
    bound(p, c, a, b, memory[128 : 128 + n_bytes], False)()
    assert (memory[:128] == 255).all() and (memory[128 + n_bytes :] == 255).all()
    assert np.isfinite(c).all()
    if n_bytes:
        with pytest.raises(TypeError, match="too small"):
            bound(p, c, a, b, memory[: n_bytes - 64], False)


# -- on other CPUs ------------------------------------------------------------------------------


SCRIPT = """
from pyggml.jit.isa import ISAS, why_not
from pyggml.kernels import gemm
from pyggml.graph.dtypes import dtype
for compute in ("f32", "bf16", "int8"):
    for m in (1, 40):
        for kind in ("Q4_K", "F16"):
            p = gemm.Problem("mul_mat", m, 64, 256, dtype(kind), compute)
            print(gemm.path_of(p).name, end=";")
"""
BY_ISA = {
    "generic": "few;few;f32;f32;few;few;bf16;bf16;int8 by rows;few;int8;f32;",
    "numpy": "numpy;" * 12,
    "avxvnni": "few;few;f32;f32;few;few;bf16;bf16;int8 by rows;few;int8;f32;",
    "avx2": "few;few;f32;f32;few;few;bf16;bf16;int8 by rows;few;int8, few bits;f32;",
}


@pytest.mark.parametrize("isa", BY_ISA)
def test_paths_of_other_isas(isa):
    if "lacks" in why_not(ISAS[isa]):
        pytest.skip(f"this machine has no {isa}")
    assert printed(SCRIPT, PYGGML_ISA=isa).strip() == BY_ISA[isa]
