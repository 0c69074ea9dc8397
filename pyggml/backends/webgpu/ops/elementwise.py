"""Element by element: one number of the result from one number of each source, by a formula.

A shader names the sources' numbers a, b and c, and the op's parameters p_NAME.
"""

from collections.abc import Sequence
from functools import partial
from math import prod

from pyggml.backends.webgpu.runtime.kernel import ShaderSite, numbers
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.formulas import FUNCTIONS, statements_of
from pyggml.backends.webgpu.wgsl.shader import Dispatch
from pyggml.formulas.formula import Formula, formula
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import MAX_AXES, Tensor
from pyggml.ops import OPS
from pyggml.ops.activation.glu import SWIGLU_GRADIENTS
from pyggml.ops.formulas import repeat

_NAMES = "abc"
_REPEATED = " + ".join(f"(i / BELOW{a}) % MANY{a} % FEW{a} * STEP{a}" for a in range(MAX_AXES))


def _apply(of: Formula, site: ShaderSite) -> Sequence[Dispatch]:
    """y_i by a formula of up to three sources, the last of which is repeated; further results of
    the formula are the node's saved ones."""
    statements = statements_of(of, dict(zip(of.sources, _NAMES, strict=False)))
    n, names = site.node.n_elements, _NAMES[: len(site.src)]
    indices = dict.fromkeys(names, "i")
    settings = {k: v for k, v in site.node.params.items() if isinstance(v, int | float)}
    constants: dict[str, int | float] = {f"p_{k}": float(v) for k, v in settings.items()}
    if site.node.src[-1].n_elements != n:
        indices[names[-1]] = _REPEATED
        constants |= _repeats(site.node)
    loads = " ".join(f"let {name} = {name}s_at({at});" for name, at in indices.items())
    views = {f"y{i or ''}": y for i, y in enumerate((site.out, *site.saved))}
    puts = " ".join(f"put_{y}(i, {y});" for y in views)
    for name, v, t in zip(names, site.src, site.node.src, strict=True):
        views[f"{name}s"] = numbers(v, t.dtype)
    body = "\n".join((loads, statements, puts))
    return [site.shaders.each(body, n, views, constants, FUNCTIONS)]


def _not_f32(node: Tensor) -> str | None:
    return None if node.dtype is F32 else f"{node.dtype} has no kernel here"


def _repeats(node: Tensor) -> dict[str, int]:
    """What _REPEATED names: where an element finds its number in a source that is repeated."""
    shapes = (node.shape, node.src[-1].shape)
    large, small = ((1,) * (MAX_AXES - len(s)) + s for s in shapes)
    constants: dict[str, int] = {}
    for a in range(MAX_AXES):
        constants |= {f"BELOW{a}": prod(large[a + 1 :]), f"STEP{a}": prod(small[a + 1 :])}
        constants |= {f"MANY{a}": large[a], f"FEW{a}": small[a]}
    return constants


declare("swiglu_back", partial(_apply, SWIGLU_GRADIENTS), _not_f32, mixed=(0, 1))
declare("repeat", partial(_apply, formula(repeat)), _not_f32)

for _op in OPS.values():
    if _op.formula is not None and not _op.formula.of_rows:
        declare(_op.name, partial(_apply, _op.formula), _not_f32)
