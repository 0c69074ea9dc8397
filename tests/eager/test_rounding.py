"""What rounding does to numbers is shown beside them."""

import numpy as np
import pytest

from pyggml import ops, rounding, tensor
from pyggml.errors import QuantError
from pyggml.graph.dtypes import Q8_0
from pyggml.graph.tensor import leaf
from pyggml.quants import dequantize, quantize

pytestmark = pytest.mark.quick
X = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)


@pytest.mark.parametrize(("to", "n_bits"), [("F32", 32), ("F16", 16), ("BF16", 16), ("Q8_0", 8.5)])
def test_numbers_before_and_after(to, n_bits):
    r = rounding(tensor(X), to)
    assert (r.type, r.n_bits) == (to, n_bits)
    np.testing.assert_array_equal(r.before, X)
    np.testing.assert_array_equal(r.after, dequantize(quantize(X, to), to))
    np.testing.assert_array_equal(r.before + r.error, r.after)
    assert np.abs(r.error).max() == np.abs(r.error[r.worst])
    assert r.share == pytest.approx(np.linalg.norm(r.error) / np.linalg.norm(X), rel=1e-6)


def test_it_prints_the_numbers_and_where_they_are_furthest():
    text = str(rounding([[0.1234, -1.5, 3.14159, 100.3]], "BF16"))
    assert text.splitlines() == [
        "BF16, 16 bits a number: 1 of 4 unchanged",
        "error   0.2 % of the numbers by root mean square, 0.2 at most, at [0, 3]",
        "  before   [[  0.1234  -1.5      3.1416 100.3   ]]",
        "  after    [[  0.1235  -1.5      3.1406 100.5   ]]",
        "  error    [[ 1.3515e-04  0.0000e+00 -9.6512e-04  2.0000e-01]]",
    ]


def test_nodes_are_computed_and_packed_rows_unpacked():
    w = leaf(quantize(X, "Q8_0"), "w", Q8_0)
    np.testing.assert_array_equal(rounding(w, "F32").after, dequantize(quantize(X, "Q8_0"), "Q8_0"))
    assert rounding(w, "Q8_0").share < 1e-3
    np.testing.assert_array_equal(rounding(ops.scale(leaf(X), 2.0), "F32").after, 2 * X)
    assert rounding(0.5, "F16").after == 0.5 and rounding([0, 0], "F16").share == 0


def test_what_a_type_cannot_hold_is_refused():
    with pytest.raises(QuantError, match="Q9_9"):
        rounding(X, "Q9_9")
    with pytest.raises(QuantError, match="rounding to 5, wanted the name of a type"):
        rounding(X, 5)
    with pytest.raises(QuantError, match="32"):
        rounding(X[:, :20], "Q8_0")
    with pytest.raises(QuantError, match="F16"):
        rounding([1e6], "F16")
