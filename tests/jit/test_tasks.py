"""Launches that are joined: what a stage declines, Python does or refuses, and the rest follows."""

import numpy as np
import pytest

from pyggml.errors import PyggmlError
from pyggml.graph import Graph
from pyggml.graph.tensor import leaf, zeros
from pyggml.jit import JIT
from pyggml.jit.tasks import code_for, launch, tuple_stage
from pyggml.ops import flash_attn_ext, get_rows, mul, reshape, set_rows
from pyggml.runtime import bind, schedule

pytestmark = pytest.mark.skipif(not JIT, reason="without the JIT each kernel is a call of its own")


@pytest.fixture
def cache(rng):
    """A program that reads rows of a table, writes them into a cache and looks at that; and its
    leaves."""
    table = leaf(rng.standard_normal((5, 32)).astype(np.float32))
    ids, places = (leaf(np.arange(3, dtype=np.int32)) for _ in range(2))
    span = leaf(np.array([[0, 6]] * 3, np.int32))
    rows, keys = get_rows(table, ids), zeros((6, 32))
    filled = reshape(set_rows(keys, rows, places), (6, 1, 32))
    seen = flash_attn_ext(reshape(rows, (3, 1, 32)), filled, filled, span, 1.0)
    program = bind(schedule(Graph.of(mul(seen, seen))))
    return program, {"table": table, "ids": ids, "places": places, "span": span, "keys": keys}


def test_rows_and_keys_that_are_seen_are_one_call(cache):
    assert len(cache[0].calls) == 1


def test_ids_in_any_order_are_written_by_python_and_the_launch_goes_on(cache):
    program, leaves = cache
    (seen,) = program.schedule.graph.outputs
    results = []
    for order in ([0, 2, 1], [0, 1, 2]):
        leaves["ids"].data[:] = leaves["places"].data[:] = order
        program()
        np.testing.assert_array_equal(leaves["keys"].data[:3], leaves["table"].data[:3])
        results.append(program.read(seen)[np.argsort(order)])
    np.testing.assert_array_equal(*results)


@pytest.mark.quick
@pytest.mark.parametrize(
    "name, numbers, words",
    [
        ("ids", [0, 5, 1], "get_rows: id 5 is none of the 5 rows"),
        ("ids", [0, -1, 1], "get_rows: id -1 is none of the 5 rows"),
        ("places", [1, 6, 2], "set_rows: id 6 is none of the 6 rows"),
        ("places", [2, 4, 2], "set_rows: id 2 is named twice"),
        ("span", [[0, 6], [2, 7], [0, 1]], "flash_attn: query 1 sees the keys from 2 to 7"),
    ],
)
def test_what_is_out_of_range_is_refused_and_nothing_follows(cache, name, numbers, words):
    program, leaves = cache
    right = leaves[name].data.copy()
    leaves[name].data[...] = numbers
    with pytest.raises(PyggmlError, match=words):
        program()
    assert name == "span" or not leaves["keys"].data.any()
    leaves[name].data[...] = right
    program()
    np.testing.assert_array_equal(leaves["keys"].data[:3], leaves["table"].data[:3])


def test_a_tuple_of_arrays_and_numbers_is_read_as_it_was():
    def task(arguments, task, thread):
        out, shorts, n, small, large = arguments[0]
        out[0], out[1], out[2], out[3] = shorts[1, 2], n, small, large
        out[4], out[5] = shorts.shape[1], out.size

    out, shorts = np.zeros(6), np.arange(12, dtype=np.uint16).reshape(3, 4)[:, :3]
    values = out, shorts, -7, np.float32(0.1), 0.1
    launch(tuple_stage(code_for(task, values), values, 1))
    assert out.tolist() == [6, -7, float(np.float32(0.1)), 0.1, 3, 6]
