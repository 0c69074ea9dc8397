"""Writes docs/ops.md: which of ggml's ops are here, with what gradient, and what ggml's has.

python docs/ops_table.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path

import numpy as np

from pyggml.graph.ggml_enums import GGMLGLUOp, GGMLOp, GGMLUnaryOp
from pyggml.graph.op import NoGrad, Op
from pyggml.graph.tensor import as_leaf, leaf
from pyggml.ops import OPS


def _words(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Facts about others, read from their source: upstream ggml 0.25.3, QVAC's ggml 0.9.4.
UPSTREAM_GRADIENTS = _words(
    """DUP ADD ADD1 ACC SUB MUL DIV SQR SQRT LOG SIN COS SUM SUM_ROWS MEAN REPEAT REPEAT_BACK
    RMS_NORM MUL_MAT SCALE SET CPY CONT RESHAPE VIEW PERMUTE TRANSPOSE GET_ROWS DIAG_MASK_INF
    DIAG_MASK_ZERO SOFT_MAX ROPE IM2COL POOL_2D CROSS_ENTROPY_LOSS
    ABS NEG RELU SILU EXP EXPM1 SOFTPLUS SWIGLU"""
)
QVAC_GRADIENTS = UPSTREAM_GRADIENTS | {"GEGLU"}
NOT_IN_QVAC = _words(
    """COL2IM_1D GATED_DELTA_NET LIGHTNING_INDEXER DSV4_HC_COMB DSV4_HC_PRE DSV4_HC_POST
    SWIGLU_CLAMP"""
)
ABORTS = frozenset(("WIN_PART", "WIN_UNPART"))

# Ops that are builders over other ops.
BUILT = {
    "CONV_TRANSPOSE_1D": ("conv_transpose_1d", "conv_transpose_2d"),
    "CONV_2D_DW": ("conv_2d_dw", "conv_2d_direct"),
    "POOL_1D": ("pool_1d", "pool_avg"),
    "COL2IM_1D": ("col2im_1d", "im2col_back"),
}
_DEEPSEEK = "left out: DeepSeek V3.2 and V4 only"
_IMAGES = "left out: windows and positions of image encoders"
_VOLUMES = "left out: volumes, in no language model"
_CALLBACK = "left out: a callback has no gradient; declare an op"
LEFT_OUT = {
    **dict.fromkeys(("IM2COL_3D", "CONV_3D"), _VOLUMES),
    **dict.fromkeys(("WIN_PART", "WIN_UNPART", "GET_REL_POS", "ADD_REL_POS"), _IMAGES),
    **dict.fromkeys(("DSV4_HC_COMB", "DSV4_HC_PRE", "DSV4_HC_POST"), _DEEPSEEK),
    **dict.fromkeys(("MAP_CUSTOM1", "MAP_CUSTOM2", "MAP_CUSTOM3"), _CALLBACK),
    "LIGHTNING_INDEXER": _DEEPSEEK,
}
# Faults and gaps of ggml, not present here, and other differences.
FAULTS = {
    "ADD1": "ggml takes the mean where b's gradient is the sum",
    "SUB": "ggml does not sum b's gradient over the axes along which b was repeated, and aborts",
    "DIV": "as SUB: a broadcast divisor aborts in ggml",
    "SUM_ROWS": "rows of no element are refused: an empty axis is rather a mistake than a sum of 0",
    "CUMSUM": "as SUM_ROWS",
    "MEAN": "as SUM_ROWS. A second use of x aborts in ggml if x has several rows",
    "ACC": "ggml starts the sum with 0 · x, so NaN and infinity in x spread",
    "VIEW": "as ACC",
    "CPY": "types that pack by importance alone are read only; numbers that a type cannot hold "
    "are refused. ggml does not convert the gradient's type",
    "MUL_MAT": "ggml aborts if w is BF16, or repeated over the outermost axis",
    "GET_ROWS": "ggml's gradient is for two axes only",
    "SET_ROWS": "a cache cuts ggml's graph",
    "SOFT_MAX": "ggml has no gradient with ALiBi, nor of the sinks or the mask; rows masked whole "
    "are NaN there, 0 here. Its gradients sum to 0, so tests need random weights",
    "GATED_DELTA_NET": "a row of tokens holds one sequence after another, where ggml has an axis "
    "of sequences; several states are a node each",
    "SSM_SCAN": "as GATED_DELTA_NET; ggml keeps earlier states of Mamba 2 alone",
    "ROPE": "YaRN with a beta or an n_ctx_orig of 0, by which ggml divides, is refused. ggml's "
    "gradient ignores the offset and is wrong, without a warning. In mode vision it reads twice "
    "the frequency factors it asks for",
    "FLASH_ATTN_EXT": "ggml's backward op aborts when it is built",
    "FLASH_ATTN_BACK": "see FLASH_ATTN_EXT",
    "CROSS_ENTROPY_LOSS": "in ggml rows of zero labels still have a gradient; QVAC adds "
    "CROSS_ENTROPY_LOSS_MASKED, which is the mask here",
    "COUNT_EQUAL": "QVAC's COUNT_EQUAL_MASKED is the mask here",
    "GROUP_NORM": "an empty group is refused; ggml divides by 0",
    "SWIGLU": "ggml's and QVAC's gradient is for gate and up in two tensors; here also for one",
    "GEGLU": "as SWIGLU; upstream has none",
    "SGN": "0 in ggml; refused here, as nothing would be trained",
    "STEP": "as SGN",
    "ARGMAX": "as SUM_ROWS; the first of equals; ggml's CPU code takes the last",
    "CUSTOM": f"{_CALLBACK}. Ops that ggml lacks have this number here",
    "UPSCALE": "antialias with align_corners is refused: ggml drops elements there",
    "POOL_2D": "padding of a window or more is refused: a window of nothing has no maximum",
    "POOL_1D": "as in ggml, the 1-D mean excludes padding, the 2-D mean includes its zeros",
}

ByEnum = dict[tuple[type[IntEnum], IntEnum], list[Op]]

HEAD = """# The ops

Written by `docs/ops_table.py` from the registry; `tests/test_ops_table.py` fails if it is out of
date. "gradient" lists the sources (counted from 0) with a gradient; `tests/test_every_op.py`
compares each with float64 slopes. "in ggml" and "in QVAC" tell whether the op has a gradient there
(upstream ggml 0.25.3; QVAC's fork of ggml 0.9.4); a dash means no.

Ops with a star also take F16 and BF16: the result is that of copies to F32 before and to the first
source's type after, bit for bit. Where an op takes less than ggml's, the remark says why. A plan
puts results over sources that die, so of `_inplace` twins there are `add_inplace` and
`fill_inplace` alone, which choose the memory.
"""


def main() -> None:
    """Write the file beside this script."""
    Path(__file__).with_name("ops.md").write_text(table(), encoding="utf-8")


def table() -> str:
    """The whole document."""
    by_enum: ByEnum = defaultdict(list)
    for op in OPS.values():
        by_enum[type(op.ggml), op.ggml].append(op)
    own = by_enum.pop((GGMLOp, GGMLOp.CUSTOM))
    skipped = {GGMLOp.NONE, GGMLOp.UNARY, GGMLOp.GLU}
    parts = [
        HEAD,
        *_section("ggml_op", (e for e in GGMLOp if e not in skipped), by_enum),
        *_section("ggml_unary_op", GGMLUnaryOp, by_enum),
        *_section("ggml_glu_op", GGMLGLUOp, by_enum),
        *_own(own),
    ]
    return "\n".join(parts) + "\n"


def _section(title: str, members: Iterable[IntEnum], by_enum: ByEnum) -> list[str]:
    lines = [
        f"\n## `{title}`\n",
        "| | ggml | here | gradient | in ggml | in QVAC | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    return lines + [_line(e, by_enum[type(e), e]) for e in members]


def _line(e: IntEnum, ops: list[Op]) -> str:
    if not ops and e.name in BUILT:
        name, of = BUILT[e.name]
        here, gradient = f"`{name}`, made of `{of}`", _gradient(OPS[of])
    else:
        here = ", ".join(f"`{op.name}`" + "\\*" * op.halves for op in ops)
        gradient = "; ".join(dict.fromkeys(_gradient(op) for op in ops))
    remarks = FAULTS.get(e.name, LEFT_OUT.get(e.name, ""))
    return _row(e.value, e.name, here or "–", gradient or "–", *_others(e.name), remarks)


def _others(name: str) -> tuple[str, str]:
    upstream = "yes" if name in UPSTREAM_GRADIENTS else "aborts" if name in ABORTS else "–"
    qvac = "yes" if name in QVAC_GRADIENTS else upstream
    return upstream, "no such op" if name in NOT_IN_QVAC else qvac


def _gradient(op: Op) -> str:
    """Which sources have one, over all samples; or why there is none."""
    if isinstance(op.grad, NoGrad):
        return f"none: {op.grad.reason}"
    with_gradient: set[int] = set()
    for sample in op.samples(np.random.default_rng(0)):
        node = op(*(as_leaf(a) for a in sample.arrays), **sample.params)
        parts = op.grad(node, leaf(np.ones(node.shape, np.float32)))
        with_gradient |= {i for i, part in enumerate(parts) if part is not None}
    return "yes" if with_gradient == {0} else "of " + ", ".join(map(str, sorted(with_gradient)))


def _own(ops: list[Op]) -> list[str]:
    lines = ["\n## Without a twin in ggml\n", "| here | gradient |", "|---|---|"]
    return lines + [_row(f"`{op.name}`", _gradient(op)) for op in ops]


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
