"""The reverse walk: the chain rule, accumulation, un-broadcasting, and pruning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from pyggml.backward.recompute import Keep, Recompute, recompute
from pyggml.errors import NoGradientError, ShapeError
from pyggml.graph import topological
from pyggml.op import OPS, NoGrad
from pyggml.ops import add, add_inplace, repeat_back
from pyggml.tensor import Tensor, leaf, next_place

# Ops that fuse another with the addition of its result to their first source.
_ADDING = {op.fuses[0]: op for op in OPS.values() if op.fuses[1:] == ("add",)}


def build_backward(
    loss: Tensor,
    parameters: Sequence[Tensor],
    seed: Tensor | None = None,
    accumulators: Sequence[Tensor] | None = None,
    keep: Keep = Keep.ALL,
) -> list[Tensor]:
    """One tensor for each parameter that will hold d(sum(loss · seed)) / d(parameter).

    `seed` has the loss's shape (default: ones). With `accumulators`, leaves of the parameters'
    shapes, each gradient is added to its accumulator in place as soon as it is complete, and the
    results are views of those. What no parameter reaches gets no backward node. Integers carry no
    gradient: what is chosen by number, such as the experts of a token, counts as fixed.
    `keep` trades memory for time and changes no bit of a gradient; the stand-ins of forward tensors
    do, by their rounding.
    Raises NoGradientError, before anything is computed, if an op on the way has no gradient, if a
    parameter does not reach the loss, or if a gradient needs numbers that were written over since;
    ShapeError if a seed or an accumulator has another shape.
    """
    _same_shapes("seed", [seed or loss], [loss])
    if accumulators is not None:
        _same_shapes("accumulator", accumulators, parameters)
    order = topological(loss)
    reached = _reached_from(parameters, order)
    _refuse_gaps(loss, parameters, order, reached)
    seed = seed or leaf(np.ones(loss.shape, np.float32), "d(loss)")
    again = Recompute(set(), set())
    if keep is not Keep.ALL or any(t.stand_in for t in order):
        gradients = _walk(_Sums(parameters, None, order), seed, reached, again)
        again = recompute(keep, loss, gradients)
    found = _walk(_Sums(parameters, accumulators, order), seed, reached, again)
    _refuse_changed(order, found)
    return found


def _walk(sums: _Sums, seed: Tensor, reached: set[Tensor], again: Recompute) -> list[Tensor]:
    """Every node's gradient rule, from the loss, which comes last in the order, to the start."""
    grads = {sums.order[-1]: seed}
    faults: list[str] = []
    for t in reversed(sums.order):
        if t.op is not None and t in reached and t in grads:
            faults += _propagate(t, grads, reached, again)
        sums.add_those_after(t, grads)
    if faults:
        raise NoGradientError("; ".join(faults))
    return sums.of(grads)


class _Sums:
    """The parameters' gradients, each added to its accumulator after its last contribution."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        accumulators: Sequence[Tensor] | None,
        order: list[Tensor],
    ) -> None:
        self.parameters, self.accumulators, self.order = parameters, accumulators, order
        self.sums: dict[int, Tensor] = {}  # of parameter i
        wanted = set(parameters)
        first_user = {s: t for t in reversed(order) for s in t.src if s in wanted}
        self.after: dict[Tensor, list[int]] = defaultdict(list)
        for i, p in enumerate(parameters if accumulators else ()):
            self.after[first_user.get(p, p)].append(i)

    def add_those_after(self, t: Tensor, grads: Mapping[Tensor, Tensor]) -> None:
        """Add what is complete once the walk has passed t."""
        assert self.accumulators is not None or not self.after
        for i in self.after.get(t, ()):
            g = grads.get(self.parameters[i])
            if g is not None and self.accumulators is not None:  # no gradient is a fault found
                self.sums[i] = add_inplace(self.accumulators[i], g)

    def of(self, grads: Mapping[Tensor, Tensor]) -> list[Tensor]:
        """The gradients, or the accumulators with these added, in the order of the parameters."""
        for p in self.parameters:
            if not grads[p].name:
                grads[p].name = f"d({p.name})" if p.name else ""
        if self.accumulators is None:
            return [grads[p] for p in self.parameters]
        return [self.sums[i] for i in range(len(self.parameters))]


def _same_shapes(what: str, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    if len(found) != len(wanted):
        raise ShapeError(f"build_backward: {len(found)} {what}s, wanted {len(wanted)}")
    for f, w in zip(found, wanted, strict=True):
        if f.shape != w.shape:
            raise ShapeError(f"build_backward: the {what} for {w!r} is {f!r}, wanted its shape")


def _reached_from(parameters: Sequence[Tensor], order: list[Tensor]) -> set[Tensor]:
    """The tensors whose value changes smoothly with a parameter."""
    reached = set(parameters)
    for t in order:
        if not _is_integer(t) and any(s in reached for s in t.src):
            reached.add(t)
    return reached


def _reaching(loss: Tensor, order: list[Tensor]) -> set[Tensor]:
    """The tensors from which a way without integers leads to the loss."""
    reaching = {loss}
    for t in reversed(order):
        if t in reaching and not _is_integer(t):
            reaching.update(t.src)
    return reaching


def _is_integer(t: Tensor) -> bool:
    return t.dtype.numpy.kind == "i"


def _refuse_gaps(
    loss: Tensor, parameters: Sequence[Tensor], order: list[Tensor], reached: set[Tensor]
) -> None:
    """Every way from a parameter to the loss must be differentiable; all faults at once."""
    known = _reaching(loss, order)
    faults = [f"{p.name or repr(p)} does not reach the loss" for p in parameters if p not in known]
    faults += [
        f"{t.op.name} at {_place(t)} has no gradient ({t.op.grad.reason})"
        for t in order
        if t in reached and t in known and t.op is not None and isinstance(t.op.grad, NoGrad)
    ]
    if faults:
        raise NoGradientError("; ".join(faults))


def _refuse_changed(order: list[Tensor], gradients: Sequence[Tensor]) -> None:
    """A backward node must not read a forward tensor whose memory a later node has changed."""
    writers = (t for t in order if t.base is not None and not t.is_view)
    last = {t.root: t for t in writers}
    forward = set(order)
    faults = {
        f"a gradient needs {_place(s)}, over which {_place(last[s.root])} has written since"
        for t in (topological(*gradients) if last else ())
        if t not in forward
        for s in t.src
        if s.root in last and s.place < last[s.root].place
    }
    if faults:
        raise NoGradientError("; ".join(sorted(faults)))


def _place(t: Tensor) -> str:
    """Where a node stands: its name, else the first named tensor among what it is made of."""
    if t.name:
        return t.name
    for s in reversed(topological(t)):
        if s.name:
            return f"{t!r} (after {s.name})"
    return repr(t)


def _propagate(
    t: Tensor, grads: dict[Tensor, Tensor], reached: set[Tensor], again: Recompute
) -> list[str]:
    """Add t's contribution to the gradients of its sources; what is wrong with that."""
    assert t.op is not None and not isinstance(t.op.grad, NoGrad)
    before = next_place()
    parts = again.redirect(t.op.grad(t, grads[t]), before)
    if len(parts) != len(t.src):
        raise AssertionError(f"{t.op.name}: {len(parts)} gradients for {len(t.src)} sources")
    faults = []
    for i, (s, g) in enumerate(zip(t.src, parts, strict=True)):
        if s not in reached:
            continue
        if g is None:
            faults.append(
                f"{t.op.name} at {_place(t)} has no gradient for its source {i} ({s!r}), "
                "which depends on a parameter"
            )
            continue
        if g.shape != s.shape:
            g = repeat_back(g, s.shape)
        grads[s] = _sum(grads[s], g) if s in grads else g
    return faults


def _sum(total: Tensor, part: Tensor) -> Tensor:
    """total + part, in one node where an op does both: products are added as they are made."""
    fused = _ADDING.get(part.op.name) if part.op is not None else None
    return add(total, part) if fused is None else fused(total, *part.src, **part.params)
