"""The type of each tensor in a file of a given file type, by llama.cpp's rules.

Most matrices get the file type's base. Sensitive ones get more bits: the output matrix (or the
embedding if it is the output), and `attn_v` and `ffn_down` in some of the layers. Vectors, norms
and a few small matrices stay F32. A row that is no whole number of blocks gets a type with shorter
blocks.

Source: llama.cpp, src/llama-quant.cpp (`llama_tensor_get_type_impl`, `tensor_allows_quantization`,
`tensor_type_fallback`). The rules of GLM 5 are not included.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from pyggml.errors import QuantError
from pyggml.graph.dtypes import DTYPES, DType
from pyggml.quants import QUANTS, NoFit, NoPack
from pyggml.requantize.file_types import (
    FILE_TYPES,
    Choice,
    FileType,
    ModelFacts,
    check_file_type,
    of_model,
)

Shape = tuple[int, ...]


_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_ENDS = (*_EMBEDDINGS, "output.weight")
_FFN = ("ffn_up", "ffn_gate", "ffn_down")
_ATTN_V = ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")
_KEPT_NAMES = ("position_embd.weight", "token_types.weight")
# Norms, expert routers and matrices of negligible size.
_KEPT_PARTS = (
    *("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel"),
    *("per_layer_model_proj", "ssm_conv1d", "shortconv.conv.weight", "attn_rel_b.weight"),
    *("indexer.k_proj.weight", "indexer.q_proj.weight", "time_mix_first.weight"),
    *(f"time_mix_{p}.weight" for p in ("w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2")),
    *(f"time_mix_{p}.weight" for p in ("g1", "g2", "decay_w1", "decay_w2", "lerp_fused")),
    *(".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd"),
    *(".patch_merger", "a.rvq.codebook", "mm.a.code_embd"),
)
# Models with 8 query heads to a value head: attn_v is small, and more bits cost little.
_SEVENTY_B = {"qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}
# For rows that are no multiple of 256: the type with blocks of 32 and about as many bits.
_SHORTER = {
    **{"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0"},
    **dict.fromkeys(("IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS"), "IQ4_NL"),
    **dict.fromkeys(("IQ1_M", "IQ1_S"), "IQ4_NL"),
    **dict.fromkeys(("Q3_K", "Q2_K", "Q2_0", "TQ2_0", "TQ1_0"), "Q4_0"),
}

# llama.cpp packs these by importance alone in blocks; ggml can do without.
_IN_BLOCKS = ("IQ3_XXS", "IQ2_S", "IQ1_M")


def needs_importance(name: str, weight_type: str, file_type: str | None = None) -> bool:
    """Whether this tensor is packed as this type only by the importance of its columns."""
    q = QUANTS.get(weight_type)
    if q is not None and isinstance(q.pack, NoPack) and not isinstance(q.fit, NoFit):
        return True
    is_strict = weight_type in _IN_BLOCKS or (file_type, weight_type) == ("Q2_K_S", "Q2_K")
    return name not in _ENDS and is_strict


def mix(
    file_type: str, tensors: Iterable[tuple[str, Shape]], model: ModelFacts
) -> dict[str, DType]:
    """The type of each tensor in a file of this file type.

    tensors: name and shape (outermost axis first) of all tensors of the model, in any order.
    Without `output.weight` the embedding is the output. Raises QuantError for an unknown file type,
    or for an expert tensor outside of the model's layers.
    """
    row = of_model(FILE_TYPES[check_file_type(file_type)], model)
    shapes = dict(sorted(tensors, key=lambda t: (_layer(t[0]), t[0])))  # llama.cpp's own order
    count = _Count(n_attn_v=sum(_is_attn_v(name) for name in shapes))
    types = {}
    for name, shape in shapes.items():
        if not is_packed(name, shape):
            types[name] = DTYPES["F32"]
        elif not DTYPES[row.base].quantised:
            types[name] = DTYPES[row.base]
        else:
            tied = "output.weight" not in shapes
            kind = _type_by_rules(row, name, shape, tied, model, count)
            types[name] = DTYPES[_fitting(kind, shape[-1])]
    return types


@dataclass(slots=True)
class _Count:
    """Number of attn_v tensors in the file, and of those seen so far; likewise of parts of the
    feed-forward networks."""

    n_attn_v: int
    attn_v: int = 0
    ffn: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_FFN, 0))


def _layer(name: str) -> int:
    match = re.match(r"blk\.(\d+)", name)
    return int(match[1]) if match else -1


def _is_attn_v(name: str) -> bool:
    return name not in _ENDS and any(part in name for part in _ATTN_V)


def is_packed(name: str, shape: Shape) -> bool:
    """Whether llama.cpp quantises this tensor."""
    n_dims = len(shape) - next((i for i, n in enumerate(shape) if n != 1), len(shape))
    kept = name in _KEPT_NAMES or any(part in name for part in _KEPT_PARTS)
    return n_dims >= 2 and name.endswith("weight") and not kept


def _type_by_rules(
    row: FileType, name: str, shape: Shape, tied: bool, model: ModelFacts, count: _Count
) -> str:
    """The type by the rules, before the check that its block divides the row."""
    if name == "output.weight" or (tied and name in _EMBEDDINGS):
        return row.output if shape[-1] % DTYPES[row.base].block == 0 else "Q8_0"
    if row.experts != row.base:  # such a file type has no further choices
        return row.experts if _is_of_experts(name, shape, model) else row.base
    if name in _EMBEDDINGS:
        return row.embedding
    if _is_attn_v(name):
        return _attn_v(row, model, count)
    if "attn_k.weight" in name and model.n_expert == 8:
        return "Q4_K" if row.smallest else "Q8_0"
    if "attn_k.weight" in name or "attn_q.weight" in name:
        return row.attn_qk
    if "attn_output.weight" in name:
        return row.attn_output_8 if model.n_expert == 8 else row.attn_output
    part = next((part for part in _FFN if part in name), None)
    return _ffn(row, part, name, model, count) if part else row.base


def _is_of_experts(name: str, shape: Shape, model: ModelFacts) -> bool:
    """Whether it is a stack; of BailingMoE 3, whose latent matrices are stacks, one of experts."""
    latent = model.architecture == "bailingmoe3" and not any(part in name for part in _FFN)
    return len(shape) > 2 and shape[-3] > 1 and not latent


def _choose(choice: Choice, base: str, i: int, n: int, model: ModelFacts) -> str:
    return next((to for to, where in choice if where(i, n, model)), base)


def _attn_v(row: FileType, model: ModelFacts, count: _Count) -> str:
    i, count.attn_v = count.attn_v, count.attn_v + 1
    kind = _choose(row.attn_v, row.base, i, count.n_attn_v, model)
    if row.smallest:
        return kind
    if model.n_expert == 8:
        return "Q8_0"
    return "Q5_K" if kind in ("Q3_K", "Q4_K") and _is_seventy_b(model) else kind


def _ffn(row: FileType, part: str, name: str, model: ModelFacts, count: _Count) -> str:
    i = count.ffn[part]
    count.ffn[part] += 1
    if (
        model.n_expert > 1 and not row.smallest
    ):  # a layer may have several: its number is the name's
        i = _layer(name)
        if not 0 <= i < model.n_layer:
            raise QuantError(f"{name!r} is in none of the model's {model.n_layer} layers")
    choice = row.ffn_down if part == "ffn_down" else row.ffn_up
    return _choose(choice, row.base, i, model.n_layer, model)


def _is_seventy_b(model: ModelFacts) -> bool:
    if model.architecture == "llama":
        return model.n_layer == 80 and model.n_head != model.n_head_kv
    return _SEVENTY_B.get(model.architecture) == model.n_layer


def _fitting(name: str, n_in: int) -> str:
    """`wanted`, or another type if its block does not divide a row of n_in."""
    if n_in % DTYPES[name].block == 0:
        return name
    shorter = _SHORTER.get(name, name)
    return shorter if n_in % DTYPES[shorter].block == 0 else "F16"
