"""Random graphs on random devices give one device's numbers; what is copied, and how often."""

import re
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from graphs import graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_backend import ReferenceBackend
from separate_cpu import SeparateCPU

from pyggml.alloc import plan
from pyggml.backends import Backend
from pyggml.backends.cpu import CPU
from pyggml.errors import PyggmlError
from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.op import Memory
from pyggml.graph.tensor import leaf, window, zeros
from pyggml.jit import JIT
from pyggml.jit.tasks import launch, launch_all
from pyggml.ops import (
    OPS,
    add,
    add_inplace,
    mul,
    mul_mat,
    narrow,
    rms_norm,
    scale,
    set_rows,
    sqr,
    swiglu,
    transpose,
)
from pyggml.runtime import Arenas, Devices, assign, bind, run, schedule

pytestmark = pytest.mark.filterwarnings("ignore:(reference|cpu) leaves")
NAMES = sorted(OPS)


class SomeOfTheCPU(CPU):
    """A host that knows some ops only."""

    def __init__(self, ops):
        super().__init__()
        self.ops = ops

    def refusal(self, node):
        return None if node.op.name in self.ops else "not one of its ops"


def some_ops():
    """A random half, most of them used by random graphs."""
    return st.integers(0, 2**32 - 1).map(
        lambda seed: {n for n in NAMES if np.random.default_rng([seed, *n.encode()]).random() < 0.5}
    )


def numbers(*values):
    return np.array(values, np.float32)


def constant(a):
    a.flags.writeable = False
    return leaf(a)


@pytest.mark.skipif(not JIT, reason="regions are the JIT's: without it each kernel is a call")
def test_regions_that_follow_each_other_are_one_call(rng):
    x = leaf(rng.standard_normal((70, 96), np.float32))
    y = rms_norm(swiglu(x, scale(x, 0.5)), 1e-6)
    program = bind(schedule(Graph.of(y), Devices()))
    assert len(program.calls) == 1 and len(list(parts_of(program.calls))) == 3
    program()
    joined = program.read(y)
    assert next(program.read(y) for node, _ in program.walk() if node is y).tobytes() == (
        joined.tobytes()
    )


@given(graphs(), some_ops(), some_ops())
@settings(max_examples=120)
def test_random_devices_give_one_device_s_numbers(graph, device_ops, host_ops):
    devices = [ReferenceBackend(device_ops), SomeOfTheCPU(host_ops), CPU()]
    program = bind(schedule(graph, Devices(devices)))
    program()
    program()
    found = [program.read(t) for t in graph.outputs]
    for a, b in zip(found, run(*graph.outputs), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max(initial=1.0))


@given(graphs(), some_ops())
@settings(max_examples=60)
def test_a_part_is_as_long_as_it_can_be_and_reads_what_it_has(graph, ops):
    made = schedule(graph, Devices([ReferenceBackend(ops), CPU()]))
    for one, other in zip(made.parts, made.parts[1:], strict=False):
        assert one.backend is not other.backend
    home = {t: b for b, p in made.plans.items() for t in p.offsets}
    for part in made.parts:
        assert part.nodes
        for node in part.nodes:
            assert node.root.op is None or home[node.root] is part.backend
            for s in node.src:
                if s.root.op is not None:
                    assert home[s.root] is part.backend
                else:
                    assert (s.root.data is None) is not part.backend.is_host  # until it is bound


def parts_of(calls):
    """The calls; of those that launch regions, their stages."""
    for call in calls:
        if call.kernel is launch:
            yield from call.arguments
        elif call.kernel is launch_all:
            yield from chain.from_iterable(map(stages_of, call.arguments[1]))
        else:
            yield call


def stages_of(stage):
    """A stage, or those that run together in it."""
    together = stage.lies[1] if isinstance(stage.lies, tuple) else None
    if isinstance(together, list):
        return chain.from_iterable(map(stages_of, together))
    return [stage]


@given(graphs())
@settings(max_examples=30)
def test_a_host_alone_runs_the_graph_as_it_is(graph):
    cpu = CPU()
    made, alone = schedule(graph, Devices([cpu])), plan(graph, cpu)
    assert made.plans[cpu].graph is graph and not made.twins and not made.copies
    assert made.plans[cpu].offsets == alone.offsets and made.plans[cpu].n_bytes == alone.n_bytes
    program = bind(made)
    (only,) = program.kernels.values()
    bound, as_they_run = parts_of(only.values()), parts_of(program.calls)
    assert sorted(map(id, bound)) == sorted(map(id, as_they_run))


def test_a_graph_of_views_alone_has_no_part():
    x = leaf(numbers(1, 2, 3).reshape(1, 3))
    y = transpose(x)
    for backends in ([CPU()], [ReferenceBackend({"mul"}), CPU()]):
        made = schedule(Graph.of(y), Devices(backends))
        program = bind(made)
        program()
        assert not made.parts
        np.testing.assert_array_equal(program.read(y), x.data.T)


@pytest.mark.parametrize("backends", [[CPU()], [SeparateCPU()]])
def test_each_program_reads_its_own_memory(backends):
    """Also where another one was bound over the same nodes since."""
    x = leaf(numbers(1, 2, 3))
    y = scale(x, 2.0)
    made = schedule(Graph.of(y), Devices(backends))
    one, other = bind(made), bind(made)
    one()
    write(x, numbers(4, 5, 6))
    other()
    np.testing.assert_array_equal(one.read(y), [2, 4, 6])
    np.testing.assert_array_equal(other.read(y), [8, 10, 12])
    assert [node.op.name for node, _ in one.walk()] == ["scale"]
    np.testing.assert_array_equal(one.read(y), [8, 10, 12])


def test_programs_share_the_memory_of_arenas():
    devices = Devices()
    made = [schedule(Graph.of(scale(zeros((n,)), 2.0)), devices) for n in (3, 3000)]
    arenas = Arenas(*made)
    one, other = (bind(each, arenas=arenas) for each in made)
    assert one.arenas[devices.host] is other.arenas[devices.host]
    assert bind(made[0]).arenas[devices.host] is not one.arenas[devices.host]


# -- copies ---------------------------------------------------------------------------------------


def test_constants_are_copied_once_and_inputs_for_every_run():
    device = ReferenceBackend({"mul_mat", "mul"})
    w, x = constant(np.eye(3, dtype=np.float32) * 2), leaf(numbers(1, 2, 3).reshape(1, 3))
    y = mul(mul_mat(w, x), x)
    devices = Devices([device])
    program = bind(schedule(Graph.of(y), devices))
    assert [t.shape for t in device.written] == [w.shape]
    for values in (numbers(1, 2, 3), numbers(4, 0, -1)):
        write(x, values)
        program()
        np.testing.assert_array_equal(program.read(y)[0], 2 * values * values)
    assert [t.shape for t in device.written[1:]] == [x.shape] * 2, "x is copied once for both nodes"
    bind(schedule(Graph.of(mul_mat(w, x)), devices))
    assert len(device.written) == 3, "another program has the same copy of w"


def test_an_input_is_copied_once_for_all_parts_of_a_device():
    device, x = ReferenceBackend({"mul"}), leaf(numbers(1, 2, 3))
    y = mul(scale(mul(x, x), 2.0), x)
    program = bind(schedule(Graph.of(y), Devices([device, CPU()])))
    program()
    np.testing.assert_array_equal(program.read(y), [2, 16, 54])
    assert len(device.written) == 2, "x, and the host's result"


def test_an_input_is_not_copied_while_it_is_held():
    device, x = SeparateCPU(), leaf(numbers(1, 2))
    devices, y = Devices([device]), scale(x, 2.0)
    program = bind(schedule(Graph.of(y), devices))

    def run(wanted, copies):
        before = device.moved["written", (2,)]
        for _ in range(2):
            program()
        np.testing.assert_array_equal(program.read(y), wanted)
        assert device.moved["written", (2,)] - before == copies

    run([2, 4], copies=2)
    with devices.holding(x):
        run([2, 4], copies=1)
        write(x, numbers(5, 5))  # which nobody is told
        run([2, 4], copies=0)
    write(x, numbers(7, 8))
    run([14, 16], copies=2)


def test_a_constant_keeps_its_memory_from_run_to_run():
    device = ReferenceBackend({"mul", "sqr"})
    w, x = constant(numbers(*range(8))), leaf(np.ones(8, np.float32))
    y = sqr(mul(w, x))  # in place, if w ended here
    program = bind(schedule(Graph.of(y), Devices([device])))
    for _ in range(2):
        program()
        np.testing.assert_array_equal(program.read(y), np.arange(8.0) ** 2)


def test_what_is_changed_between_two_reads_is_copied_twice():
    device = ReferenceBackend({"scale"})
    total, x = leaf(numbers(1, 2)), leaf(numbers(10, 20))
    before = scale(total, 2.0)
    changed = add_inplace(total, x)
    after = scale(changed, 2.0)
    program = bind(schedule(Graph.of(before, after), Devices([device, CPU()])))
    program()
    assert len(device.written) == 2
    np.testing.assert_array_equal(program.read(before), [2, 4])
    np.testing.assert_array_equal(program.read(after), [22, 44])
    np.testing.assert_array_equal(total.data, [11, 22])


def test_a_held_leaf_is_copied_when_its_numbers_are_elsewhere():
    device = SeparateCPU()
    devices, total, x = Devices([device]), leaf(numbers(0, 0)), leaf(numbers(1, 2))
    program = bind(schedule(Graph.of(add_inplace(total, x)), devices))

    def run(times, wanted, copies):
        before = device.moved["written", (2,)]
        for _ in range(times):
            program()
        devices.gather(total)
        np.testing.assert_array_equal(total.data, wanted)
        assert device.moved["written", (2,)] - before == times + copies, "x, and the total"

    with devices.holding(total):
        run(3, [3, 6], copies=1)
        run(2, [5, 10], copies=0)
        write(total, numbers(10, 10))
        devices.note_change(total, devices.host)
        run(2, [12, 14], copies=1)
    write(total, numbers(0, 0))
    run(2, [2, 4], copies=2)


def test_windows_are_held_with_the_leaf_that_they_look_into():
    devices, whole, x = Devices([SeparateCPU()]), leaf(numbers(0, 0, 7)), leaf(numbers(1, 2))
    total = window(whole, 0, (2,))
    program = bind(schedule(Graph.of(add_inplace(total, x)), devices))
    with devices.holding(total):
        program()
        program()
        devices.gather(total)
        np.testing.assert_array_equal(whole.data, [2, 4, 7])
        program()
    np.testing.assert_array_equal(whole.data, [3, 6, 7])
    write(total, numbers(0, 0))
    program()
    np.testing.assert_array_equal(whole.data, [1, 2, 7])


@pytest.mark.quick
def test_a_copy_has_the_axes_in_the_order_of_its_source():
    device = ReferenceBackend({"scale"})
    whole = scale(leaf(np.arange(8, dtype=np.float32).reshape(2, 4)), 1.0)
    x, w = transpose(narrow(whole, 1, 0, 3)), leaf(np.arange(8, dtype=np.float32).reshape(4, 2))
    made = schedule(Graph.of(mul_mat(w, x)), Devices([device, CPU()]))
    (copy,) = (c for c in made.copies if c.taker.is_host)
    assert x.strides == (4, 16) and copy.target.strides == (4, 12)


@pytest.mark.quick
def test_all_of_a_result_is_copied_once_whatever_shows_it():
    device, w = ReferenceBackend({"scale"}), leaf(np.arange(8, dtype=np.float32).reshape(4, 2))
    x = scale(leaf(np.arange(6, dtype=np.float32).reshape(2, 3)), 1.0)
    y = add(mul_mat(w, transpose(x)), mul_mat(w, transpose(x)))
    made = schedule(Graph.of(sqr(x), y), Devices([device, CPU()]))
    (copy,) = (c for c in made.copies if c.taker.is_host)
    assert copy.source.op is x.op
    program = bind(made)
    program()
    assert program.read(y).tobytes() == run(y)[0].tobytes()


# -- which device ---------------------------------------------------------------------------------


@pytest.mark.quick
def test_the_first_device_that_supports_a_node_computes_it():
    device, cpu = ReferenceBackend({"mul"}), CPU()
    x = leaf(numbers(1, 2))
    y = sqr(mul(x, x))
    found = assign(Graph.of(y), [device, cpu])
    assert found.backends == {y.src[0]: device, y: cpu}
    assert found.fallbacks == {("reference", "sqr"): "the op is not declared"}
    assert "reference leaves sqr" in schedule(Graph.of(y), Devices([device, cpu])).report()


@pytest.mark.quick
def test_a_writer_takes_the_memory_along():
    """The device could make the sum but not write rows into it, so both are the host's."""
    device, cpu = ReferenceBackend({"scale", "add"}), CPU()
    table, row = leaf(np.zeros((4, 2), np.float32)), leaf(numbers(1, 2).reshape(1, 2))
    start = add(table, table)
    written = set_rows(start, row, leaf(np.array([2], np.int32)))
    assert written.op.memory is Memory.ALIAS
    y = scale(written, 2.0)
    found = assign(Graph.of(y), [device, cpu]).backends
    assert (found[start], found[written], found[y]) == (cpu, cpu, device)
    program = bind(schedule(Graph.of(y), Devices([device, cpu])))
    program()
    np.testing.assert_array_equal(program.read(y), [[0, 0], [0, 0], [2, 4], [0, 0]])


def test_what_no_device_takes_is_refused_by_name():
    y = sqr(leaf(numbers(1), "x")).named("square")
    with pytest.raises(PyggmlError, match="reference cannot run <square .* = sqr>: the op is not"):
        schedule(Graph.of(y), Devices([ReferenceBackend({"mul"})]))
    with pytest.raises(PyggmlError, match="cpu cannot run <square .* = sqr>: not one of its ops"):
        schedule(Graph.of(y), Devices([ReferenceBackend({"mul"}), SomeOfTheCPU({"mul"})]))


@pytest.mark.quick
def test_the_guide_names_the_methods_of_a_device():
    guide = (Path(__file__).parents[2] / "docs/adding-a-device.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", guide, re.M)
    methods = {name for name, value in vars(Backend).items() if callable(value) and name[0] != "_"}
    assert {name for row in rows for name in re.findall(r"\w+", row)} == methods
    own = {name for name in vars(ReferenceBackend) if name[0] != "_"}
    assert own == {"name", *Backend.__abstractmethods__}, "a device can be made of these alone"


@pytest.mark.quick
def test_the_device_hands_nothing_out():
    device = ReferenceBackend({"sqr"})
    y = sqr(leaf(numbers(3)))
    made = schedule(Graph.of(y), Devices([device]))
    program = bind(made)
    program()
    with pytest.raises(TypeError, match="wanted Backend.read"):
        np.asarray(made.twins[y].data)
    np.testing.assert_array_equal(program.read(y), [9])
