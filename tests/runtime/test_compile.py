"""Kernels compiled ahead, by a process that runs none: those that the schedule's runs need."""

import numpy as np
import pytest
from processes import printed

from pyggml.graph import Graph
from pyggml.graph.tensor import leaf
from pyggml.jit import JIT
from pyggml.ops import opt_step_adamw
from pyggml.runtime import Devices, compile_backwards, schedule

pytestmark = pytest.mark.skipif(not JIT, reason="there is nothing to compile")

# A graph with tasks, parallel loops and serial kernels; {0} does something with its schedule.
SCRIPT = """
import numpy as np
from pyggml.graph.dtypes import dtype
from pyggml.graph import Graph
from pyggml.ops import mul_mat, rms_norm, swiglu
from pyggml.quants import quantize
from pyggml.runtime import Devices, bind, compile_backwards, schedule
from pyggml.graph.tensor import leaf
rng = np.random.default_rng(0)
x = leaf(rng.standard_normal((40, 64), np.float32))
w = leaf(quantize(rng.standard_normal((96, 64), np.float32), "Q8_0"), "w", dtype("Q8_0"))
made = schedule(Graph.of(rms_norm(mul_mat(w, swiglu(x, x)), 1e-6)), Devices())
{0}
"""


def kept(folder, then):
    """Files of machine code after a process of its own did this with the schedule."""
    printed(SCRIPT.format(then), NUMBA_CACHE_DIR=str(folder))
    return {path.name for path in folder.rglob("*.nbc")}


def test_the_process_that_runs_a_schedule_finds_its_kernels(tmp_path):
    before = kept(tmp_path, "print(len(list(compile_backwards(made))))")
    assert before
    new = kept(tmp_path, "bind(made)()") - before
    assert all("regions." in name for name in new), "which share out any tasks"


def test_it_runs_none(rng):
    x, g, m, v = (leaf(rng.standard_normal(8).astype(np.float32)) for _ in range(4))
    settings = leaf(np.full(7, 0.5, np.float32))
    before = x.data.copy()
    step = opt_step_adamw(x, g, m, v, settings)
    assert list(compile_backwards(schedule(Graph.of(step), Devices()))) == [step]
    np.testing.assert_array_equal(x.data, before)
