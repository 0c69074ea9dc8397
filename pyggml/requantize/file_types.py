"""File types: the base type of most matrices of a file, and the tensors with another type.

Source: llama.cpp, src/llama-quant.cpp (`llama_ftype_get_default_type`, and the branches on `ftype`
in `llama_tensor_get_type_impl`). Not included: Q1_0 and NVFP4, for which llama.cpp has no fallback
if a row does not fit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pyggml.errors import QuantError, suggestion


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model's hyperparameters for the rules: GGUF's architecture, block_count, head_count, …

    n_head, n_head_kv: those of the first layer. n_expert: 0 without experts.
    has_importance: whether an importance matrix is given.
    """

    architecture: str
    n_layer: int
    n_head: int
    n_head_kv: int
    n_expert: int
    has_importance: bool = False

    @property
    def n_gqa(self) -> int:
        """Query heads that share a key head."""
        return self.n_head // self.n_head_kv if self.n_head_kv else 0


# where(i, n, model): whether tensor i of n gets the type.
Where = Callable[[int, int, ModelFacts], bool]
# The first pair with a true `where` gives the type; otherwise it is the base.
Choice = tuple[tuple[str, Where], ...]


def _all(i: int, n: int, model: ModelFacts) -> bool:
    return True


def _some(i: int, n: int, model: ModelFacts) -> bool:
    """The first and the last eighth of the tensors, and every third between them."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _some_of_eight_experts(i: int, n: int, model: ModelFacts) -> bool:
    return model.n_expert == 8 and _some(i, n, model)


def _first_sixteenth(i: int, n: int, model: ModelFacts) -> bool:
    return i < n // 16


def _first_eighth(i: int, n: int, model: ModelFacts) -> bool:
    return i < n // 8


def _middle(i: int, n: int, model: ModelFacts) -> bool:
    """Neither the first nor the last eighth."""
    return n // 8 <= i < 7 * n // 8


def _first_two(i: int, n: int, model: ModelFacts) -> bool:
    return i < 2


def _first_four(i: int, n: int, model: ModelFacts) -> bool:
    return i < 4


def _shared_by_four(i: int, n: int, model: ModelFacts) -> bool:
    return model.n_gqa >= 4


def _shared_or_experts(i: int, n: int, model: ModelFacts) -> bool:
    return model.n_gqa >= 4 or model.n_expert >= 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FileType:
    """One row of the table.

    number          value of `general.file_type` (llama.cpp's LLAMA_FTYPE_*)
    base            type of most matrices
    output          type of the output matrix, or of the embedding if it is the output
    embedding       type of a token embedding that is not the output
    experts         type of tensors with three axes
    attn_v          choice for `attn_v`, `attn_qkv` and `attn_kv_b`; i and n count these tensors
    ffn_down        choice for `ffn_down`; i and n count layers
    ffn_up          choice for `ffn_up` and `ffn_gate`, likewise
    attn_qk         type of `attn_q` and `attn_k`
    attn_output     type of `attn_output`
    attn_output_8   type of `attn_output` in a model with 8 experts
    smallest        less than three bits: of the rules for experts and 70B, it has its own
    """

    name: str
    number: int
    base: str
    output: str
    embedding: str
    experts: str
    attn_v: Choice
    ffn_down: Choice
    ffn_up: Choice
    attn_qk: str
    attn_output: str
    attn_output_8: str
    smallest: bool


def _row(
    name: str,
    number: int,
    base: str,
    attn_v: Choice = (),
    ffn_down: Choice = (),
    output: str = "Q6_K",
    embedding: str | None = None,
    experts: str | None = None,
    ffn_up: Choice = (),
    attn_qk: str | None = None,
    attn_output: str | None = None,
    attn_output_8: str | None = None,
    smallest: bool = False,
) -> FileType:
    """A row of the table; types default to the base."""
    return FileType(
        name=name,
        number=number,
        base=base,
        output=output,
        embedding=embedding or base,
        experts=experts or base,
        attn_v=attn_v,
        ffn_down=ffn_down,
        ffn_up=ffn_up,
        attn_qk=attn_qk or base,
        attn_output=attn_output or base,
        attn_output_8=attn_output_8 or base,
        smallest=smallest,
    )


def _smallest(name: str, number: int, base: str, better: str, attn_output: str) -> FileType:
    """A row of less than three bits: `better` is the type of what is more sensitive."""
    return _row(
        *(name, number, base, (("Q4_K", _shared_or_experts), (better, _all))),
        ffn_down=((better, _first_eighth),),
        output="Q5_K",
        embedding=better,
        attn_output=attn_output,
        attn_output_8="Q5_K",
        smallest=True,
    )


_Q6_SOME = (("Q6_K", _some),)
_Q5_FIRST = (("Q5_K", _first_eighth),)
_Q5_SHARED = (("Q5_K", _shared_by_four),)
_Q3_M_V = (("Q5_K", _first_two), ("Q4_K", _all))
_Q3_M_DOWN = (("Q5_K", _first_sixteenth), ("Q4_K", _all))
_Q2_V = (("Q4_K", _shared_by_four), ("Q3_K", _all))
_Q4_SHARED = (("Q4_K", _shared_by_four),)
_Q4_FIRST = (("Q4_K", _first_eighth),)
_IQ3_M_DOWN = (*_Q4_FIRST, ("Q4_K", _some_of_eight_experts))

FILE_TYPES: dict[str, FileType] = {
    f.name: f
    for f in (
        _row("F32", 0, "F32"),
        _row("F16", 1, "F16"),
        _row("BF16", 32, "BF16"),
        _row("Q8_0", 7, "Q8_0", output="Q8_0"),
        _row("Q6_K", 18, "Q6_K"),
        _row("Q5_K_M", 17, "Q5_K", _Q6_SOME, _Q6_SOME),
        _row("Q5_K_S", 16, "Q5_K"),
        _row("Q5_1", 9, "Q5_1"),
        _row("Q5_0", 8, "Q5_0"),
        _row("Q4_K_M", 15, "Q4_K", _Q6_SOME, _Q6_SOME, attn_output_8="Q5_K"),
        _row("Q4_K_S", 14, "Q4_K", (("Q5_K", _first_four),), _Q5_FIRST, attn_output_8="Q5_K"),
        _row("IQ4_NL", 25, "IQ4_NL", _Q5_SHARED, _Q5_FIRST, attn_output_8="Q5_K"),
        _row("IQ4_XS", 30, "IQ4_XS", _Q5_SHARED, _Q5_FIRST, attn_output_8="Q5_K"),
        _row("Q4_1", 3, "Q4_1"),
        _row("Q4_0", 2, "Q4_0"),
        _row("MXFP4_MOE", 38, "Q8_0", output="Q8_0", experts="MXFP4"),
        _row("Q3_K_L", 13, "Q3_K", (("Q5_K", _all),), (("Q5_K", _all),), attn_output="Q5_K"),
        _row(
            *("Q3_K_M", 12, "Q3_K", _Q3_M_V, _Q3_M_DOWN), attn_output="Q4_K", attn_output_8="Q5_K"
        ),
        _row("Q3_K_S", 11, "Q3_K", attn_output_8="Q5_K"),
        _row(
            *("Q2_K", 10, "Q2_K", _Q2_V, (("Q3_K", _all),)),
            attn_output="Q3_K",
            attn_output_8="Q5_K",
        ),
        _row("Q2_K_S", 21, "Q2_K", _Q4_SHARED, _Q4_FIRST),
        _row(
            *("IQ3_M", 27, "IQ3_S", (("Q4_K", _all),), _IQ3_M_DOWN),
            attn_output="Q4_K",
            attn_output_8="Q5_K",
        ),
        _row("IQ3_S", 26, "IQ3_S", _Q4_SHARED, attn_output_8="Q5_K"),
        _row(
            *("IQ3_XS", 22, "IQ3_S", _Q4_SHARED),
            ffn_up=(("IQ3_XXS", _middle),),
            attn_qk="IQ3_XXS",
            attn_output_8="Q5_K",
        ),
        _row(
            *("IQ3_XXS", 23, "IQ3_XXS", (*_Q4_SHARED, ("IQ3_S", _all))),
            ffn_down=(*_Q4_FIRST, ("Q3_K", _all)),
            output="Q5_K",
            embedding="IQ3_S",
            attn_qk="IQ2_S",
            attn_output="IQ3_S",
            attn_output_8="Q5_K",
        ),
        _smallest("IQ2_M", 29, "IQ2_S", "IQ3_S", "IQ3_S"),
        _smallest("IQ2_S", 28, "IQ2_XS", "IQ3_S", "IQ3_S"),
        _smallest("IQ2_XS", 20, "IQ2_XS", "Q2_K", "IQ2_XS"),
        _smallest("IQ2_XXS", 19, "IQ2_XXS", "Q2_K", "IQ2_XXS"),
        _smallest("IQ1_M", 31, "IQ1_M", "Q2_K", "IQ2_XXS"),
        _smallest("IQ1_S", 24, "IQ1_S", "Q2_K", "IQ2_XXS"),
        _row("Q2_0", 41, "Q2_0", embedding="Q4_K"),
        _row("TQ2_0", 37, "TQ2_0", embedding="Q4_K"),
        _row("TQ1_0", 36, "TQ1_0", embedding="Q4_K"),
    )
}


_FALCON: dict[str, dict[str, Any]] = {
    "Q4_K_M": {"ffn_down": (("Q6_K", _first_sixteenth), ("Q5_K", _some))},
    "Q4_K_S": {"ffn_down": ()},
    "Q3_K_L": {"ffn_down": (("Q4_K", _all),), "attn_output": "Q4_K"},
    "Q3_K_M": {"ffn_down": (("Q5_K", _first_sixteenth), ("Q4_K", _some))},
}


_SHORT = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}  # as llama-quantize has them


def check_file_type(name: str) -> str:
    """The name of a file type, or what stands for it: Q4_K is Q4_K_M. Raises QuantError for any
    other."""
    name = _SHORT.get(name, name)
    if name not in FILE_TYPES:
        names, near = ", ".join(FILE_TYPES), suggestion(name, FILE_TYPES)
        raise QuantError(f"{name!r} is no file type; known are {names}{near}")
    return name


# What a file type chooses otherwise where the importance of columns is known.
_KNOWING: dict[str, dict[str, Any]] = {
    "IQ4_NL": {"ffn_down": ()},
    "IQ4_XS": {"ffn_down": ()},
    "IQ3_XXS": {"attn_v": _Q4_SHARED, "ffn_down": ()},
    "Q4_0": {"ffn_down": (("Q4_1", _first_eighth),)},
    "Q5_0": {"ffn_down": (("Q5_1", _first_eighth),)},
}


def of_model(row: FileType, model: ModelFacts) -> FileType:
    """The row for a model. Of architectures, only Falcon differs from the table."""
    if model.has_importance:
        row = replace(row, **_KNOWING.get(row.name, {}))
    if model.architecture != "falcon":
        return row
    usual = {"output": "Q8_0"} if row.smallest else {"output": "Q8_0", "attn_output": row.base}
    return replace(row, **(usual | _FALCON.get(row.name, {})))
