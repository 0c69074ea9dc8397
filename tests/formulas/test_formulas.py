"""Formulas: simplified as they are made, differentiated, the same on every device."""

import math
from dataclasses import replace

import numpy as np
import pytest
from extras import need

from pyggml.backends.webgpu.wgsl.formulas import WGSL
from pyggml.formulas.expression import (
    erfc,
    exp,
    expm1,
    minimum,
    number,
    parts_of,
    sigmoid,
    symbol,
    where,
)
from pyggml.formulas.formula import formula, gradient_formula, joint
from pyggml.formulas.numbers import NUMPY, numpy_function
from pyggml.formulas.reading import reading
from pyggml.formulas.rows import LENGTH, REDUCTIONS, Rows, mean, total
from pyggml.formulas.slopes import slope_of
from pyggml.formulas.softcap import SOFTCAP, SOFTCAP_BACK
from pyggml.graph.dtypes import F32
from pyggml.jit import JIT
from pyggml.kernels.formulas import PYTHON, code_of, loop_of
from pyggml.kernels.rows import rows_text
from pyggml.ops import OPS

pytestmark = pytest.mark.quick
X, Y = symbol("x"), symbol("y")
ALL = {name: op.formula for name, op in OPS.items() if op.formula is not None}
FORMULAS = {name: of for name, of in ALL.items() if not of.of_rows}


def evaluate(e, symbols):
    return numpy_function(e, tuple(symbols))(*symbols.values())


def test_equal_expressions_are_one():
    assert X + Y is Y + X and X * Y is Y * X
    assert sigmoid(X) * X is X * sigmoid(X)
    assert X - Y is not Y - X


@pytest.mark.parametrize(
    "found, wanted",
    [
        (X + 0, X),
        (1 * X, X),
        (0 * exp(X), number(0)),
        (2 * X + 3 * X, 5 * X),
        (2 * (X * Y) * 3, 6 * (X * Y)),
        (X - X, number(0)),
        (X / 4, 0.25 * X),
        ((1 / X) * Y, Y / X),
        (Y * (3 * (X / Y)), 3 * X),
        (where(X > 0, Y, Y), Y),
        (0 - (0 - X), X),
    ],
)
def test_expressions_are_simplified(found, wanted):
    assert found is wanted


def test_an_expression_has_no_truth():
    with pytest.raises(TypeError, match="wanted where"):
        max(X, Y)


@pytest.mark.parametrize("name", FORMULAS)
def test_slopes_are_those_of_float64(name):
    """Against differences, at points that are no bend."""
    of, rng = FORMULAS[name], np.random.default_rng(0)
    settings = next(iter(OPS[name].samples(rng))).params
    values = {s: rng.uniform(0.3, 0.7, 9) for s in of.sources} | dict(settings)
    for source in of.sources:
        step = 1e-6
        apart = [
            evaluate(of.result, values | {source: values[source] + by}) for by in (step, -step)
        ]
        slope = evaluate(slope_of(of.result, symbol(source)), values)
        np.testing.assert_allclose(slope, (apart[0] - apart[1]) / (2 * step), atol=2e-8, rtol=1e-8)


def test_what_is_not_taken_may_be_infinite():
    slope = slope_of(where(X > 0, X, expm1(X)), X)
    with np.errstate(over="ignore"):
        assert evaluate(slope, {"x": 1e4}) == 1


def test_the_reference_of_sigmoid_is_exact_to_its_ends():
    x = np.array([np.nan, -np.inf, -800, -700, 0, 800, np.inf])
    with np.errstate(over="raise", invalid="raise"):
        found = OPS["sigmoid"].ref(x)
    np.testing.assert_array_equal(found, [np.nan, 0, 0, math.exp(-700), 0.5, 1, 1])


def test_a_slope_of_the_result_reads_that_alone():
    assert gradient_formula("back", formula(sigmoid), "x").sources == ("y", "dy")
    assert gradient_formula("back", formula(erfc), "x").sources == ("x", "dy")
    assert SOFTCAP_BACK.sources == ("y", "dy")
    assert reading(SOFTCAP_BACK.result, "dy") == "dy · (1 - y / cap · y / cap)"
    x, cap = np.linspace(-9, 9, 7), 1.7
    slope = evaluate(slope_of(SOFTCAP.result, X), {"x": x, "cap": cap})
    np.testing.assert_allclose(SOFTCAP_BACK(SOFTCAP(x, cap=cap), 1, cap=cap), slope, atol=1e-15)


def test_a_constant_has_no_gradient():
    assert gradient_formula("back", OPS["round"].formula, "x").result is number(0)


def test_slopes_are_read_as_they_are_written():
    assert OPS["sigmoid"].grad.__doc__ == "dx = dy · (1 - y) · y"
    assert OPS["log"].grad.__doc__ == "dx = dy / x"
    assert reading(X - Y * (X + 1)) == "x - (1 + x) · y"
    assert reading(minimum(X, 2) / (X + Y)) == "min(x, 2) / (x + y)"


FUNCTIONS = {e.operation for f in ALL.values() for e in parts_of(*f.results)}
FUNCTIONS -= {"number", "symbol", "+", "*", "/", "<", "<=", *REDUCTIONS}


@pytest.mark.parametrize("language", [NUMPY, PYTHON, WGSL])
def test_a_device_has_all_functions(language):
    assert language.functions.keys() - {*REDUCTIONS} == FUNCTIONS


def test_a_card_has_all_functions():
    need("numba_cuda")
    from pyggml.backends.cuda.code.formulas import EXACT, QUICK

    assert EXACT.functions.keys() == QUICK.functions.keys() == FUNCTIONS


def test_a_difference_is_written_as_one():
    assert PYTHON.lines([X - Y]) == ([], ["(x - y)"])
    assert PYTHON.lines([-X]) == ([], ["(-x)"])
    assert PYTHON.lines([exp(X) * exp(X) + 0.5]) == (
        ["t0 = whole_exp32(x)"],
        ["((t0 * t0) + f4(0.5))"],
    )


# -- the CPU's kernels --------------------------------------------------------------------------


def run(of, *arrays):
    results = [np.empty_like(arrays[0]) for _ in of.results]
    loop_of(of, (F32,) * len(arrays))(*results, *arrays)
    return results


def test_a_loop_computes_what_the_formula_says():
    of, rng = FORMULAS["geglu_back_gate"], np.random.default_rng(0)
    gate, up, dy = rng.standard_normal((3, 33)).astype(np.float32)
    (found,) = run(of, gate, up, dy)
    np.testing.assert_allclose(found, of(gate, up, dy), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not JIT, reason="there is no machine code")
def test_a_kernel_s_name_says_what_its_text_is():
    """By which Numba keeps it: two formulas of one name are two kernels."""
    one, other = (replace(formula(sigmoid), results=(X + n,)) for n in (1, 2))
    names = {code_of(f, (F32,)).code.__name__ for f in (one, other)}
    assert len(names) == 2 and all(name.startswith("sigmoid_") for name in names)


def test_joint_formulas_share_their_parts():
    of = joint("both", [FORMULAS["swiglu"], FORMULAS["swiglu_back_gate"]])
    statements, values = PYTHON.lines(of.results)
    assert of.sources == ("gate", "up", "dy") and len(values) == 2
    assert sum("sigmoid32" in line for line in (*statements, *values)) == 1
    assert math.isclose(of(1.0, 1.0, 1.0), 1 / (1 + math.exp(-1)))


# -- rows -----------------------------------------------------------------------------------------


def test_what_a_row_has_in_common_stands_before_its_sum():
    rows, r = Rows(["x", "y"]), total(Y)
    assert rows.total(2 * r * X / exp(r)) is 2 * r / exp(r) * total(X)
    assert rows.total(exp(r)) is exp(r) * LENGTH
    assert rows.total(X - mean(X)) is number(0)
    assert rows.total(X * (X - mean(X))) is total(X * (X - mean(X)))


def test_a_row_is_computed_in_as_few_passes_as_its_sums_allow():
    """Both of a pass at once; what they have in common once, not for each element."""
    passes = list(ALL["norm_back"].rows.passes(ALL["norm_back"].results))
    assert [[how for how, _ in p.sums] for p in passes] == [["sum"] * 2, ["sum"] * 2, []]
    divided = [e for p in passes for e in parts_of(*p.values) if e.operation in ("/", "sqrt")]
    assert not divided and any(
        e.operation == "sqrt" for _, c in passes[-1].common for e in parts_of(c)
    )


def test_what_a_row_is_made_of_is_computed_once():
    """What was summed lies where the result will be, unless a source is read after it."""
    for of, is_kept in ((OPS["cross_entropy_rows_back"].formula, True), (ALL["norm_back"], False)):
        text = rows_text("f", of)
        assert ("_kept" in text) == is_kept and text.count("exp32") == is_kept
        without = of.rows.passes(of.results)
        assert all(step.kept is None for step in without)
