"""What is handed to the wrong function, and memory that changes behind a program's back."""

import inspect

import numpy as np
import pytest

from pyggml import ops
from pyggml.alloc import plan
from pyggml.backward import build_backward
from pyggml.errors import GraphError, PyggmlError
from pyggml.graph import Graph
from pyggml.graph.tensor import Tensor, leaf
from pyggml.runtime import Devices, bind, results, run, schedule

pytestmark = pytest.mark.quick


def ones(n=3, name=""):
    return leaf(np.ones(n, np.float32), name)


def read_only(n=3):
    array = np.ones(n, np.float32)
    array.flags.writeable = False
    return leaf(array, "w")


WRONG = [ones(), Graph.of(ops.sum_(ones())), [ones()], 1.0, None]


@pytest.mark.parametrize("call", [
    lambda g: build_backward(g, [ones()]), lambda g: schedule(g, Devices()), schedule, plan, bind,
    results, Graph.of,
])  # fmt: skip
def test_a_stage_says_what_it_takes(call):
    """One sentence for all that is neither a graph, nor a tensor, nor a schedule."""
    refused = 0
    for wrong in WRONG:
        try:
            call(wrong)
        except PyggmlError as error:
            refused += 1
            assert len(str(error)) > 20 and "\n" not in str(error)
    assert refused >= 3


def test_a_loss_must_be_named_among_several_outputs():
    w = ones(name="w")
    loss = ops.sum_(ops.sqr(w))
    with pytest.raises(GraphError, match="none of the 2 outputs is the loss"):
        build_backward(Graph.of(loss, ops.sqr(w)), [w])
    with pytest.raises(GraphError, match="in a list"):
        build_backward(Graph.of(loss), w)


def test_a_tensor_of_another_graph_cannot_be_read():
    program = bind(schedule(Graph.of(ops.sqr(ones()))))
    with pytest.raises(GraphError, match="no result of this program"):
        program.read(ops.sqr(ones()))


@pytest.mark.parametrize("name", ops.__all__)
def test_a_tensor_for_a_number_is_refused_in_a_sentence(name):
    """Of every builder: each argument that is a number, as a tensor."""
    build = getattr(ops, name)
    if not callable(build):
        return
    parameters = list(inspect.signature(build).parameters.values())
    numbers = [i for i, p in enumerate(parameters) if p.annotation in ("int", "float")]
    x = leaf(np.ones((4, 4), np.float32))
    for i in numbers:
        arguments = {
            p.name: x if j == i or p.annotation == "Tensor" else 1 if j in numbers else p.default
            for j, p in enumerate(parameters)
            if j == i or p.default is not p.empty or p.annotation == "Tensor" or j in numbers
        }
        if all(p.name in arguments or p.default is not p.empty for p in parameters):
            with pytest.raises(PyggmlError):
                build(**arguments)


def test_a_leaf_given_another_array_is_refused():
    w = ones(name="w")
    program = bind(schedule(Graph.of(ops.sqr(w))))
    program()
    w.data = np.full(3, 2, np.float32)
    with pytest.raises(GraphError, match="w .*another array"):
        program()
    assert run(ops.sqr(w))[0].tolist() == [4, 4, 4]


@pytest.mark.parametrize("write", [
    lambda w: ops.add_inplace(w, ones()),
    lambda w: ops.fill_inplace(w, 0.0),
    lambda w: ops.add_inplace(ops.reshape(w, (3,)), ones()),
    lambda w: ops.set_rows(ops.reshape(w, (3, 1)), leaf(np.ones((1, 1), np.float32)),
                           leaf(np.zeros(1, np.int32))),
    lambda w: ops.opt_step_sgd(w, ones(), leaf(np.zeros(2, np.float32))),
])  # fmt: skip
def test_a_read_only_leaf_is_not_written_to(write):
    with pytest.raises(GraphError, match="w F32.*read-only"):
        run(write(read_only()))
    assert isinstance(write(ones()), Tensor)


def test_a_read_only_leaf_is_not_set():
    with pytest.raises(GraphError, match="read-only"):
        Devices().host.write(read_only(), np.zeros(3, np.float32))
