"""Shapes are NumPy's; ne and nb are ggml's. Leaves look at arrays, views at their base."""

import numpy as np
import pytest

from pyggml.errors import QuantError, ShapeError
from pyggml.graph import Graph
from pyggml.graph.arrays import array
from pyggml.graph.dtypes import BF16, F16, F32, I32, dtype
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NO_SETTINGS, Memory, NoGrad, Spec, op
from pyggml.graph.tensor import Tensor, contiguous_strides, leaf, zeros
from pyggml.kernels.kernel import as_four, as_rows
from pyggml.ops import OPS, add, narrow, permute, reshape, scale, soft_max, sum_rows, transpose
from pyggml.quants import quantize
from pyggml.runtime import run

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("shape", "ne", "nb"),
    [
        ((), (1, 1, 1, 1), (4, 4, 4, 4)),
        ((5,), (5, 1, 1, 1), (4, 20, 20, 20)),
        ((3, 5), (5, 3, 1, 1), (4, 20, 60, 60)),
        ((2, 3, 4, 5), (5, 4, 3, 2), (4, 20, 80, 240)),
    ],
)
def test_ggml_order(shape, ne, nb):
    t = zeros(shape)
    assert t.ne == ne
    assert t.nb == nb
    assert t.n_elements == np.prod(shape, dtype=int)
    assert t.n_bytes == 4 * t.n_elements


def test_a_quantised_tensor_counts_blocks():
    q4 = dtype("Q4_0")
    w = leaf(np.zeros((3, 36), np.uint8), "w", q4)
    assert w.shape == (3, 64)
    assert w.strides == (36, 18)
    assert w.nb == (18, 36, 108, 108)
    assert w.n_bytes == 108
    assert w.is_contiguous
    with pytest.raises(QuantError, match=r"a row of 33 elements .* Q4_0's 32"):
        Tensor((2, 33), q4)


@pytest.mark.parametrize(
    ("numpy", "ggml"), [(np.float32, F32), (np.float16, F16), (np.int32, I32), (np.uint16, BF16)]
)
def test_a_leaf_looks_at_its_array(numpy, ggml):
    data = np.zeros((2, 3), numpy)
    t = leaf(data, "x")
    assert t.dtype is ggml
    assert t.data is data
    assert t.op is None


def test_a_leaf_keeps_the_strides_of_its_array():
    data = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    t = leaf(data)
    assert t.strides == (16, 8)
    assert not t.is_contiguous
    np.testing.assert_array_equal(run(scale(t, 2.0))[0], data * 2)


def test_a_type_without_a_twin_is_refused():
    with pytest.raises(ShapeError, match="w: NumPy type complex64 has no ggml type"):
        leaf(np.zeros(3, np.complex64), "w")


@pytest.mark.parametrize("name", ["F16", "Q8_0"])
def test_an_array_that_does_not_hold_the_type_is_refused(name):
    with pytest.raises(ShapeError, match=f"w: float32 holds no {name}"):
        leaf(np.zeros((2, 34), np.float32), "w", dtype(name))


@pytest.mark.parametrize(
    ("shape", "strides", "wanted"),
    [((3, 4), (16, 4), True), ((3, 4), (4, 12), False), ((1, 4), (999, 4), True), ((), (), True)],
)
def test_axes_of_one_element_have_no_gaps(shape, strides, wanted):
    assert Tensor(shape, F32, strides=strides).is_contiguous is wanted


def test_strides_of_gapless_tensors():
    assert contiguous_strides((2, 3, 4), F32) == (48, 16, 4)
    assert contiguous_strides((2, 3, 512), dtype("Q4_K")) == (864, 288, 144)


def test_a_view_of_a_view_counts_from_the_root():
    data = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    x = leaf(data)
    inner = narrow(narrow(x, 0, 1, 2), 2, 1, 3)
    assert inner.root is x
    assert inner.offset == 4 * (20 + 1)
    np.testing.assert_array_equal(array(inner), data[1:, :, 1:4])
    np.testing.assert_array_equal(array(transpose(inner)), data[1:, :, 1:4].swapaxes(1, 2))
    assert np.shares_memory(array(inner), data)


def test_a_view_of_quantised_rows():
    rng = np.random.default_rng(0)
    packed = quantize(rng.standard_normal((6, 64)), "Q8_0")
    rows = narrow(leaf(packed, "w", dtype("Q8_0")), 0, 2, 3)
    assert rows.shape == (3, 64)
    np.testing.assert_array_equal(array(rows), packed[2:5])


def test_sources_with_gaps_are_copied_for_kernels_that_cannot_walk_them():
    x = zeros((3, 4))
    y = soft_max(transpose(x))
    assert y.src[0].op.name == "cont"
    assert soft_max(x).src[0] is x


def test_names_are_shown():
    t = scale(zeros((2,), name="x"), 2.0)
    assert repr(t) == "<scale F32[2] = scale>"
    assert repr(t.named("twice")) == "<twice F32[2] = scale>"
    assert repr(zeros((2,), I32, "ids")) == "<ids I32[2] = leaf>"


def test_a_scalar_goes_through_a_graph():
    total = reshape(sum_rows(leaf(np.ones(5, np.float32))), ())
    (value,) = run(add(total, total))
    assert value.shape == ()
    assert value == 10


def test_outputs_that_are_views_hold_their_numbers():
    x = leaf(np.arange(6, dtype=np.float32).reshape(2, 3))
    y = permute(scale(x, 1.0), (1, 0))
    np.testing.assert_array_equal(run(y)[0], x.data.T)
    assert Graph.of(y).outputs[0] is y


# -- declaring ops ------------------------------------------------------------------------------


def _declaration(**changes):
    fields = {
        "name": "nothing",
        "ggml": GGMLOp.NONE,
        "spec": lambda x: Spec(x.shape),
        "ref": None,
        "grad": NoGrad("a test"),
        "samples": None,
        "refuses": NO_SETTINGS,
        "memory": Memory.FRESH,
    }
    return fields | changes


def test_a_forgotten_field_is_an_error():
    fields = _declaration()
    del fields["grad"]
    with pytest.raises(TypeError, match="grad"):
        op(**fields)
    assert "nothing" not in OPS


def test_a_second_op_of_one_name_is_an_error():
    with pytest.raises(ValueError, match="'add' is declared twice"):
        op(**_declaration(name="add"))


def test_arrays_as_kernels_see_them():
    a = np.zeros((2, 3, 4))
    assert as_rows(a).shape == (6, 4)
    assert as_rows(np.zeros(())).shape == (1, 1)
    assert as_four(a).shape == (1, 2, 3, 4)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (2, 1, 1, 1, 3)])
def test_five_axes_are_refused(shape):
    with pytest.raises(ShapeError, match="x: a shape of .* wanted at most 4 axes"):
        zeros(shape, name="x")


def test_an_array_that_runs_backwards_is_refused():
    with pytest.raises(ShapeError, match=r"x: strides are \(-12, 4\), wanted none below 0"):
        leaf(np.zeros((2, 3), np.float32)[::-1], "x")
