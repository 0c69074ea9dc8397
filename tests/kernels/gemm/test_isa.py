"""Every instruction set that this machine has passes tests of products and attention; the others
are refused by name. Each runs in a process of its own: it is chosen at import."""

from pathlib import Path

import pytest
from processes import python

from pyggml.errors import ConfigError
from pyggml.jit.isa import ENVIRONMENT, ISAS, choose
from pyggml.kernels.attention.softmax import BC
from pyggml.kernels.gemm import CHOSEN
from pyggml.kernels.gemm.frames import BACKWARD_COLUMNS, FORWARD_COLUMNS
from pyggml.kernels.gemm.tile import SIZES

TESTS = Path(__file__).parents[1]  # of kernels
# What differs between instruction sets: the tiles of floats, pairs and bytes with their packing,
# and the vectors of dot products. How types of weights are unpacked does not, so these are types
# that are packed without compiling for seconds.
ON_EVERY_ISA = (
    "gemm/test_paths.py::test_every_path_computes_what_the_reference_does",
    "gemm/test_product.py::test_rows_that_are_no_whole_vectors",
    "gemm/test_product.py::test_accumulating_adds_to_what_is_there",
    "gemm/test_product.py::test_strides_and_batches",
    "gemm/test_product.py::test_a_result_does_not_depend_on_the_other_tokens",
    "gemm/test_int8.py::test_rows_meet_tokens_of_any_number[Q8_0]",
    "gemm/test_int8.py::test_rows_meet_tokens_of_any_number[Q4_1]",
    "gemm/test_int8.py::test_gradients_of_rows_in_any_number[Q4_1]",
    "attention/test_table.py::test_forward_is_the_reference",
    "attention/test_table.py::test_backward_is_the_reference",
)
IN_VECTORS = "not is_the_reference or flash or decode"  # the other paths of attention have none
# What avx2 has, but for products of bytes.
ON_AVXVNNI = tuple(t for t in ON_EVERY_ISA if t.startswith("gemm/test_int8"))

# x86 without AVX-512 has tiles of its own, whose sums depend on the bits of a type.
ON_X86 = (
    "gemm/test_int8.py",
    "gemm/test_int_dots.py::test_rows_of_every_type_and_width",
    "gemm/test_paths.py",
    "gemm/test_beside.py",
)


def runs_here(name, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, name)
    try:
        return choose().name == name, ""
    except Exception as error:
        return False, str(error)


def said(*words, **changes):
    done = python(*words, **changes)
    return done.returncode, done.stdout + done.stderr


# They compile for minutes. What stays, avx2, has tiles of its own; of these, generic and numpy have
# no tiles, avx512 those of avx512vnni without bytes, which has those of avx512bf16 without pairs.
SLOW = ("generic", "numpy", "avx512", "avx512vnni")
WHOLE = ("avx2", "avxvnni")  # of which ON_X86 is tried too


def every(name):
    tests, chosen = (ON_AVXVNNI, "") if name == "avxvnni" else (ON_EVERY_ISA, IN_VECTORS)
    return pytest.param(name, tests, chosen, marks=[pytest.mark.slow] * (name in SLOW), id=name)


@pytest.mark.parametrize(
    ("name", "tests", "chosen"),
    [every(name) for name in ISAS]
    + [pytest.param(n, ON_X86, "", marks=pytest.mark.slow, id=f"{n} whole") for n in WHOLE],
)
def test_each_computes_what_the_others_do(name, tests, chosen, monkeypatch):
    runs, why = runs_here(name, monkeypatch)
    if not runs:
        pytest.skip(why)
    if name == CHOSEN.name:
        pytest.skip(f"{name} is what the other tests of this folder run on")
    code, text = said(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "-x", "-k", chosen),
        *(str(TESTS / test) for test in tests),
        **{ENVIRONMENT: name},
    )
    assert code == 0, text[-3000:]
    assert " passed" in text


@pytest.mark.parametrize("name", list(ISAS))
def test_a_path_that_is_asked_for_is_taken_or_refused(name, monkeypatch):
    runs, why = runs_here(name, monkeypatch)
    code, text = said("-c", "from pyggml.kernels.gemm import CHOSEN; print(CHOSEN.name)")
    if runs:
        assert (code, text.strip()) == (0, name)
    else:
        assert code == 1
        assert f"{ENVIRONMENT}={name}: this machine lacks" in why
        assert why in text


AVX2 = {"avx2", "fma"}
AVX512 = {"avx512f", "avx512bw", "avx512vl"}


@pytest.mark.parametrize(
    ("features", "best"),
    [
        (set(), "generic"),
        ({"avx2"}, "generic"),
        (AVX2, "avx2"),
        (AVX2 | {"avx512f"}, "avx2"),
        (AVX2 | AVX512, "avx512"),
        (AVX2 | {"avxvnni"}, "avxvnni"),
        (AVX2 | AVX512 | {"avxvnni"}, "avxvnni"),
        (AVX2 | AVX512 | {"avxvnni", "avx512vnni"}, "avx512vnni"),
        ({"neon"}, "neon"),
        ({"neon", "dotprod"}, "neondot"),
        ({"neon", "i8mm"}, "neon"),
        ({"neon", "dotprod", "i8mm"}, "neoni8mm"),
        ({"neon", "dotprod", "i8mm", "bf16"}, "neoni8mm"),
    ],
)
def test_the_best_path_of_a_cpu_is_taken(features, best, monkeypatch):
    monkeypatch.setattr("pyggml.jit.isa._features", lambda: frozenset(features))
    monkeypatch.setattr("pyggml.jit.isa.llvm.get_host_cpu_name", lambda: "unknown")
    monkeypatch.setattr("pyggml.jit.isa.JIT", True)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert choose().name == best


@pytest.mark.parametrize(
    ("cpu", "best"),
    [("znver4", "avx512bf16"), ("znver5", "avx512bf16"), ("cooperlake", "avx512vnni")],
)
def test_pairs_of_bfloat16_are_taken_where_they_are_fast(cpu, best, monkeypatch):
    features = frozenset(AVX2 | AVX512 | {"avx512vnni", "avx512bf16"})
    monkeypatch.setattr("pyggml.jit.isa._features", lambda: features)
    monkeypatch.setattr("pyggml.jit.isa.llvm.get_host_cpu_name", lambda: cpu)
    monkeypatch.setattr("pyggml.jit.isa.JIT", True)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert choose().name == best
    monkeypatch.setenv(ENVIRONMENT, "avx512bf16")
    assert choose().name == "avx512bf16", "but whoever asks for it gets it"


def test_what_a_cpu_lacks_is_named(monkeypatch):
    monkeypatch.setattr("pyggml.jit.isa._features", lambda: frozenset(AVX2 | {"avx512f"}))
    monkeypatch.setattr("pyggml.jit.isa.JIT", True)
    monkeypatch.setenv(ENVIRONMENT, "avx512")
    with pytest.raises(ConfigError) as caught:
        choose()
    assert str(caught.value) == f"{ENVIRONMENT}=avx512: this machine lacks avx512bw, avx512vl"


def test_an_unknown_path_is_refused():
    code, text = said("-c", "import pyggml.kernels.gemm", **{ENVIRONMENT: "sse9"})
    assert code == 1
    known = ", ".join(ISAS)
    assert f"ConfigError: {ENVIRONMENT}=sse9: known are {known}" in text


def test_without_the_jit_numpy_multiplies():
    script = "from pyggml.kernels.gemm import CHOSEN; print(CHOSEN.name)"
    assert said("-c", script, NUMBA_DISABLE_JIT="1") == (0, "numpy\n")
    code, text = said("-c", script, NUMBA_DISABLE_JIT="1", **{ENVIRONMENT: "generic"})
    assert code == 1
    assert f"{ENVIRONMENT}=generic needs Numba's JIT, which is switched off" in text


@pytest.mark.parametrize("isa", ISAS.values(), ids=list(ISAS))
def test_tiles_fit_the_registers(isa):
    """The sums, nv vectors of B and a broadcast of A; each sum of bytes is held twice, but floats
    may wait in memory where registers are few and one instruction adds to a sum."""
    for type_, (mr, nv) in SIZES[isa.name]._asdict().items():
        sums = mr * nv * (2 if type_ == "bytes" and isa.name != "avxvnni" else 1)
        assert sums + nv + 1 <= isa.registers
        for columns in (FORWARD_COLUMNS, BACKWARD_COLUMNS, BC):
            assert columns % (nv * isa.lanes) == 0, "whole panels"
