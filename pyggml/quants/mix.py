"""Which tensor gets which type in a file of a given file type: llama.cpp's rules.

Matrices get the file type's base, and tensors on which much depends get more bits: the output
matrix (or the embedding, where it serves as output), and in a share of the layers `attn_v` and
`ffn_down`. Vectors, norms and a few small matrices stay F32. A row that is no whole number of
blocks falls back to a type of shorter blocks.

Source: llama.cpp, src/llama-quant.cpp (`llama_tensor_get_type_impl`, `tensor_allows_quantization`,
`tensor_type_fallback`). The rules of the Falcon and GLM 5 architectures are not included.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pyggml.dtypes import DTYPES, DType
from pyggml.errors import QuantError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the rules ask about a model: GGUF's architecture, block_count, head_count, …

    n_head, n_head_kv: of the first layer, where layers differ. n_expert: 0 without experts.
    """

    architecture: str
    n_layer: int
    n_head: int
    n_head_kv: int
    n_expert: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """The type of the layers i of n for which `where(i, n)` holds, in place of the base."""

    to: str
    where: Callable[[int, int], bool]


def _nowhere(i: int, n: int) -> bool:
    return False


def _some(i: int, n: int) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _first_eighth(i: int, n: int) -> bool:
    return i < n // 8


def _first_four(i: int, n: int) -> bool:
    return i < 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FileType:
    """One row of the table.

    number          of `general.file_type` (llama.cpp's LLAMA_FTYPE_*)
    base            the type of most matrices
    attn_v          upgrade of `attn_v`, `attn_qkv` and `attn_kv_b`, counted over those tensors
    ffn_down        upgrade of `ffn_down`, counted over layers
    attn_output_8   type of `attn_output` in a model of 8 experts
    """

    name: str
    number: int
    base: str
    attn_v: Upgrade
    ffn_down: Upgrade
    attn_output_8: str


def _plain(name: str, number: int) -> FileType:
    """A file type without upgrades within the layers."""
    never = Upgrade(to=name, where=_nowhere)
    return FileType(
        name=name, number=number, base=name, attn_v=never, ffn_down=never, attn_output_8=name
    )


_SOME_Q6 = Upgrade(to="Q6_K", where=_some)

FILE_TYPES: dict[str, FileType] = {
    f.name: f
    for f in (
        _plain("F32", 0),
        _plain("F16", 1),
        _plain("Q4_0", 2),
        _plain("Q8_0", 7),
        _plain("Q5_0", 8),
        FileType(
            name="Q4_K_S",
            number=14,
            base="Q4_K",
            attn_v=Upgrade(to="Q5_K", where=_first_four),
            ffn_down=Upgrade(to="Q5_K", where=_first_eighth),
            attn_output_8="Q5_K",
        ),
        FileType(
            name="Q4_K_M",
            number=15,
            base="Q4_K",
            attn_v=_SOME_Q6,
            ffn_down=_SOME_Q6,
            attn_output_8="Q5_K",
        ),
        FileType(
            name="Q5_K_M",
            number=17,
            base="Q5_K",
            attn_v=_SOME_Q6,
            ffn_down=_SOME_Q6,
            attn_output_8="Q5_K",
        ),
        _plain("Q6_K", 18),
        _plain("BF16", 32),
    )
}

_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
_ATTN_V = ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight")
_KEPT_NAMES = ("position_embd.weight", "token_types.weight")
# Norms, expert routers and matrices so small that their bytes do not count.
_KEPT_PARTS = (
    *("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel"),
    *("per_layer_model_proj", "ssm_conv1d", "shortconv.conv.weight", "attn_rel_b.weight"),
    *("indexer.k_proj.weight", "indexer.q_proj.weight", "time_mix_first.weight"),
    *(f"time_mix_{p}.weight" for p in ("w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2")),
    *(f"time_mix_{p}.weight" for p in ("g1", "g2", "decay_w1", "decay_w2", "lerp_fused")),
    *(".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd"),
    *(".patch_merger", "a.rvq.codebook", "mm.a.code_embd"),
)
# Models in which 8 query heads share an attn_v: it is small, and more bits cost little.
_SEVENTY_B = {"qwen2": 80, "deci": 80, "olmo": 80, "jais2": 68}
# A row that is no multiple of 256 gets a type of 32-blocks with about as many bits.
_SHORTER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def mix(
    file_type: str, tensors: Iterable[tuple[str, Shape]], model: ModelFacts
) -> dict[str, DType]:
    """The type of each tensor in a file of this type.

    tensors: name and NumPy shape (outermost axis first) of all tensors of the model, in any
    order; a model without `output.weight` uses its embedding as output. Raises QuantError for an
    unknown file type, or for an expert tensor outside of the model's layers.
    """
    if file_type not in FILE_TYPES:
        raise QuantError(f"{file_type!r} is no file type; known are {', '.join(FILE_TYPES)}")
    row = FILE_TYPES[file_type]
    shapes = dict(sorted(tensors, key=lambda t: (_layer(t[0]), t[0])))  # llama.cpp's own order
    count = _Count(n_attn_v=sum(_is_attn_v(name) for name in shapes))
    found = {}
    for name, shape in shapes.items():
        if not _is_packed(name, shape):
            found[name] = DTYPES["F32"]
        elif not DTYPES[row.base].quantised:
            found[name] = DTYPES[row.base]
        else:
            wanted = _wanted(row, name, "output.weight" not in shapes, model, count)
            found[name] = DTYPES[_fitting(wanted, shape[-1])]
    return found


@dataclass(slots=True)
class _Count:
    """How many tensors of a kind there are, and how many were seen."""

    n_attn_v: int
    attn_v: int = 0
    ffn_down: int = 0


def _layer(name: str) -> int:
    match = re.match(r"blk\.(\d+)", name)
    return int(match[1]) if match else -1


def _is_attn_v(name: str) -> bool:
    return name not in (*_EMBEDDINGS, "output.weight") and any(part in name for part in _ATTN_V)


def _is_packed(name: str, shape: Shape) -> bool:
    """Whether llama.cpp quantises this tensor at all; if not, its converter wrote it as F32."""
    n_dims = len(shape) - next((i for i, n in enumerate(shape) if n != 1), len(shape))
    kept = name in _KEPT_NAMES or any(part in name for part in _KEPT_PARTS)
    return n_dims >= 2 and name.endswith("weight") and not kept


def _wanted(row: FileType, name: str, tied: bool, model: ModelFacts, count: _Count) -> str:
    """The type by importance, before its block is held against the row."""
    if name == "output.weight" or (tied and name in _EMBEDDINGS):
        return "Q8_0" if row.base == "Q8_0" else "Q6_K"
    if name in _EMBEDDINGS:
        return row.base
    if _is_attn_v(name):
        return _attn_v(row, model, count)
    if model.n_expert == 8 and "attn_k.weight" in name:
        return "Q8_0"
    if model.n_expert == 8 and "attn_output.weight" in name:
        return row.attn_output_8
    if "ffn_down" in name:
        return _ffn_down(row, name, model, count)
    return row.base


def _attn_v(row: FileType, model: ModelFacts, count: _Count) -> str:
    i, count.attn_v = count.attn_v, count.attn_v + 1
    if model.n_expert == 8:
        return "Q8_0"
    if row.attn_v.where(i, count.n_attn_v):
        return row.attn_v.to
    return "Q5_K" if row.base == "Q4_K" and _is_seventy_b(model) else row.base


def _ffn_down(row: FileType, name: str, model: ModelFacts, count: _Count) -> str:
    i, count.ffn_down = count.ffn_down, count.ffn_down + 1
    if model.n_expert > 1:  # several ffn_down in a layer: only the name tells which layer it is
        i = _layer(name)
        if not 0 <= i < model.n_layer:
            raise QuantError(f"{name} is in none of the model's {model.n_layer} layers")
    return row.ffn_down.to if row.ffn_down.where(i, model.n_layer) else row.base


def _is_seventy_b(model: ModelFacts) -> bool:
    if model.architecture == "llama":
        return model.n_layer == 80 and model.n_head != model.n_head_kv
    return _SEVENTY_B.get(model.architecture) == model.n_layer


def _fitting(wanted: str, n_in: int) -> str:
    """`wanted`, or a type whose block divides a row of n_in."""
    if n_in % DTYPES[wanted].block == 0:
        return wanted
    shorter = _SHORTER.get(wanted, wanted)
    return shorter if n_in % DTYPES[shorter].block == 0 else "F16"
