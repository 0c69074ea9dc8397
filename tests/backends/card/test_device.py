"""The card's memory, faults that its kernels find, and its refusals."""

import os
from itertools import pairwise

import numpy as np
import pytest

from pyggml.backends.cpu import CPU
from pyggml.backends.cuda import open_cuda
from pyggml.backends.cuda.runtime import device, loading, transfers
from pyggml.backends.cuda.runtime.driver import CudaAPIError
from pyggml.backends.cuda.runtime.toolkit import SIMULATED
from pyggml.errors import DeviceError, FileChangedError, PyggmlError
from pyggml.gguf.mapped import map_file
from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.dtypes import BF16, F16, F32, I8, I32, dtype
from pyggml.graph.tensor import Tensor, leaf, zeros
from pyggml.ops import add, add_inplace, get_rows, mul, scale, set_rows
from pyggml.ops.layout.layout import transpose
from pyggml.quants import dequantize, quantize
from pyggml.runtime import Devices, bind, results, run, schedule

RNG = np.random.default_rng(2)


def on_card(card, *outputs):
    return results(Graph.of(*outputs), Devices([card, CPU()]))


def placed(card, shape, kind, strides=(), offset=0, n_bytes=0):
    """A tensor with memory of its own on the card."""
    t = Tensor(shape, kind, strides=strides, offset=offset)
    card.attach(t, card.alloc(n_bytes or t.n_bytes), 0)
    return t


@pytest.mark.parametrize("kind", [F32, F16, BF16, I32, dtype("Q4_K")], ids=str)
def test_what_was_written_is_read(card, kind):
    t = placed(card, (3, 256), kind)
    shape = (3, kind.row_bytes(256)) if kind.quantised else (3, 256)
    values = RNG.integers(0, 99, shape).astype(kind.numpy)
    card.write(t, values)
    np.testing.assert_array_equal(card.read(t), values)


@pytest.mark.parametrize("most", [0, 1 << 17, 1 << 20], ids=["none ahead", "half ahead", "ahead"])
def test_weights_are_loaded_in_pieces(card, tmp_path, monkeypatch, most):
    """Of a file, of which a part was expected, and of memory; a weight ends within the page where
    the next one begins."""
    for name, n in (("_HALF", 1 << 14), ("_LOCKED", 1 << 15), ("_MOST_AHEAD", most)):
        monkeypatch.setattr(loading, name, n)
    whole = RNG.integers(-128, 128, 1 << 18, np.int8)
    whole.tofile(tmp_path / "weights")
    mapped = np.frombuffer(map_file(tmp_path / "weights"), np.int8)
    ends = 32, 40_000, 40_005, 200_001, 1 << 18
    arrays = [mapped[a:b] for a, b in pairwise(ends)]
    arrays.append(whole[5:50_000])
    pairs = [(placed(card, values.shape, I8), values) for values in arrays]
    card.expect(arrays)
    for first_bytes in loading._AHEAD.values():
        first_bytes._thread.join()
        assert first_bytes._n == min(most, whole.nbytes)
    card.load(pairs)
    for t, values in pairs:
        np.testing.assert_array_equal(card.read(t), values)
    os.truncate(tmp_path / "weights", 150_000)
    with pytest.raises(FileChangedError, match="it has 150000 bytes, 262144 when it was opened"):
        card.load(pairs)


def test_weights_stream_in_every_run(card, tmp_path):
    """Through less memory than they have, also once the run is captured. The first product waits
    with the host for the last node."""
    RNG.random((4, 1024), np.float32).tofile(tmp_path / "weights")
    mapped = np.frombuffer(map_file(tmp_path / "weights"), np.float32).reshape(4, 1024)
    x, weights = leaf(np.ones(1024, np.float32), "x"), [leaf(values) for values in mapped]
    first, own = mul(x, weights[0]), open_cuda(card.index, "f32")
    y = first
    for w in (*weights[1:], *weights):
        y = mul(y, w)
    y = add(y, first)
    own.streamed.update(weights)
    devices = Devices([own, CPU()])
    devices.ahead, devices.parked = weights[0].n_bytes, 1
    program = bind(schedule(Graph.of(y), devices))
    assert program.schedule.n_streamed == 8 * weights[0].n_bytes
    assert program.schedule.n_parked == first.n_bytes
    assert program.schedule.plans[own].n_bytes < own.room + 5 * weights[0].n_bytes
    for factor in (1.0, 2.0, 3.0):
        write(x, np.full(1024, factor))
        program()
        expected = np.float32(factor)
        for values in (*mapped, *mapped):
            expected = expected * values
        expected = expected + np.float32(factor) * mapped[0]
        np.testing.assert_array_equal(program.read(y), expected)


def test_one_number_has_no_axes(card):
    """NumPy makes a Python number only of such an array."""
    t = placed(card, (), F32)
    card.write(t, np.float32(2.5))
    assert card.read(t).shape == ()
    assert float(card.read(t)) == 2.5


def test_written_numbers_are_cast_and_gaps_stay(card):
    owner = placed(card, (4, 6), F32)
    card.write(owner, np.arange(24.0).reshape(4, 6))
    seen = Tensor((6, 2), F32, strides=(4, 48), base=owner, offset=24)
    np.testing.assert_array_equal(card.read(seen), np.arange(24.0).reshape(4, 6).T[:, 1::2])
    card.write(seen, np.arange(12).reshape(6, 2))
    wanted = np.arange(24.0).reshape(4, 6)
    wanted[1::2] = np.arange(12).reshape(6, 2).T
    np.testing.assert_array_equal(card.read(owner), wanted)


def test_what_was_asked_for_is_what_it_was_then(card):
    t = placed(card, (3, 100), F32)
    card.write(t, np.full((3, 100), 1.0))
    first = card.begin_read(t)
    card.write(t, np.full((3, 100), 2.0))
    second = card.begin_read(t)
    assert (second() == 2).all()
    assert (first() == 1).all()


def test_what_was_read_may_change_once_it_is_written_elsewhere(card):
    """The driver would read page-locked memory only when its turn comes."""
    t, u = placed(card, (3, 1000), F32), placed(card, (3, 1000), F32)
    card.write(t, np.full((3, 1000), 1.0))
    found = card.read(t)
    assert transfers.is_locked(found)
    assert not transfers.is_locked(found.copy())
    card.write(u, found)
    found[:] = 2
    assert (card.read(u) == 1).all()


@pytest.mark.parametrize("most", [transfers._MOST_LOCKED, 4 << 10])
def test_arrays_share_no_memory_while_somebody_has_them(card, most, monkeypatch):
    monkeypatch.setattr(transfers, "_MOST_LOCKED", most)
    t, kept = placed(card, (3, 100), F32), []
    for i in range(8):
        card.write(t, np.full((3, 100), float(i)))
        found = card.read(t)
        if i % 2:
            kept.append(found[1:, 50:])
    assert [k.mean() for k in kept] == [1, 3, 5, 7]


def test_memory_of_a_large_array_serves_small_ones_later(monkeypatch):
    monkeypatch.setattr(transfers, "_MOST_LOCKED", 32 << 10)
    card = open_cuda()  # with pieces of its own
    large, small = placed(card, (7, 1000), F32), placed(card, (3, 100), F32)
    card.write(large, np.zeros((7, 1000)))
    found = card.read(large)
    assert transfers.is_locked(found)
    assert not transfers.is_locked(card.read(small)), "all that may be locked is in use"
    card.write(large, np.ones((7, 1000)))
    assert (found == 0).all()
    del found
    assert transfers.is_locked(card.read(small))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_K", "Q6_K"])
def test_rows_of_a_packed_table(card, kind):
    packed = quantize(RNG.standard_normal((7, 256)).astype(np.float32), kind)
    table = leaf(packed.view(dtype(kind).numpy), "table", dtype(kind))
    ids = leaf(np.array([6, 0, 0, 3], np.int32))
    (found,) = on_card(card, get_rows(table, ids))
    np.testing.assert_allclose(found, dequantize(packed, kind)[[6, 0, 0, 3]], rtol=1e-6)


def test_rows_packed_into_a_cache(card):
    rows, ids = leaf(RNG.standard_normal((3, 64)).astype(np.float32)), leaf(np.array([4, 1, 2]))
    caches = [zeros((6, 64), dtype("Q8_0")) for _ in range(2)]
    (wanted,) = run(set_rows(caches[0], rows, ids))
    (found,) = on_card(card, set_rows(caches[1], rows, ids))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "ids, fault", [([0, 7], "no row of a table of 7"), ([3, -1], "no row"), ([2, 2], "twice")]
)
def test_wrong_ids_are_found(card, ids, fault):
    table, numbers = zeros((7, 4)), leaf(np.array(ids, np.int32))
    node = get_rows(table, numbers) if "twice" not in fault else None
    with pytest.raises(PyggmlError, match=fault):
        on_card(card, node or set_rows(table, zeros((2, 4)), numbers))
    assert on_card(card, scale(zeros((2,)), 2.0))[0].tolist() == [0, 0], "the fault is over"


def test_every_run_reads_new_inputs(card):
    """The first run launches each kernel, the second captures, later ones start the graph."""
    x, total = leaf(np.zeros((2, 3), np.float32)), zeros((3, 2))
    node = add_inplace(total, transpose(mul(add(x, x), x)))
    program = bind(schedule(Graph.of(node), Devices([card, CPU()])))
    wanted = np.zeros((3, 2))
    for i in range(4):
        write(x, np.full((2, 3), i + 0.5))
        wanted += 2 * (i + 0.5) ** 2
        program()
        np.testing.assert_allclose(program.read(node), wanted)


@pytest.mark.skipif(SIMULATED, reason="the simulator captures nothing")
def test_what_cannot_be_captured_is_launched(card):
    times = []

    def sometimes():
        times.append(len(times))
        if len(times) == 2:
            raise CudaAPIError(900, "this cannot be captured")

    calls = device.Capture([sometimes], card.stream)
    for _ in range(4):
        calls()
    assert len(times) == 5


def test_without_memory_it_says_how_much(card, monkeypatch):
    class OutOfMemory(CudaAPIError):
        code = 2

        def __init__(self):
            Exception.__init__(self, "no memory")

    def refuse(*_, **__):
        raise OutOfMemory

    monkeypatch.setattr(device.cuda, "device_array", refuse)
    with pytest.raises(DeviceError, match=r"out of memory: 50,000,000 bytes are wanted, .* are"):
        card.alloc(50_000_000)
