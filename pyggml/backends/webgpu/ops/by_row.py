"""Ops whose formulas have reductions, such as norms: a workgroup for each row."""

from collections.abc import Iterator, Sequence

from pyggml.backends.webgpu.runtime.kernel import ShaderKernel, ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.formulas import FUNCTIONS, WGSL
from pyggml.backends.webgpu.wgsl.shader import Dispatch, whole
from pyggml.formulas.formula import Formula
from pyggml.formulas.rows import Pass
from pyggml.ops import OPS

_START = {"sum": "0.0", "largest": "-3e38"}
_ADD = {"sum": "{0} + {1}", "largest": "max({0}, {1})"}
_JOIN = {"sum": "summed", "largest": "highest"}


def _text(of: Formula) -> str:
    """The shader of a row; a source is x_at(i), a setting p_NAME."""
    lines = ["if (group >= ROWS) { return; } let first = group * N; let n = f32(N);"]
    for i, step in enumerate(of.rows.passes(of.results)):
        lines += _lines(of, step, f"t{i}_")
    return FUNCTIONS + whole("\n".join(lines))


def _lines(of: Formula, step: Pass, temporary: str) -> Iterator[str]:
    """A pass: what a row has in common, the loop, and what the threads join."""
    settings = {name: f"p_{name}" for name in of.settings}
    statements, values = WGSL.lines([value for _, value in step.common], settings, temporary)
    yield from statements
    yield from (f"let {c} = {v};" for (c, _), v in zip(step.common, values, strict=True))
    yield from (f"var mine_{s} = {_START[how]};" for how, s in step.sums)
    yield "for (var i = me; i < N; i += 256u) {"
    for s in of.sources_of(*step.values):
        yield f"let {s} = {s}_at({'i' if s in of.shared else 'first + i'});"
    statements, values = WGSL.lines(step.values, settings)
    yield from statements
    for (how, s), value in zip(step.sums, values, strict=bool(step.sums)):
        yield f"mine_{s} = {_ADD[how].format(f'mine_{s}', value)};"
    if not step.sums:
        yield f"put_y0(first + i, {values[0]});"
    yield "}"
    yield from (f"let {s} = {_JOIN[how]}(me, mine_{s});" for how, s in step.sums)


def _by_row(of: Formula) -> ShaderKernel:
    text = _text(of)

    def bind(site: ShaderSite) -> Sequence[Dispatch]:
        n = site.node.shape[-1] if site.node.shape else 1
        rows = site.node.n_elements // n
        views = {"y0": site.out, **dict(zip(of.sources, site.src, strict=True))}
        settings = {f"p_{name}": float(site.node.params[name]) for name in of.settings}
        return [site.shaders.dispatch(text, views, rows, {"N": n, "ROWS": rows, **settings})]

    return ShaderKernel(bind)


for _op in OPS.values():
    if _op.formula is not None and _op.formula.of_rows:
        declare(_op.name, _by_row(_op.formula))
