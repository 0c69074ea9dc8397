"""Every code path that this machine can run passes the tests of products and attention; the others
are refused by name. Each runs in a process of its own: the path is chosen at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyggml._isa import ENVIRONMENT, ISAS, choose
from pyggml.errors import ConfigError
from pyggml.gemm import CHOSEN

HERE = Path(__file__).parent
FILES = ["test_product.py", "../attention/test_flash.py", "../attention/test_table.py"]


def runs_here(name, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, name)
    try:
        return choose().name == name, ""
    except Exception as error:
        return False, str(error)


def python(*arguments, **changes):
    environment = {**os.environ, **changes}
    found = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize("name", list(ISAS))
def test_this_path_computes_what_the_others_do(name, monkeypatch):
    runs, why = runs_here(name, monkeypatch)
    if not runs:
        pytest.skip(why)
    if name == CHOSEN.name:
        pytest.skip(f"{name} is what the other tests of this folder run on")
    code, text = python(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "-x"),
        *(str(HERE / f) for f in FILES),
        **{ENVIRONMENT: name},
    )
    assert code == 0, text[-3000:]
    assert " passed" in text


@pytest.mark.parametrize("name", list(ISAS))
def test_a_path_that_is_asked_for_is_taken_or_refused(name, monkeypatch):
    runs, why = runs_here(name, monkeypatch)
    code, text = python(
        "-c", "from pyggml.gemm import CHOSEN; assert CHOSEN.panel <= 64; print(CHOSEN.name)"
    )
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
        ({"neon"}, "neon"),
    ],
)
def test_the_best_path_of_a_cpu_is_taken(features, best, monkeypatch):
    monkeypatch.setattr("pyggml._isa._features", lambda: frozenset(features))
    monkeypatch.setattr("pyggml._isa.JIT", True)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert choose().name == best


@pytest.mark.parametrize(
    ("cpu", "best"),
    [("znver4", "avx512bf16"), ("znver5", "avx512bf16"), ("cooperlake", "avx512vnni")],
)
def test_pairs_of_bfloat16_are_taken_where_they_are_fast(cpu, best, monkeypatch):
    features = frozenset(AVX2 | AVX512 | {"avx512vnni", "avx512bf16"})
    monkeypatch.setattr("pyggml._isa._features", lambda: features)
    monkeypatch.setattr("pyggml._isa.llvm.get_host_cpu_name", lambda: cpu)
    monkeypatch.setattr("pyggml._isa.JIT", True)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert choose().name == best
    monkeypatch.setenv(ENVIRONMENT, "avx512bf16")
    assert choose().name == "avx512bf16", "but whoever asks for it gets it"


def test_what_a_cpu_lacks_is_named(monkeypatch):
    monkeypatch.setattr("pyggml._isa._features", lambda: frozenset(AVX2 | {"avx512f"}))
    monkeypatch.setattr("pyggml._isa.JIT", True)
    monkeypatch.setenv(ENVIRONMENT, "avx512")
    with pytest.raises(ConfigError) as caught:
        choose()
    assert str(caught.value) == f"{ENVIRONMENT}=avx512: this machine lacks avx512bw, avx512vl"


def test_an_unknown_path_is_refused():
    code, text = python("-c", "import pyggml.gemm", **{ENVIRONMENT: "sse9"})
    assert code == 1
    known = ", ".join(ISAS)
    assert f"ConfigError: {ENVIRONMENT}=sse9: known are {known}" in text


def test_without_the_jit_numpy_multiplies():
    script = "from pyggml.gemm import CHOSEN; print(CHOSEN.name)"
    assert python("-c", script, NUMBA_DISABLE_JIT="1") == (0, "numpy\n")
    code, text = python("-c", script, NUMBA_DISABLE_JIT="1", **{ENVIRONMENT: "generic"})
    assert code == 1
    assert f"{ENVIRONMENT}=generic needs Numba's JIT, which is switched off" in text


def test_widths_fit_the_register_files():
    """mr·nv sums, nv loads and a broadcast stay in registers: 32 of these, else 16."""
    for isa in ISAS.values():
        registers = 32 if isa.name.startswith(("amx", "avx512", "neon")) else 16
        assert isa.mr * isa.nv + isa.nv + 1 <= registers
        assert 64 % isa.panel == 0, "a tile is a whole number of panels"
