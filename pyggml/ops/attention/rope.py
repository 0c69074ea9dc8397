"""Rotary positions (Su et al. 2021): ggml's ROPE, which turns pairs of features.

    (y_a, y_b) = (x_a·cos − x_b·sin, x_a·sin + x_b·cos)

Pair i is (2i, 2i + 1) in mode "normal" and (i, i + n_pairs) in the others, counted from feature
`offset` on. Other features are copied.

rope_apply        y  = the pairs of x turned by a table (see pyggml.ops.attention.rope_table)
rope_apply_back   dx = the pairs of dy turned back; the table's factor m scales them as before
"""

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import JIT, kernel
from pyggml.jit.frames import Bool, Float, Floats3, Frame, Int
from pyggml.jit.tasks import SHARE, launch, pieces, stage, task_code, whole
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.attention.rope_table import check_mode, rope_table
from pyggml.ops.expect import expect_axes, expect_type


def rope(
    x: Tensor,
    positions: Tensor,
    freq_factors: Tensor | None = None,
    *,
    mode: str,
    n_dims: int,
    offset: int = 0,
    **settings: Any,
) -> Tensor:
    """x (n_tokens, n_head, d) or (n_batch, n_tokens, n_head, d) F32, turned by its positions.

    ggml's ROPE. n_dims features from `offset` on are turned, in mode "vision" 2·n_dims. Mode and
    settings are those of rope_table. Layers with the same positions should share a table:
    rope_apply(x, rope_table(positions, …), mode).
    """
    table = rope_table(positions, freq_factors, n_dims=n_dims, mode=mode, **settings)
    return rope_apply(x, table, mode, offset)


def rope_apply(x: Tensor, table: Tensor, mode: str, offset: int = 0) -> Tensor:
    """x (n_tokens, n_head, d) or (n_batch, n_tokens, n_head, d) F32, turned by a rope_table."""
    check_mode(mode)
    return ROPE_APPLY(x, table, neox=mode != "normal", offset=offset)


def rope_apply_back(dy: Tensor, table: Tensor, mode: str, offset: int = 0) -> Tensor:
    """d(loss)/dx of rope_apply, given dy = d(loss)/dy of x's shape."""
    check_mode(mode)
    return ROPE_APPLY_BACK(dy, table, neox=mode != "normal", offset=offset)


# -- rope_apply and its back --------------------------------------------------------------------


def _rotation_spec(name: str, x: Tensor, table: Tensor, neox: bool, offset: int) -> Spec:
    expect_type(name, "x", x)
    expect_axes(name, "x", x, 3, 4)
    expect_type(name, "table", table)
    n_tokens, d = x.shape[-3], x.shape[-1]
    fits = len(table.shape) == 3 and table.shape[:2] == (n_tokens, 2)
    if not fits or offset < 0 or offset + 2 * table.shape[2] > d:
        raise ShapeError(
            f"{name}: table is {table!r}, wanted ({n_tokens}, 2, at most "
            f"{(d - offset) // 2}) for {x!r} from feature {offset} on"
        )
    return Spec(x.shape)


@kernel
def _turn_apart(a, b, cos, sin, sign):
    for i in range(cos.size):
        p, q, s = a[i], b[i], sin[i] * sign
        a[i] = p * cos[i] - q * s
        b[i] = p * s + q * cos[i]


@kernel
def _turn_neighbours(y, cos, sin, sign):
    for i in range(cos.size):
        p, q, s = y[2 * i], y[2 * i + 1], sin[i] * sign
        y[2 * i] = p * cos[i] - q * s
        y[2 * i + 1] = p * s + q * cos[i]


@kernel
def _copy(out, x):
    for j in range(x.size):
        out[j] = x[j]


@kernel
def _rotate_token(y, x, cos, sin, neox, offset, sign, in_place):
    """y, x (n_head, d). A head is copied, then turned in place."""
    n_pairs = cos.size
    for h in range(y.shape[0]):
        if not in_place:
            _copy(y[h], x[h])
        head = y[h, offset:]
        if neox:
            _turn_apart(head[:n_pairs], head[n_pairs : 2 * n_pairs], cos, sin, sign)
        else:
            _turn_neighbours(head, cos, sin, sign)


@kernel
def _rotate(y, x, table, neox, offset, sign, in_place, tokens):
    """y, x (n_batch · n_tokens, n_head, d); tokens: the first, and the one past the last."""
    for t in range(tokens[0], tokens[1]):
        cos, sin = table[t % table.shape[0], 0], table[t % table.shape[0], 1]
        _rotate_token(y[t], x[t], cos, sin, neox, offset, sign, in_place)


class Rotation(Frame):
    """Of y from x, both (n_batch · n_tokens, n_head, d)."""

    y: Floats3
    x: Floats3
    table: Floats3
    neox: Bool
    offset: Int
    sign: Float
    in_place: Bool
    each: Int  # tokens of a task


@task_code(Rotation)
def _rotate_task(f, task, thread):
    y, first = f.y, task * f.each
    tokens = first, min(first + f.each, y.shape[0])
    _rotate(y, f.x, f.table, f.neox, f.offset, f.sign, f.in_place, tokens)


def _rotation(sign: float, site: Site) -> Call:
    x, table = site.src
    y = site.out.reshape(-1, *site.out.shape[-2:])
    x, n, each = x.reshape(y.shape), len(y), max(1, SHARE // prod(y.shape[1:]))
    neox, offset = site.scalars
    if not JIT:
        return Call(_rotate, y, x, table, neox, offset, np.float32(sign), site.in_place, (0, n))
    f = Rotation(
        y=y, x=x, table=table, neox=neox, offset=offset, sign=sign, in_place=site.in_place,
        each=each,
    )  # fmt: skip
    own, read = pieces(y, each), pieces(x, each, True)
    return Call(launch, stage(_rotate_task, f, -(-n // each), own, read, whole(table)))


def _rotate_ref(
    x: np.ndarray, table: np.ndarray, neox: bool, offset: int, sign: float
) -> np.ndarray:
    pairs = np.arange(table.shape[2])
    first = offset + (pairs if neox else 2 * pairs)
    second = first + (pairs.size if neox else 1)
    cos, sin = table[:, None, 0], sign * table[:, None, 1]
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y


def _rope_apply_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy, turned back"""
    return ROPE_APPLY_BACK(dy, node.src[1], **node.params), None


def _rope_apply_samples(rng: np.random.Generator) -> Iterator[Sample]:
    shapes = [((1, 1, 2), 1), ((5, 3, 8), 3), ((2, 4, 3, 32), 16), ((5, 2, 21), 4)]
    for shape, n_pairs in [*shapes, ((2, 21, 2, 50), 24)]:  # the last has several tasks
        angle = rng.uniform(-3, 3, (shape[-3], n_pairs))
        table = 1.1 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        for neox in (False, True):
            last = shape[-1] - 2 * n_pairs
            for offset in {0, last, int(rng.integers(0, last + 1))}:
                params = {"neox": neox, "offset": offset}
                yield Sample((rng.standard_normal(shape), table), params)


ROPE_APPLY = op(
    name="rope_apply",
    ggml=GGMLOp.ROPE,
    spec=partial(_rotation_spec, "rope_apply"),
    ref=lambda x, table, neox, offset: _rotate_ref(x, table, neox, offset, 1),
    grad=_rope_apply_grad,
    samples=_rope_apply_samples,
    refuses={"neox": (), "offset": (-1, 999)},
    memory=Memory.INPLACE,
    halves=True,
)
cpu_kernel(ROPE_APPLY, partial(_rotation, 1.0))


def _rope_apply_back_grad(node: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy, turned forward"""
    return ROPE_APPLY(g, node.src[1], **node.params), None


ROPE_APPLY_BACK = op(
    name="rope_apply_back",
    ggml=GGMLOp.ROPE_BACK,
    spec=partial(_rotation_spec, "rope_apply_back"),
    ref=lambda dy, table, neox, offset: _rotate_ref(dy, table, neox, offset, -1),
    grad=_rope_apply_back_grad,
    samples=_rope_apply_samples,
    refuses={"neox": (), "offset": (-1, 999)},
    memory=Memory.INPLACE,
)
cpu_kernel(ROPE_APPLY_BACK, partial(_rotation, -1.0))
