"""Losses of rows of logits: the sums of the rows' losses, and their weights in a mean.

`LossViews` are rows with several targets, as cards have them (`cuda/ops/loss/losses.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple, Self

from pyggml.backends.webgpu.ops.by_row import rows_dispatch
from pyggml.backends.webgpu.ops.reduce import sum_of
from pyggml.backends.webgpu.runtime.kernel import ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.formulas import CAPPED, statements_of
from pyggml.backends.webgpu.wgsl.shader import LINE, BufferRange, Dispatch, Shaders, whole
from pyggml.formulas.formula import Formula
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Tensor
from pyggml.ops.formulas import LEAST, LOWEST
from pyggml.ops.loss.loss import LABELLED, LABELLED_BACK, ROWS, SHARE, equal_shares
from pyggml.ops.loss.soft import CASE, ONE_TARGET
from pyggml.sizes import round_up


def _logits(node: Tensor) -> Tensor:
    return next(s for s in node.src if s.shape)


def _scratch(node: Tensor, shaders: Shaders) -> int:
    """Two numbers of each row of logits."""
    return 2 * round_up(F32.block_bytes * prod(_logits(node).shape[:-1]), LINE)


def _two_numbers(site: ShaderSite) -> tuple[BufferRange, BufferRange]:
    """Of each row, in scratch."""
    n_rows = prod(_logits(site.node).shape[:-1])
    second = round_up(F32.block_bytes * n_rows, LINE) // F32.block_bytes
    return site.scratch.part(0, n_rows), site.scratch.part(second, n_rows)


def _rows(site: ShaderSite) -> Sequence[Dispatch]:
    losses, right = rows = _two_numbers(site)
    sums = sum_of(site, site.out, losses), sum_of(site, site.saved[0], right)
    return [rows_dispatch(ROWS, site, rows, site.src, _logits(site.node).shape[-1]), *sums]


def _of_labels(of: Formula, site: ShaderSite, out: BufferRange) -> list[Dispatch]:
    """The dispatches for a formula of the shares that the mask gives rows."""
    n_others, logits, shares = len(of.sources) - 1, _logits(site.node), _two_numbers(site)[0]
    sources, mask = site.src[:n_others], site.src[n_others:]
    n_rows = prod(logits.shape[:-1])
    calls = [rows_dispatch(SHARE, site, [shares], mask, n_rows)] if mask else []
    if not mask:
        shares = site.constant(equal_shares(n_rows))
    return [*calls, rows_dispatch(of, site, [out], [*sources, shares], logits.shape[-1])]


def _loss(site: ShaderSite) -> Sequence[Dispatch]:
    terms = _two_numbers(site)[1]
    return [*_of_labels(LABELLED, site, terms), sum_of(site, site.out, terms)]


declare("cross_entropy_rows", _rows, scratch=_scratch)
declare("cross_entropy_loss", _loss, scratch=_scratch)
declare(
    "cross_entropy_loss_back",
    lambda site: _of_labels(LABELLED_BACK, site, site.out),
    scratch=_scratch,
)

# -- rows with several targets --------------------------------------------------------------------

_LOSSES = f"""{CAPPED}
fn case_of(q: f32, log_p: f32) -> vec2<f32> {{
    let p_beta = BETA;
    {statements_of(CASE, {})}
    return vec2(y, y1);
}}
fn logit_at(i: u32) -> f32 {{  // of a target, which is taken out, the lowest
    let z = z_at(i);
    if (z <= {LOWEST}) {{ return z; }}
    return capped(z);
}}
fn is_token(target_: i32) -> bool {{ return target_ >= 0 && u32(target_) < N; }}
""" + whole(f"""
    if (group >= ROWS) {{ return; }}
    let start = group * N;
    let first = group * K;
    let share = group * (K + 1u) % MANY_shares;
    let weight = weights_at(group);
    var mine = {LOWEST};
    for (var s = me; s < K; s += 256u) {{
        let target_ = targets_at(first + s);
        var logit = {LOWEST};
        if (is_token(target_)) {{ logit = logit_at(start + u32(target_)); }}
        else if (weight != 0.0) {{ put_fault(0u, i32(NO_TOKEN)); }}
        put_slopes(first + s, logit);
        mine = max(mine, logit);
    }}
    let right = slopes_at(first);  // of the first thread
    storageBarrier();
    workgroupBarrier();
    for (var s = me; s < K; s += 256u) {{
        let target_ = targets_at(first + s);
        if (is_token(target_)) {{ put_z(start + u32(target_), {LOWEST}); }}
    }}
    storageBarrier();
    workgroupBarrier();
    for (var j = me; j < N; j += 256u) {{ mine = max(mine, logit_at(start + j)); }}
    let top = highest(me, mine);
    var others = 0.0;
    for (var j = me; j < N; j += 256u) {{ others += exp(logit_at(start + j) - top); }}
    var rest = summed(me, others);
    if (rest < {LEAST}) {{ rest = {LEAST}; }}
    var of_targets = 0.0;
    for (var s = me; s < K; s += 256u) {{ of_targets += exp(slopes_at(first + s) - top); }}
    let norm = rest + summed(me, of_targets);
    let log_norm = log(norm);
    var adds = vec2(0.0);
    for (var s = me; s < K; s += 256u) {{
        adds += case_of(shares_at(share + s), slopes_at(first + s) - top - log_norm);
    }}
    let case_of_rest = case_of(shares_at(share + K), log(rest) - log_norm);
    let loss = summed(me, adds.x) + case_of_rest.x;
    let mass = summed(me, adds.y) + case_of_rest.y;
    let counts = weight != 0.0;
    if (me == 0u) {{
        put_losses(group, select(0.0, weight * loss, counts));
        put_right(group, select(0.0, 1.0, counts && right == top));
    }}
    if (GRADIENT) {{
        let factor = select(0.0, weight * (mass / norm - case_of_rest.y / rest), counts);
        for (var j = me; j < N; j += 256u) {{
            let logit = logit_at(start + j);
            let slope = capped_back(logit, factor * exp(logit - top));
            put_z(start + j, select(0.0, slope, factor != 0.0));
        }}
        storageBarrier();
        workgroupBarrier();
        for (var s = me; s < K; s += 256u) {{
            let logit = slopes_at(first + s);
            let pull = case_of(shares_at(share + s), logit - top - log_norm).y;
            let slope = capped_back(logit, weight * (mass * exp(logit - top) / norm - pull));
            let target_ = targets_at(first + s);
            if (is_token(target_)) {{
                put_z(start + u32(target_), select(0.0, slope, counts));
            }}
        }}
    }}
""")


class LossViews(NamedTuple):
    """Rows that lose by their logits: what is wanted of them, and what becomes of them."""

    targets: BufferRange  # (n · k)
    shares: BufferRange  # (n · (k + 1)): of these and of the others; k + 1, if all want alike
    weights: BufferRange  # (n)
    losses: BufferRange  # (n)
    right: BufferRange  # (n): 1 if a row counts and its first target is on top, else 0
    slopes: BufferRange  # (n · k): the targets' logits

    @property
    def k(self) -> int:
        return self.targets.n_bytes // self.weights.n_bytes

    def part(self, span: range) -> Self:
        """The rows of a span."""
        n = self.weights.n_bytes // self.weights.size

        def cut(a: BufferRange) -> BufferRange:
            each = a.n_bytes // a.size // n
            return a.part(each * span.start, each * len(span))

        rows = type(self)(*map(cut, self))
        is_one = self.shares.n_bytes // self.shares.size == self.k + 1
        return rows._replace(shares=self.shares) if is_one else rows


def row_bytes(n: int, k: int) -> int:
    """Scratch for the numbers of n rows of k targets."""
    of_row = round_up(F32.block_bytes * n, LINE)
    return 2 * of_row + round_up(F32.block_bytes * n * k, LINE)


def loss_rows(site: ShaderSite, sources: Sequence[BufferRange], scratch: BufferRange) -> LossViews:
    """The rows of a node with these sources: targets, shares if it has them, weights."""
    targets, *shares, weights = sources
    n = weights.n_bytes
    n_lines = round_up(n, LINE)
    losses, right, slopes = (
        replace(scratch, start=scratch.start + first, n_bytes=n_bytes)
        for first, n_bytes in ((0, n), (n_lines, n), (2 * n_lines, targets.n_bytes))
    )
    if site.node.shape:
        losses = site.out
    share = shares[0] if shares else site.constant(ONE_TARGET)
    return LossViews(targets, share, weights, losses, right, slopes)


def losses_of(
    site: ShaderSite, z: BufferRange, rows: LossViews, n: int, gradient: bool
) -> Dispatch:
    """The losses of rows of n logits z, which become their gradients if there is one."""
    assert site.node.op is not None
    n_rows, params = rows.weights.n_bytes // rows.weights.size, site.node.params
    sentence = f"{site.node.op.name}: a target is outside the vocabulary of {n} tokens"
    fault, number = site.fault(sentence)
    constants: dict[str, int | float] = {
        "ROWS": n_rows, "N": n, "K": rows.k, "GRADIENT": gradient, "NO_TOKEN": number,
        "MANY_shares": rows.shares.n_bytes // rows.shares.size,
        "CAP": float(params.get("softcap", 0.0)), "BETA": float(params.get("beta", 0.0)),
    }  # fmt: skip
    views = {"z": z, "fault": fault, **rows._asdict()}
    return site.shaders.dispatch(_LOSSES, views, n_rows, constants)


def _soft(site: ShaderSite) -> Sequence[Dispatch]:
    (logits, *sources), (right, dz) = site.src, site.saved
    rows, count = loss_rows(site, sources, site.scratch), site.node.src[0].n_elements
    return [
        site.shaders.each("put_z(i, x_at(i));", count, {"z": dz, "x": logits}),
        losses_of(site, dz, rows, site.node.src[0].shape[1], True),
        sum_of(site, site.out, rows.losses),
        sum_of(site, right, rows.right),
    ]


def _soft_scratch(node: Tensor, shaders: Shaders) -> int:
    n, k = node.src[1].shape
    return row_bytes(n, k)


declare("soft_cross_entropy", _soft, scratch=_soft_scratch)
