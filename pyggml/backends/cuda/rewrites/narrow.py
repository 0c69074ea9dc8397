"""Numbers that are rounded where they are read are written, and kept, in bfloat16.

    a product's result,     if all who read it can read BF16: a product of rounded factors is no
    attention's gradients   more exact than that
    other results           if all who read them round them
    residual sums           stay F32 in the forward pass; norms of the backward pass, and sums that
                            it computes again, read a copy, if large tensors are kept in BF16 at all

Copies to BF16, and of BF16 to F32, of which nothing is left to do are left out.
"""

from dataclasses import replace

from pyggml.backends.cuda.attention import TENSOR, path_of
from pyggml.backends.cuda.code.fours import lies_in_fours
from pyggml.backends.cuda.gemm import path_of as by_path
from pyggml.backends.cuda.gemm.cublas import CUBLAS
from pyggml.backends.cuda.ops.experts.products import in_tiles
from pyggml.backends.cuda.ops.lora.operands import FORMULAS
from pyggml.backends.cuda.ops.norm.by_row import holds_rows
from pyggml.backends.cuda.ops.products import problem_of
from pyggml.backends.cuda.runtime.kernel import OwnOp, is_of
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.op import SAVED
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass
from pyggml.ops import cpy
from pyggml.ops.in_bf16 import bf16_op

_PRODUCTS = ("wide_product", "wide_back")
# op -> sources that may be BF16
_NORMS = {"rms_norm_mul": (0,), "rms_norm_mul_back": (0, 2), "rms_norm_mul_back_w": (0, 1)}
_UNITS = {"weighted_unit": 2, "unit_gradients": 3}  # op -> sources that may be BF16, the first ones
_TURNS = ("rope_apply", "rope_apply_back")
_ATTENTION = {"flash_attn_ext": (0, 1, 2), "flash_attn_back": (0, 1, 2, 4, 6)}
_ROUNDED = 3  # of these q, k and v are rounded at once
_GRADIENTS = 2  # results that flash_attn_back saves: dk and dv


@graph_pass
def narrow(graph: Graph) -> Graph:
    """The graph of wide products, or of matrices that are trained in BF16, with fewer numbers in
    F32; the same graph if it has none."""
    rounds = any(is_of(t, "wide_rows") or _is_gradient(t) for t in graph.nodes)
    return _Narrower(graph).run() if rounds else graph


class _Narrower:
    def __init__(self, graph: Graph) -> None:
        self._graph, self._outputs = graph, set(graph.outputs)
        nodes = graph.nodes
        loss = graph["loss"] if "loss" in graph.names else None
        self._backward = set(nodes[nodes.index(loss) + 1 :] if loss in nodes else ())
        self._narrow = {t for t in nodes if self._may_narrow(t)}
        self._copies = self._residuals()
        self._views: dict[Tensor, Tensor] = {}  # of what is BF16 for some readers only
        self._wide: dict[Tensor, Tensor] = {}  # copies of residual sums, in F32 again

    def _readers(self, t: Tensor) -> list[tuple[Tensor, int]]:
        return [(r, i) for r in self._graph.readers[t] for i, s in enumerate(r.src) if s is t]

    # -- what may change --------------------------------------------------------------------------

    def _may_narrow(self, t: Tensor) -> bool:
        maker = t.src[0] if t.op is SAVED else t
        if t.dtype is not F32 or t in self._outputs or not self._readers(t) or maker.op is None:
            return False
        if _is_product(maker) or (is_of(maker, "flash_attn_back") and _can_write(t, maker)):
            return self._all_take(t, exactly=False)
        return _can_write(t, maker) and self._all_take(t, exactly=True)

    def _all_take(self, t: Tensor, exactly: bool) -> bool:
        """Whether all who read t take BF16; exactly: and make of it what they made of F32."""
        return all(self._takes(r, i, exactly) for r, i in self._readers(t))

    def _takes(self, t: Tensor, i: int, exactly: bool = False) -> bool:
        if _is_whole_view(t):
            return t not in self._outputs and self._all_take(t, exactly)
        return _rounds(t, i) or (not exactly and _reads(t, i))

    def _residuals(self) -> dict[Tensor, Tensor]:
        """Tensors of the forward pass -> the copy that the backward pass reads."""
        if not any(map(_is_rounded_copy, self._graph.nodes)):
            return {}
        copies: dict[Tensor, Tensor] = {}
        excluded = self._narrow | self._outputs | self._backward
        for t in self._graph.nodes if self._backward else ():
            later = [(r, i) for r, i in self._readers(t) if r in self._backward]
            plain = t.base is None and t.dtype is F32 and t not in excluded
            if later and plain and all(_reads(r, i) or is_of(r, "add") for r, i in later):
                copies[t] = cpy(t, BF16)
        return copies

    # -- what changes -----------------------------------------------------------------------------

    def run(self) -> Graph:
        new: dict[Tensor, Tensor] = {}
        steps: list[Tensor] = []  # copies to F32, and views, are made for their first reader
        for t in self._graph.nodes:
            if t.op is SAVED or _is_widened_copy(t):
                continue
            narrow = self._replacement(t)
            if narrow is not t:
                new[t] = narrow
            if not _is_whole_view(t):
                steps += [t, self._copies[t]] if t in self._copies else [t]
        return rewrite(self._graph, new, steps)

    def _replacement(self, t: Tensor) -> Tensor:
        """What stands for a node, of tensors of the old graph; the node itself if it stays."""
        if _is_rounded_copy(t) and self._has_bf16(t.src[0], t):
            return self._bf16(t.src[0])
        if _is_whole_view(t):
            return _view_in_bf16(t, t.src[0]) if self._origin(t) in self._narrow else t
        reads = [i for i, s in enumerate(t.src) if self._has_bf16(s, t) and self._takes(t, i)]
        writes = [i for i, s in enumerate((t, *t.saved)) if s in self._narrow]
        widened = t in self._backward and any(s in self._copies for s in t.src)
        if not reads and not writes and not widened:
            return t
        src = (self._bf16(s) if i in reads else self._in_f32(s, t) for i, s in enumerate(t.src))
        op = t.op
        assert op is not None
        if writes or (reads and not isinstance(op, OwnOp)):  # which reads both
            op = bf16_op(op, tuple(reads), tuple(writes))
        return op(*src, **t.params)

    def _in_f32(self, t: Tensor, reader: Tensor) -> Tensor:
        """What a reader that takes F32 finds: in the backward pass the copy of t, widened."""
        if t not in self._copies or reader not in self._backward:
            return t
        return self._wide.setdefault(t, cpy(self._copies[t], F32))

    def _origin(self, t: Tensor) -> Tensor:
        while _is_whole_view(t):
            t = t.src[0]
        return t

    def _has_bf16(self, t: Tensor, reader: Tensor) -> bool:
        """Whether a reader finds the numbers of t in BF16."""
        t = self._origin(t)
        has_copy = t in self._copies and reader in self._backward
        return has_copy or t in self._narrow or _is_widened_copy(t)

    def _bf16(self, t: Tensor) -> Tensor:
        """What holds the numbers of t in BF16: t itself if it does in the new graph."""
        if self._origin(t) in self._narrow:
            return t
        if _is_whole_view(t):
            if t not in self._views:
                self._views[t] = _view_in_bf16(t, self._bf16(t.src[0]))
            return self._views[t]
        return t.src[0] if _is_widened_copy(t) else self._copies[t]


def _view_in_bf16(t: Tensor, of: Tensor) -> Tensor:
    """of: narrow in the new graph, if not yet here; so its view is made by hand."""
    strides = tuple(s * BF16.block_bytes // t.dtype.block_bytes for s in t.strides)
    return replace(t, src=(of, *t.src[1:]), dtype=BF16, strides=strides, base=of.root, data=None)


# -- ops ------------------------------------------------------------------------------------------


def _is_product(t: Tensor) -> bool:
    """Whether t is a product of rounded factors whose kernel can write BF16."""
    if is_of(t, "mul_mat_id", "mul_mat_id_back"):
        return in_tiles(t, "bf16")
    return is_of(t, *_PRODUCTS) or (is_of(t, "mul_mat", "out_prod") and _is_of_bf16(t))


def _is_of_bf16(t: Tensor) -> bool:
    """Whether t is a product by cuBLAS with a matrix in BF16, which rounds its last source."""
    is_product = is_of(t, "mul_mat", "out_prod", "mul_mat_add", "out_prod_add")
    return is_product and t.src[-2].dtype is BF16 and by_path(problem_of(t, "bf16")) is CUBLAS


def _is_gradient(t: Tensor) -> bool:
    """Whether t is the gradient of a matrix that is trained: dyᵀ·x with x in BF16."""
    return is_of(t, "out_prod", "out_prod_add") and not t.src[-1].is_view and _is_of_bf16(t)


def _can_write(t: Tensor, maker: Tensor) -> bool:
    """Whether the kernel of `maker` can write t, its result or one that it saves, in BF16."""
    assert maker.op is not None
    name = maker.op.name
    if name in _ATTENTION:
        plain = path_of(maker, "bf16") is TENSOR
        is_gradient = name == "flash_attn_back" and t in maker.saved[:_GRADIENTS]
        return plain and (t is maker or is_gradient)
    if name == "cross_entropy_rows_back":
        return maker.shape[-1] % 4 == 0
    is_norm = name in ("rms_norm_mul", "rms_norm_mul_back") and holds_rows(maker)
    return t is maker and (name in _TURNS or is_norm or _is_unit(maker))


def _rounds(t: Tensor, i: int) -> bool:
    """Whether t rounds its source i to bfloat16 before it does anything else with it."""
    assert t.op is not None
    if t.op.name in _ATTENTION:
        return i < _ROUNDED and path_of(t, "bf16") is TENSOR
    if _is_rounded_copy(t):
        return True
    if _is_of_bf16(t):
        return i == len(t.src) - 1
    if is_of(t, "mul_mat_id", "mul_mat_id_back"):
        return i == 1 and in_tiles(t, "bf16")
    return _is_operand(t, i) and not t.params.get("formula")


def _reads(t: Tensor, i: int) -> bool:
    """Whether the kernel of t can read its source i in BF16."""
    assert t.op is not None
    name = t.op.name
    if name in _ATTENTION:
        return i in _ATTENTION[name] and path_of(t, "bf16") is TENSOR
    if name in _NORMS:
        return i in _NORMS[name] and holds_rows(t)
    if name in _UNITS:
        return i < _UNITS[name]
    return _rounds(t, i) or _is_operand(t, i) or (name in _TURNS and i == 0) or _is_unit(t, "add")


def _is_operand(t: Tensor, i: int) -> bool:
    """Whether source i is the left factor of a product of LoRA, or an operand of its formula."""
    assert t.op is not None
    if t.op.name in ("wide_rows", "wide_gradient"):
        return i < len(t.src) - len(t.params["scales"])
    return t.op.name == "gradient_of_a" and i > 0


def _is_unit(t: Tensor, also: str = "") -> bool:
    """Whether t is a gated unit, its gradient, or a result of one more op, whose kernel takes four
    numbers at a time; and is added to no leaf."""
    whole = all(s.is_contiguous and s.shape == t.shape for s in t.src)
    return is_of(t, *FORMULAS, also) and whole and lies_in_fours(t, *t.src) and not t.is_write


def _is_whole_view(t: Tensor) -> bool:
    """Whether t shows all of its source, in the same order or as a transposed matrix."""
    ordered = t.is_contiguous or is_of(t, "transpose")
    return t.is_view and ordered and t.src[0].is_contiguous and _same_size(t, t.src[0])


def _same_size(t: Tensor, other: Tensor) -> bool:
    return t.n_elements == other.n_elements


def _is_rounded_copy(t: Tensor) -> bool:
    """Whether t is a copy in BF16 of an F32 tensor."""
    return is_of(t, "cpy") and t.dtype is BF16 and t.src[0].dtype is F32


def _is_widened_copy(t: Tensor) -> bool:
    """Whether t is a copy in F32 of a BF16 tensor."""
    return is_of(t, "cpy") and t.dtype is F32 and t.src[0].dtype is BF16
