"""Logistic regression to its minimum: loss and gradient by a bound graph, steps by L-BFGS.

Nocedal and Wright, Numerical Optimization, algorithm 7.4.
"""

from collections.abc import Callable

import numpy as np

from pyggml import functions as F
from pyggml.backward import build_backward
from pyggml.eager.activation import Activation
from pyggml.eager.value import Value
from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import leaf, zeros
from pyggml.runtime import Devices, bind, schedule

_HISTORY, _MOST_STEPS = 12, 500
_FLAT = 1e-6  # a slope at which the minimum is reached
_NOISE = 1e-6  # of a loss in float32, by which a step may seem to rise
Evaluate = Callable[[np.ndarray], tuple[float, np.ndarray]]


def logistic_regression(
    x: np.ndarray, number: np.ndarray, n_classes: int, l2: float
) -> tuple[np.ndarray, np.ndarray]:
    """Weights (n_out, n) and bias (n_out,), float64, for rows x (N, n) of classes 0 to n_classes−1.

    The mean cross entropy plus l2/2 · ‖weights‖² is least. Of two classes n_out is 1: the log-odds
    of the second; else it is n_classes.
    """
    n_out = 1 if n_classes == 2 else n_classes
    w, b = zeros((n_out, x.shape[1]), F32, "w"), zeros((n_out,), F32, "b")
    weights, bias = Activation(w), Activation(b)
    logits = Value(leaf(np.ascontiguousarray(x, np.float32)), False) @ weights.T + bias
    penalty = (weights * weights).sum() * (l2 / 2)
    program = Graph.of(loss=(_cross_entropy(logits, number) + penalty).node)
    graph = build_backward(program, [w, b])
    run = bind(schedule(graph, Devices()))

    def evaluate(p: np.ndarray) -> tuple[float, np.ndarray]:
        write(w, p[: w.n_elements].reshape(w.shape))
        write(b, p[w.n_elements :])
        run()
        loss, *grads = (run.read(t).astype(np.float64) for t in graph.outputs)
        return float(loss), np.concatenate([g.reshape(-1) for g in grads])

    best = minimise(evaluate, np.zeros(w.n_elements + n_out))
    return best[: w.n_elements].reshape(w.shape), best[w.n_elements :]


def _cross_entropy(logits: Value, number: np.ndarray) -> Value:
    """The mean over rows; logits (N, n_out), number (N,)."""
    if logits.shape[1] > 1:
        return F.cross_entropy(logits, number.astype(np.int32))
    z = logits.reshape(-1)
    return (F.softplus(z) - z * number.astype(np.float32)).mean()


def minimise(evaluate: Evaluate, start: np.ndarray) -> np.ndarray:
    """Where a smooth convex function of float32 is least, float64.

    evaluate: p → value, gradient. It ends where no number of the gradient is above _FLAT,
    or where steps no longer lower the value by more than its rounding.
    """
    p, (value, g) = start, evaluate(start)
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for _ in range(_MOST_STEPS):
        if np.abs(g).max() <= _FLAT:
            break
        d = _direction(g, pairs)
        size = 1.0 if pairs else min(1.0, 1 / float(np.linalg.norm(g)))
        slope = float(g @ d)
        for _ in range(30):
            after, g_after = evaluate(p + size * d)
            if after <= value + 1e-4 * size * slope + _NOISE * abs(value):
                break
            size /= 2
        else:
            break
        s, y = size * d, g_after - g
        if s @ y <= 0:
            break
        pairs = [*pairs[-_HISTORY + 1 :], (s, y)]
        p, value, g = p + s, after, g_after
    return p


def _direction(g: np.ndarray, pairs: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """−H·g, H the inverse of the curvature that the last steps and gradients show."""
    q, shares = g.copy(), []
    for s, y in reversed(pairs):
        share = (s @ q) / (s @ y)
        q -= share * y
        shares.append(share)
    if pairs:
        s, y = pairs[-1]
        q *= (s @ y) / (y @ y)
    for (s, y), share in zip(pairs, reversed(shares), strict=True):
        q += (share - (y @ q) / (s @ y)) * s
    return -q
