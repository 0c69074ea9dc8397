"""The softcap c of scores and logits, c · tanh(x / c), and its gradient, which its result tells.

Gemma 2, arXiv:2408.00118.
"""

from pyggml.formulas.expression import Expression, tanh
from pyggml.formulas.formula import formula, gradient_formula


def softcap(x: Expression, *, cap: Expression) -> Expression:
    return cap * tanh(x / cap)


SOFTCAP = formula(softcap)
SOFTCAP_BACK = gradient_formula("softcap_back", SOFTCAP, "x")  # of y and dy
