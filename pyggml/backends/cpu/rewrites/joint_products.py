"""Products that take along what is added to their results, on the CPU.

With a weight, that is what LoRA adds. Apart, the nodes write and read the whole result up to three
times, and caches are too small for it. A joint node writes it once. The bits are the same.
"""

from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.pattern import Match, Pattern
from pyggml.graph.rewrite import Replacements
from pyggml.graph.table import Rewrite
from pyggml.graph.tensor import Tensor
from pyggml.kernels.gemm.beside import MOST
from pyggml.kernels.gemm.thin import WIDEST
from pyggml.ops.product.low_rank import MUL_MAT_LOW_RANK, OUT_PROD_LOW_RANK, OUT_PROD_LOW_RANK_ADD


def _suits(y: Tensor, thin: Tensor, u: Tensor, rank: int, w: Tensor, rows: Tensor) -> bool:
    """Whether y = rows·w, a packed leaf, + u·thin, a float32 leaf of low rank, is wide."""
    are_whole = all(len(t.shape) == 2 and t.is_contiguous for t in (thin, u, w, rows))
    are_leaves = thin.root.op is None and w.root.op is None
    are_low_rank = thin.dtype is F32 and w.dtype is not F32 and rank <= MOST
    return are_whole and are_leaves and are_low_rank and y.shape[-1] > WIDEST


def _adds(m: Match) -> bool:
    copy = m.get("copy")
    is_rounded = copy is None or copy.dtype is BF16
    return is_rounded and _suits(m.y, m.b, m.d, m.b.shape[-1], m.w, m.x)


def _forward(m: Match) -> Replacements:
    copy = m.get("copy")
    joint = MUL_MAT_LOW_RANK(m.b, m.d, m.w, m.x, rounds=copy is not None)
    return {m.y: joint} if copy is None else {m.y: joint, copy: joint.saved[0]}


def _backward(m: Match) -> Replacements:
    so_far = m.get("so_far")
    if so_far is None:
        return {m.dx: OUT_PROD_LOW_RANK(m.a, m.d, m.w, m.dy)}
    return {m.dx: OUT_PROD_LOW_RANK_ADD(so_far, m.a, m.d, m.w, m.dy)}


_PRODUCT = """\
plain = mul_mat(w, x)
y = mul_mat_add(plain, b, d)
"""
_GRADIENT = """
thin = out_prod(a, transpose(d)) or out_prod_add(so_far, a, transpose(d))
dx = out_prod_add(thin, w, transpose(dy))
"""
JOINT_PRODUCTS = (
    Rewrite(Pattern(_PRODUCT + "copy = cpy(y)"), _adds, _forward),
    Rewrite(Pattern(_PRODUCT), _adds, _forward),
    Rewrite(
        Pattern(_GRADIENT), lambda m: _suits(m.dx, m.a, m.d, m.a.shape[0], m.w, m.dy), _backward
    ),
)
