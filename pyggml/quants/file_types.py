"""File types: the base type of most matrices of a file, and the tensors with another type.

Source: llama.cpp, src/llama-quant.cpp (`llama_ftype_get_default_type`, and the branches on `ftype`
in `llama_tensor_get_type_impl`). Not included: file types with IQ1 to IQ3, which cannot be written
here; Q2_K_S, which needs an importance matrix; Q1_0 and NVFP4, for which llama.cpp has no fallback
if a row does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

# where(i, n, n_gqa): whether tensor i of n gets the type; n_gqa query heads share a key head.
Where = Callable[[int, int, int], bool]
# The first pair with a true `where` gives the type; otherwise it is the base.
Choice = tuple[tuple[str, Where], ...]


def _all(i: int, n: int, n_gqa: int) -> bool:
    return True


def _some(i: int, n: int, n_gqa: int) -> bool:
    """The first and the last eighth of the tensors, and every third between them."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _first_sixteenth(i: int, n: int, n_gqa: int) -> bool:
    return i < n // 16


def _first_eighth(i: int, n: int, n_gqa: int) -> bool:
    return i < n // 8


def _first_two(i: int, n: int, n_gqa: int) -> bool:
    return i < 2


def _first_four(i: int, n: int, n_gqa: int) -> bool:
    return i < 4


def _shared_by_four(i: int, n: int, n_gqa: int) -> bool:
    return n_gqa >= 4


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
    attn_output     type of `attn_output`
    attn_output_8   type of `attn_output` in a model with 8 experts
    """

    name: str
    number: int
    base: str
    output: str
    embedding: str
    experts: str
    attn_v: Choice
    ffn_down: Choice
    attn_output: str
    attn_output_8: str


def _row(
    name: str,
    number: int,
    base: str,
    attn_v: Choice = (),
    ffn_down: Choice = (),
    output: str = "Q6_K",
    embedding: str | None = None,
    experts: str | None = None,
    attn_output: str | None = None,
    attn_output_8: str | None = None,
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
        attn_output=attn_output or base,
        attn_output_8=attn_output_8 or base,
    )


_Q6_SOME = (("Q6_K", _some),)
_Q5_FIRST = (("Q5_K", _first_eighth),)
_Q5_SHARED = (("Q5_K", _shared_by_four),)
_Q3_M_V = (("Q5_K", _first_two), ("Q4_K", _all))
_Q3_M_DOWN = (("Q5_K", _first_sixteenth), ("Q4_K", _all))
_Q2_V = (("Q4_K", _shared_by_four), ("Q3_K", _all))

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
            *("Q3_K_M", 12, "Q3_K", _Q3_M_V, _Q3_M_DOWN),
            attn_output="Q4_K",
            attn_output_8="Q5_K",
        ),
        _row("Q3_K_S", 11, "Q3_K", attn_output_8="Q5_K"),
        _row(
            *("Q2_K", 10, "Q2_K", _Q2_V, (("Q3_K", _all),)),
            attn_output="Q3_K",
            attn_output_8="Q5_K",
        ),
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


# What a file type chooses for ffn_down where the importance of its columns is known.
_KNOWING: dict[str, Choice] = {
    "IQ4_NL": (),
    "IQ4_XS": (),
    "Q4_0": (("Q4_1", _first_eighth),),
    "Q5_0": (("Q5_1", _first_eighth),),
}


def with_importance(row: FileType) -> FileType:
    """The row for a model whose importance matrix is given."""
    return replace(row, ffn_down=_KNOWING.get(row.name, row.ffn_down))


def of_architecture(row: FileType, architecture: str) -> FileType:
    """The row for an architecture. Only Falcon differs from the table."""
    if architecture != "falcon":
        return row
    usual = {"output": "Q8_0", "attn_output": row.base}
    return replace(row, **(usual | _FALCON.get(row.name, {})))
