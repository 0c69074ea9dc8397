"""What is done for Numba's compiler to take less time leaves its answers as they are."""

import gc
from itertools import product

import numba
import pytest
from numba.core import event, ir
from numba.core.compiler import Flags, run_frontend
from numba.core.targetconfig import TargetConfig

from pyggml.jit import JIT
from pyggml.jit.decorators import OPTIONS

pytestmark = pytest.mark.skipif(not JIT, reason="without the JIT all is plain Python")

SETTINGS = {  # of flags: the default, and others
    "nrt": (False, True),
    "fastmath": (False, {"reassoc"}, {"reassoc", "nsz"}),
    "error_model": ("python", "numpy"),
}


def all_flags():
    """With none, some or all of the settings set, to their defaults too."""
    for values in product(*((None, *each) for each in SETTINGS.values())):
        flags = Flags()
        for name, value in zip(SETTINGS, values, strict=True):
            if value is not None:
                setattr(flags, name, value)
        yield flags


@pytest.mark.quick
def test_flags_are_equal_where_all_their_values_are():
    for one, other in product(all_flags(), repeat=2):
        assert (one == other) == (one.values() == other.values()), (one, other)
        assert one != other or hash(one) == hash(other)


@pytest.mark.quick
def test_flags_of_another_kind_are_others():
    class Others(TargetConfig):
        options = Flags.options

    assert Flags() != Others()
    assert Flags() != 3


def branching(x, n):
    total, parts = 0, [x, (n, x + n)]
    for i in range(n):
        if i > x:
            total += parts[0] * i
        else:
            parts[0] = x[i] if n else -x
    return total, {"a": x}, f"{n}", parts


def variables_of(part):
    """As Numba lists them: whatever lies in a part, in its order."""
    if isinstance(part, ir.Var):
        return [part]
    if isinstance(part, ir.Expr):
        return variables_of(part._kws)
    if isinstance(part, ir.Inst):
        return variables_of(vars(part))
    if isinstance(part, list | tuple | dict):
        parts = part.values() if isinstance(part, dict) else part
        return [variable for each in parts for variable in variables_of(each)]
    return []


@pytest.mark.quick
def test_every_variable_of_an_instruction_is_listed_in_its_order():
    blocks = run_frontend(branching).blocks.values()
    instructions = [each for block in blocks for each in block.body]
    assert len(instructions) > 40
    for each in instructions:
        assert each.list_vars() == variables_of(each), each


def test_no_garbage_is_looked_for_while_kernels_compile():
    looks = []

    class Look(event.Listener):
        def on_start(self, _):
            looks.append(gc.isenabled())

        def on_end(self, _):
            pass

    @numba.njit(**OPTIONS | {"cache": False})
    def one_more(x):
        return x + 1

    with event.install_listener("numba:compile", Look()):
        assert one_more(2) == 3
    assert looks and not any(looks) and gc.isenabled()
