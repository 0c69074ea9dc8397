"""Formulas of ops: all that is written of their numbers. Every device's kernels are made of them,
the float64 reference, and the slopes.

Positional arguments are numbers of sources, keywords settings. Functions that every device has,
such as exp, are in pyggml.formulas.expression.
"""

import math
from typing import TypeVar

import numpy as np

from pyggml.formulas.expression import (
    Expression,
    clip,
    erfc,
    exp,
    expm1,
    log,
    maximum,
    minimum,
    sgn,
    sigmoid,
    sqrt,
    trunc,
    where,
)
from pyggml.formulas.rows import LENGTH, largest, mean, pick, total, wide_total

Number = TypeVar("Number", Expression, np.ndarray)
LOWEST = -3e38  # no score; a device may lack -inf
LEAST = 2.0**-126  # that a probability is taken to be in a logarithm: float32's least normal

# -- arithmetic -----------------------------------------------------------------------------------


def add(a: Expression, b: Expression) -> Expression:
    return a + b


def add1(a: Expression, b: Expression) -> Expression:
    return a + b


def sub(a: Expression, b: Expression) -> Expression:
    return a - b


def mul(a: Expression, b: Expression) -> Expression:
    return a * b


def div(a: Expression, b: Expression) -> Expression:
    return a / b


def scale(x: Expression, *, s: Expression, b: Expression) -> Expression:
    return s * x + b


def neg(x: Expression) -> Expression:
    return -x


# -- functions of one number ----------------------------------------------------------------------


def sqr(x: Expression) -> Expression:
    return x * x


def step(x: Expression) -> Expression:
    """1 where x > 0, else 0."""
    return where(x > 0, 1, 0)


def clamp(x: Expression, *, low: Expression, high: Expression) -> Expression:
    return clip(x, low, high)


def round_(x: Expression) -> Expression:
    """The nearest whole number, halves away from 0."""
    whole = trunc(x)
    part = x - whole
    return whole + where(part >= 0.5, 1, 0) - where(part <= -0.5, 1, 0)


def keep(x: Expression, word: Expression, *, least: Expression, grown: Expression) -> Expression:
    """What dropout leaves of x: nothing where its random word is too small."""
    return where(word >= least, grown * x, 0)


def noisy(x: Expression, size: Expression, bits: Expression) -> Expression:
    """x with noise of at most this size, of 24 random bits, which a float32 holds."""
    return x + size * (2.0**-23 * bits - 1)


def repeat(x: Expression) -> Expression:
    return x


# -- activations ----------------------------------------------------------------------------------


def relu(x: Expression) -> Expression:
    return maximum(x, 0)


def leaky_relu(x: Expression, *, slope: Expression) -> Expression:
    return where(x > 0, x, slope * x)


def elu(x: Expression) -> Expression:
    return where(x > 0, x, expm1(x))


def xielu(
    x: Expression, *, a_n: Expression, a_p: Expression, beta: Expression, eps: Expression
) -> Expression:
    left = a_n * (expm1(minimum(x, eps)) - x)
    return where(x > 0, a_p * x * x, left) + beta * x


def hardsigmoid(x: Expression) -> Expression:
    return clip((x + 3) / 6, 0, 1)


def hardswish(x: Expression) -> Expression:
    return x * hardsigmoid(x)


def silu(x: Expression) -> Expression:
    return x * sigmoid(x)


def gelu(x: Expression) -> Expression:
    """1 + tanh(u) = 2 · sigmoid(2u), without cancellation."""
    return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def gelu_quick(x: Expression) -> Expression:
    return x * sigmoid(1.702 * x)


def gelu_erf(x: Expression) -> Expression:
    """x · Φ(x), with Φ(x) = erfc(-x / √2) / 2; 1 + erf would lose all digits far below 0."""
    return 0.5 * x * erfc(-math.sqrt(0.5) * x)


# -- gated units ----------------------------------------------------------------------------------


def swiglu(gate: Expression, up: Expression) -> Expression:
    return silu(gate) * up


def reglu(gate: Expression, up: Expression) -> Expression:
    return relu(gate) * up


def geglu(gate: Expression, up: Expression) -> Expression:
    return gelu(gate) * up


def geglu_quick(gate: Expression, up: Expression) -> Expression:
    return gelu_quick(gate) * up


def geglu_erf(gate: Expression, up: Expression) -> Expression:
    return gelu_erf(gate) * up


def swiglu_oai(
    gate: Expression, up: Expression, *, alpha: Expression, limit: Expression
) -> Expression:
    """Beyond a limit the slope is 0."""
    g = minimum(gate, limit)
    return g * sigmoid(alpha * g) * (clip(up, -limit, limit) + 1)


def swiglu_clamp(gate: Expression, up: Expression, *, limit: Expression) -> Expression:
    return silu(minimum(gate, limit)) * clip(up, -limit, limit)


# -- rows -----------------------------------------------------------------------------------------


def sum_rows(x: Expression) -> Expression:
    return wide_total(x)


def mean_of_row(x: Expression) -> Expression:
    return wide_total(x) / LENGTH


def rms_norm(x: Expression, *, eps: Expression) -> Expression:
    return x / sqrt(mean(x * x) + eps)


def rms_norm_mul(x: Expression, w: Expression, *, eps: Expression) -> Expression:
    return rms_norm(x, eps=eps) * w


def norm(x: Expression, *, eps: Expression) -> Expression:
    centred = x - mean(x)
    return rms_norm(centred, eps=eps)


def l2_norm(x: Expression, *, eps: Expression) -> Expression:
    return x / maximum(sqrt(total(x * x)), eps)


def _exponentials(z: Expression, sink: Expression) -> tuple[Expression, Expression, Expression]:
    """(e, e of the sink, Σ of all) of scores less their greatest. All are 0 where each is -inf."""
    top = maximum(largest(z), sink)
    top = where(top <= LOWEST, 0, top)
    e, lost = exp(z - top), exp(sink - top)
    return e, lost, maximum(total(e) + lost, 1)  # less than 1 if there is no score


def soft_max(
    x: Expression, mask: Expression, slope: Expression, sink: Expression, *, scale: Expression
) -> Expression:
    e, _, all_of_them = _exponentials(scale * x + slope * mask, sink)
    return e / all_of_them


def sink_share(
    x: Expression, mask: Expression, slope: Expression, sink: Expression, *, scale: Expression
) -> Expression:
    """What the sink of a row has of its softmax."""
    _, lost, all_of_them = _exponentials(scale * x + slope * mask, sink)
    return lost / all_of_them


def soft_max_back(dy: Expression, y: Expression, *, scale: Expression) -> Expression:
    return scale * y * (dy - total(y * dy))


def cross_entropy(logits: Expression, token: Expression, weight: Expression) -> Expression:
    """-weight · ln softmax(logits)[token]; a row has one token and one weight."""
    top = largest(logits)
    return weight * (log(total(exp(logits - top))) - (pick(logits, token) - top))


def is_right(logits: Expression, token: Expression, weight: Expression) -> Expression:
    """1 for a row that counts and whose token has the greatest logit, else 0."""
    return where(pick(logits, token) >= largest(logits), sgn(weight) * sgn(weight), 0)


def share(mask: Expression) -> Expression:
    """The weight in the mean of all rows that count, of a mask as one row."""
    counts = where(mask > 0.5, 1, 0)
    return counts / maximum(total(counts), 1)


def labelled(logits: Expression, labels: Expression, share: Expression) -> Expression:
    """-share · Σ labels · ln softmax(logits), 0 where a row has no share."""
    top = largest(logits)
    all_labels = total(labels) * log(total(exp(logits - top)))
    return where(share > 0, share * (all_labels - total(labels * (logits - top))), 0)


def _above_mixture(
    q: Expression, log_p: Expression, beta: Expression
) -> tuple[Expression, Expression]:
    """(ln m, p · ln(p / m) times 1 - beta, at beta of 1 times 1), m = (1 - beta) · p + beta · q."""
    p, share = exp(log_p), where(beta < 1, 1 - beta, 1)
    log_m = log(maximum((1 - beta) * p + beta * q, LEAST))
    return log_m, where(p > 0, share * p * (log_p - log_m), 0)


def case_loss(q: Expression, log_p: Expression, *, beta: Expression) -> Expression:
    """What a case of probability p adds to a loss that wants q: see pyggml/ops/loss/soft.py."""
    log_m, above = _above_mixture(q, log_p, beta)
    divergence = beta * q * (log(maximum(q, LEAST)) - log_m) + above
    return where(beta > 0, divergence, where(q > 0, -(q * log_p), 0))


def case_pull(q: Expression, log_p: Expression, *, beta: Expression) -> Expression:
    """How much more of p the loss wants: its slope by ln p with the sign turned, less what all
    cases have in common with p."""
    return where(beta > 0, -_above_mixture(q, log_p, beta)[1], q)


# -- steps of optimisers: the new parameter, then the new moments ---------------------------------


def moments(
    g: Number, m: Number, v: Number, *, beta1: Number | float, beta2: Number | float
) -> tuple[Number, Number]:
    """The running means of g and of g²."""
    return m * beta1 + g * (1 - beta1), v * beta2 + g * g * (1 - beta2)


def move_parameter(
    p: Expression, m: Expression, v: Expression, *, alpha: Expression, eps: Expression,
    decay: Expression, beta1h: Expression, beta2h: Expression,
) -> Expression:  # fmt: skip
    """p after AdamW's step with these moments."""
    return p * (1 - alpha * decay) - alpha * (m * beta1h) / (sqrt(v * beta2h) + eps)


def opt_step_adamw(
    p: Expression, g: Expression, m: Expression, v: Expression, *, alpha: Expression,
    beta1: Expression, beta2: Expression, eps: Expression, decay: Expression, beta1h: Expression,
    beta2h: Expression,
) -> tuple[Expression, ...]:  # fmt: skip
    m, v = moments(g, m, v, beta1=beta1, beta2=beta2)
    hats = {"beta1h": beta1h, "beta2h": beta2h}
    return move_parameter(p, m, v, alpha=alpha, eps=eps, decay=decay, **hats), m, v


def opt_step_lion(
    p: Expression, g: Expression, m: Expression, *, alpha: Expression, beta1: Expression,
    beta2: Expression, decay: Expression,
) -> tuple[Expression, ...]:  # fmt: skip
    along = m * beta1 + g * (1 - beta1)
    return p * (1 - alpha * decay) - alpha * sgn(along), m * beta2 + g * (1 - beta2)


def opt_step_sgd(
    p: Expression, g: Expression, *, alpha: Expression, decay: Expression
) -> Expression:
    return p * (1 - alpha * decay) - alpha * g


def accumulate(so_far: Expression, g: Expression, *, keeps: Expression) -> Expression:
    return where(keeps > 0, so_far, 0) + g
