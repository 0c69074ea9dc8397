"""Variables that are assigned once: our search beside Numba's own."""

import importlib.util
import inspect
from os import environ
from types import SimpleNamespace

import pytest
from extras import need

need("numba_cuda")


def straight(x):
    a = x + 1
    b = a * a
    a = b - x
    return a + b


def loop(x):
    total = 0
    for i in range(x):
        square = i * i
        total += square
    return total


def branch(x):
    y = x
    if x > 3:
        y = x * 2
        z = y + 1
    else:
        z = -x
    return z + y


@pytest.mark.skipif("NUMBA_ENABLE_CUDASIM" in environ, reason="the simulator compiles nothing")
@pytest.mark.parametrize("of", [straight, loop, branch])
def test_it_finds_what_numba_s_own_finds(of):
    from numba.cuda import lowering
    from numba.cuda.compiler import run_frontend
    from numba.cuda.core.ir_utils import replace_var_names

    from pyggml.backends.cuda.code.lowering import _find_singly_assigned

    spec = importlib.util.spec_from_file_location("own_lowering", inspect.getfile(lowering))
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)  # a copy that is as Numba wrote it
    ir = run_frontend(of)
    names = {name for block in ir.blocks.values() for name in block.scope.localvars._con}
    # Versions of a variable, a and a.1, are one again: assigned more than once.
    replace_var_names(ir.blocks, {n: n.partition(".")[0] for n in names if n[0].isalpha()})
    ours, theirs = (SimpleNamespace(func_ir=ir, blocks=ir.blocks) for _ in range(2))
    _find_singly_assigned(ours)
    own.Lower._find_singly_assigned_variable(theirs)
    assert ours._singly_assigned_vars == theirs._singly_assigned_vars != set()
    assert ours._blk_local_varmap == theirs._blk_local_varmap
