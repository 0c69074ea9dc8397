"""Ops whose formulas have reductions, such as norms and softmax: a workgroup for each row. And
causal masks."""

from collections.abc import Iterator, Sequence
from functools import cache, partial

import numpy as np

from pyggml.backends.webgpu.runtime.kernel import ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.formulas import FUNCTIONS, WGSL
from pyggml.backends.webgpu.wgsl.shader import BufferRange, Dispatch, whole
from pyggml.formulas.formula import Formula
from pyggml.formulas.rows import SUMS, Pass
from pyggml.graph.tensor import Shape
from pyggml.ops import OPS
from pyggml.ops.attention.softmax import soft_max_rows

_START = {**dict.fromkeys(SUMS, "0.0"), "largest": "-3e38"}
_ADD = {**dict.fromkeys(SUMS, "{0} + {1}"), "largest": "max({0}, {1})"}
_AXES = ("let b = group / (axis1 * axis2); let h = group / axis2 % axis1; let q = group % axis2;",)
_TILE = "let {0}_row = ((b % {0}_axis0) * {0}_axis1 + h % {0}_axis1) * {0}_axis2 + q % {0}_axis2;"
_JOIN = {**dict.fromkeys(SUMS, "summed"), "largest": "highest"}


@cache
def _text(of: Formula) -> str:
    """The shader of a row; a source is x_at(i), a setting p_NAME."""
    lines = ["if (group >= ROWS) { return; } let first = group * N; let n = f32(N);"]
    lines += [*_AXES, *(_TILE.format(s) for s in of.tiled)] if of.tiled else []
    for s in of.single:
        lines.append(
            f"let {s} = f32({s}_at({f'{s}_row' if s in of.tiled else f'group % MANY_{s}'}));"
        )
    wrong = (f"(u32(max({s}, 0.0)) >= N || {s} < 0.0)" for s in sorted(of.picks))
    lines += [
        f"if (me == 0u && {is_wrong}) {{ put_fault(0u, i32(NO_TOKEN)); }}" for is_wrong in wrong
    ]
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
    statements, values = WGSL.lines(step.values, settings)
    stores = []
    for i, value in enumerate(values):
        if step.sums:
            how, s = step.sums[i]
            statements.append(f"mine_{s} = {_ADD[how].format(f'mine_{s}', value)};")
        elif of.rows.differs(step.values[i]):
            statements.append(f"put_y{i}(first + i, {value});")
        else:
            stores.append(f"if (me == 0u) {{ put_y{i}(group, {value}); }}")
    if statements:
        yield "for (var i = me; i < N; i += 256u) {"
        for s in of.reads(*step.values):
            at = "i" if s in of.shared else "first + i"
            load = f"max({s}_at({s}_row * N + i), -3e38)" if s in of.tiled else f"{s}_at({at})"
            yield f"let {s} = {'f32(i)' if s == 'place' else load};"
        yield from (*statements, "}")
    yield from stores
    yield from (f"let {s} = {_JOIN[how]}(me, mine_{s});" for how, s in step.sums)


def rows_dispatch(
    of: Formula,
    site: ShaderSite,
    results: Sequence[BufferRange],
    sources: Sequence[BufferRange],
    n: int,
    axes: Sequence[Shape] = (),
) -> Dispatch:
    """The dispatch of a formula's shader for rows of n numbers.

    axes: of rows, three of each source, if some are tiled
    """
    views = dict(zip(of.sources, sources, strict=True))
    many = {f"MANY_{s}": views[s].n_bytes // views[s].size for s in of.single}
    whole_rows = views[of.along[0]]
    n_rows = whole_rows.n_bytes // (whole_rows.size * max(n, 1))
    constants: dict[str, int | float] = {"N": n, "ROWS": n_rows, **many}
    constants |= {f"p_{name}": float(site.node.params[name]) for name in of.settings}
    if of.tiled:
        for s, three in zip(of.sources, axes, strict=True):
            constants |= {f"{s}_axis{i}": size for i, size in enumerate(three)}
        constants |= {f"axis{i}": size for i, size in enumerate(axes[0])}
    if of.picks:
        assert site.node.op is not None
        sentence = f"{site.node.op.name}: a target is outside the vocabulary of {n} tokens"
        views["fault"], constants["NO_TOKEN"] = site.fault(sentence)
    views |= {f"y{i}": y for i, y in enumerate(results)}
    return site.shaders.dispatch(_text(of), views, n_rows, constants)


def _by_row(of: Formula, site: ShaderSite) -> Sequence[Dispatch]:
    x = site.node.src[of.sources.index(of.along[0])]
    n = x.shape[-1] if x.shape else 1
    return [rows_dispatch(of, site, [site.out], site.src, n)]


for _op in OPS.values():
    if _op.formula is not None and _op.formula.of_rows:
        declare(_op.name, partial(_by_row, _op.formula))

# -- softmax of rows with mask, ALiBi and sinks; causal masks --------------------------------------


def _soft_max(site: ShaderSite) -> Sequence[Dispatch]:
    of, sources, axes = soft_max_rows(site.node, site.src, site.constant)
    n = site.node.shape[-1] if site.node.shape else 1
    return [rows_dispatch(of, site, [site.out, *site.saved], sources, n, axes)]


_CAUSAL = "put_y(i, select(bitcast<f32>(FILL), x_at(i), i % N <= N_PAST + i / N % ROWS));"


def _causal(fill: float, site: ShaderSite) -> Sequence[Dispatch]:
    *_, rows, n = site.node.shape
    constants = {"N": n, "ROWS": rows, "FILL": int(np.float32(fill).view(np.uint32))}
    return site.each(_CAUSAL, "x", {**constants, "N_PAST": int(site.node.params["n_past"])})


declare("soft_max", _soft_max)
declare("diag_mask_inf", partial(_causal, -np.inf))
declare("diag_mask_zero", partial(_causal, 0.0))
