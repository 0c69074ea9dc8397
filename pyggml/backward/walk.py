"""The reverse walk: the chain rule, accumulation, un-broadcasting, and pruning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyggml.errors import NoGradientError
from pyggml.graph import topological
from pyggml.ops import add, add_inplace, repeat_back
from pyggml.tensor import NoGrad, Tensor, leaf


def build_backward(
    loss: Tensor,
    parameters: Sequence[Tensor],
    seed: Tensor | None = None,
    accumulators: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """One tensor for each parameter that will hold d(sum(loss · seed)) / d(parameter).

    `seed` has the loss's shape (default: ones). With `accumulators`, leaves of the parameters'
    shapes, each gradient is added to its accumulator in place instead, and the results are views
    of those. What no parameter reaches gets no backward node.
    Raises NoGradientError, before anything is computed, if an op on the way has no gradient or
    a parameter does not reach the loss.
    """
    order = topological(loss)
    reached = _reached_from(parameters, order)
    _refuse_gaps(loss, parameters, order, reached)
    grads = {loss: seed or leaf(np.ones(loss.shape, np.float32), "d(loss)")}
    for t in reversed(order):
        if t.op is not None and t in reached and t in grads:
            _propagate(t, grads, reached)
    found = [grads[p] for p in parameters]
    for p, g in zip(parameters, found, strict=True):
        if not g.name:
            g.name = f"d({p.name})" if p.name else ""
    if accumulators is None:
        return found
    return [add_inplace(a, g) for a, g in zip(accumulators, found, strict=True)]


def _reached_from(parameters: Sequence[Tensor], order: list[Tensor]) -> set[Tensor]:
    """The tensors whose value depends on a parameter."""
    reached = set(parameters)
    for t in order:
        if any(s in reached for s in t.src):
            reached.add(t)
    return reached


def _refuse_gaps(
    loss: Tensor, parameters: Sequence[Tensor], order: list[Tensor], reached: set[Tensor]
) -> None:
    """Every way from a parameter to the loss must be differentiable; all faults at once."""
    faults = []
    known = set(order)
    for p in parameters:
        if p not in known:
            faults.append(f"{p.name or p!r} does not reach the loss")
    for t in order:
        if t in reached and t.op is not None and isinstance(t.op.grad, NoGrad):
            faults.append(f"{t.op.name} at {_place(t)} has no gradient ({t.op.grad.reason})")
    if faults:
        raise NoGradientError("; ".join(faults))


def _place(t: Tensor) -> str:
    """Where a node stands: its name, else the first named tensor among what it is made of."""
    if t.name:
        return t.name
    for s in reversed(topological(t)):
        if s.name:
            return f"{t!r} (after {s.name})"
    return repr(t)


def _propagate(t: Tensor, grads: dict[Tensor, Tensor], reached: set[Tensor]) -> None:
    """Add t's contribution to the gradients of its sources."""
    assert t.op is not None and not isinstance(t.op.grad, NoGrad)
    parts = t.op.grad(t, grads[t])
    if len(parts) != len(t.src):
        raise AssertionError(f"{t.op.name}: {len(parts)} gradients for {len(t.src)} sources")
    for i, (s, g) in enumerate(zip(t.src, parts, strict=True)):
        if s not in reached:
            continue
        if g is None:
            raise NoGradientError(
                f"{t.op.name} at {_place(t)} has no gradient for its source {i} ({s!r}), "
                "which depends on a parameter"
            )
        if g.shape != s.shape:
            g = repeat_back(g, s.shape)
        grads[s] = add(grads[s], g) if s in grads else g
