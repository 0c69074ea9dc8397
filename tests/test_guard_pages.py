"""Kernels beside pages that may not be touched: none reads or writes past an end of its arrays."""

import sys
from pathlib import Path

import pytest
from processes import python

from pyggml.jit.isa import ISAS, why_not
from pyggml.quants import QUANTS

SCRIPT = Path(__file__).parent / "support" / "guarded.py"
PAST = f"""
import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})
import numpy as np
from guarded import Guarded
a = Guarded("end").empty((3,), np.float32)
print(np.lib.stride_tricks.as_strided(a, (4,))[3])
"""
# Windows protects pages by another call; the bounds checks of tests/conftest.py hold there too.
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="mprotect is POSIX's")


def test_no_kernel_leaves_its_arrays():
    done = python(SCRIPT)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"{last} ended with {done.returncode}: {done.stderr[-500:]}"


# Types with one scale for a block's numbers, with minima, with a scale for each 16 numbers. As
# floats they are one: how they are unpacked is no matter of the vector unit.
IN_BYTES = [f"{name} int8" for name in ("Q8_0", "Q4_K", "Q6_K")]
OTHERS = [("avx2", ["Q4_K", *IN_BYTES])]  # avxvnni's tile reads the same panels
OTHERS += [pytest.param(isa, QUANTS, marks=pytest.mark.slow) for isa in ("avx2", "avxvnni")]


@pytest.mark.parametrize(("isa", "words"), OTHERS, ids=str)
def test_no_product_of_another_vector_unit_leaves_its_arrays(isa, words):
    """What x86 without AVX-512 runs, where it is not what the test above runs on."""
    lacking = why_not(ISAS[isa])
    if lacking:
        pytest.skip(lacking)  # the instructions that this processor has not
    done = python(SCRIPT, *words, PYGGML_ISA=isa)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"{last} ended with {done.returncode}: {done.stderr[-500:]}"
    assert "Q4_K out_prod 33 int8" in done.stdout


def test_a_read_past_an_end_is_met():
    assert python("-c", PAST).returncode < 0
