"""Windows of a tensor: numbers written into one, added to one; see pyggml/ops/layout/view.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyggml.backends.cuda.code.axes import offset_of, sizes, steps_of
from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.ops.layout import copied, filled
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Kernel, Site
from pyggml.backends.cuda.runtime.launches import in_turn, per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor


@kernel
def _set(out, b, shape, steps, offset):
    for i in range(cuda.grid(1), b.size, cuda.gridsize(1)):
        out[offset + offset_of(i, shape, steps)] = b[i]


@kernel
def _add(out, b, shape, steps, offset):
    for i in range(cuda.grid(1), b.size, cuda.gridsize(1)):
        out[offset + offset_of(i, shape, steps)] += b[i]


def _overlaps(node: Tensor) -> str | None:
    """Additions to one number from several threads have no order."""
    window, reach = node.src[-1], 0
    for step, n in sorted(zip(node.params["strides"], window.shape, strict=True)):
        if n > 1 and step <= reach:
            return "a window whose elements overlap"
        reach += (n - 1) * step
    return None


def _after(first: Callable[[Site], Call], run: Any) -> Callable[[Site], Call]:
    """`first` makes the whole, `run` puts the last source into its window."""

    def bind(site: Site) -> Call:
        window, p = site.node.src[-1], site.node.params
        where = (sizes(window.shape), steps_of(p["strides"]), p["offset"])
        put = per_element(run, window.n_elements, site.stream, site.out, site.src[-1], *where)
        return in_turn(first(site), put)

    return bind


def _first(site: Site) -> Call:
    return copied(site.out, site.src[0], site.node.src[0], site.stream)


def _zeros(site: Site) -> Call:
    return filled(site, ZERO)


declare("acc", Kernel(_after(_first, _add), _overlaps))
declare("set", Kernel(_after(_first, _set)))
declare("view_back", Kernel(_after(_zeros, _add), _overlaps))
