"""Formulas of numbers on a card, float32: the functions that it has, and formulas made of these."""

import math
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.jit import device
from pyggml.formulas import expression
from pyggml.formulas.formula import Formula, formula, gradient_formula
from pyggml.formulas.softcap import SOFTCAP, SOFTCAP_BACK
from pyggml.formulas.text import Language, define, define_function, float32_python
from pyggml.ops import formulas

ZERO, HALF, ONE = (np.float32(v) for v in (0, 0.5, 1))
LOG2_E = np.float32(math.log2(math.e))


@device
def short_exp(x):
    """eˣ in two instructions. Its relative error is at most 2⁻²² + |x| · 2⁻²³."""
    return ptx.power_of_two(x * LOG2_E)


@device
def sigmoid(x):
    return ONE / (ONE + math.exp(-x))


@device
def quick_sigmoid(x):
    """The sigmoid to some units of float32's last place, far below a step of bfloat16."""
    return ptx.reciprocal(ONE + ptx.power_of_two(-LOG2_E * x))


@device
def softplus(x):
    return max(x, ZERO) + math.log1p(math.exp(-abs(x)))


_OF_MATH = "sqrt", "log", "exp", "expm1", "sin", "cos", "tanh", "erfc"
_FUNCTIONS = {
    **{name: f"math.{name}({{0}})" for name in _OF_MATH},
    "sigmoid": "sigmoid({0})",
    "softplus": "softplus({0})",
    "floor": "f4(math.floor({0}))",
    "ceil": "f4(math.ceil({0}))",
    "pick": "_{0}[at + min(max(int({1}), 0), size - 1)]",  # in rows.py
    "trunc": "math.copysign(f4(math.floor(abs({0}))), {0})",
}
NAMES = {"math": math, "f4": np.float32, "__name__": __name__}
NAMES |= {f.__name__: f for f in (sigmoid, quick_sigmoid, softplus)}


EXACT = float32_python(_FUNCTIONS)
QUICK = float32_python({**_FUNCTIONS, "sigmoid": "quick_sigmoid({0})"})


@cache
def device_formula(of: Formula, language: Language = EXACT) -> Any:
    """A device function of the sources and settings: the result, or a tuple of several."""
    name = f"{of.name}_formula"  # not that of a function it calls
    arguments = (*of.sources, *of.settings)
    return device(define_function(language, name, arguments, of.results, NAMES))


@cache
def lanes_of(of: Formula, n: int, language: Language = EXACT) -> Any:
    """A device function of n neighbours of each source, tuples, and a tuple of the settings: the n
    results."""
    at = (", ".join(f"{s}[{i}]" for s in of.sources) for i in range(n))
    results = ", ".join(f"formula({numbers}, *settings)" for numbers in at)
    sources = ", ".join(of.sources)
    text = (
        "def closing_over(formula):\n"
        f"    def lanes({sources}, settings):\n"
        f"        return {results}\n"
        "    return lanes\n"
    )
    closing_over = define(text, "closing_over", NAMES)
    return device(closing_over(device_formula(of, language)))


silu = device_formula(formula(formulas.silu))
softplus_back = device_formula(gradient_formula("softplus_back", formula(expression.softplus), "x"))
softcap, softcap_back = device_formula(SOFTCAP), device_formula(SOFTCAP_BACK)
