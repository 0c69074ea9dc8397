"""What an adapter is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyggml.settings import SEED, Settings, of_adapter, one_of

STARTS = ("kaiming", "pissa", "loftq")


def _modules_fit(names: object) -> bool:
    if not isinstance(names, list | tuple):
        return names is None
    words = all(isinstance(name, str) and name for name in names)
    return len(names) > 0 and words and len(set(names)) == len(names)


def _patterns_fit(least: float, most: float, *kinds: type) -> Callable[[object], bool]:
    """Whether a value maps patterns of names to numbers of these kinds within these bounds."""

    def fits(value: object) -> bool:
        if not isinstance(value, Mapping):
            return value is None
        words = all(isinstance(name, str) and name for name in value)
        numbers = all(type(x) in kinds and least <= x <= most for x in value.values())
        return len(value) > 0 and words and numbers

    return fits


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Settings):
    """What an adapter is: y += alpha / rank · B(A x), A (rank, n_in), B (n_out, rank), per target.

    Experts have one A and one B each; the token embedding has A (n_vocab, rank), B (n_embd, rank).
    docs/adapters.md tells of each kind.
    """

    rank: int = of_adapter(8, "rank r of the update", "1 to 4096", aliases=("lora-r",), common=True)
    alpha: float = of_adapter(
        16.0, "scale of the update, times 1 / rank", "above 0, below 1e6", common=True
    )
    modules: tuple[str, ...] | None = of_adapter(
        None,
        "target modules, by their names in GGUF files (attn_q,ffn_down_exps,output,token_embd) or "
        "in transformers (q_proj,down_proj,lm_head); all-linear, the default, is all linear ones "
        "in the blocks but experts, their routers and matrices whose updates llama.cpp drops",
        "names, none of them twice",
        _modules_fit,
        aliases=("lora-target-modules", "target-modules"),
        brief="target modules, such as q_proj [all-linear]",
        common=True,
    )
    skip_layers: int = of_adapter(
        0,
        "leave the first N blocks alone; the backward pass ends before them, which saves time",
        "0 or more",
    )
    rslora: bool = of_adapter(
        False,
        "rsLoRA: scale by alpha / √rank instead, which suits high ranks",
        aliases=("use-rslora",),
    )
    rank_pattern: Mapping[str, int] | None = of_adapter(
        None,
        "ranks of the matrices that match a pattern, such as 'ffn_*=16,blk.0.*=4'; of several that "
        "match, the last counts",
        "patterns with a rank of 1 to 4096 each",
        _patterns_fit(1, 4096, int),
    )
    alpha_pattern: Mapping[str, float] | None = of_adapter(
        None,
        "alphas of the matrices that match a pattern, likewise",
        "patterns with a number above 0 each",
        _patterns_fit(1e-6, 1e6, int, float),
    )
    dropout: float = of_adapter(0.0, "dropout on the input of A, in training alone", "0 to below 1")
    init: str = of_adapter(
        "kaiming",
        "initial A and B: kaiming (A random, B zero), or pissa (the principal singular vectors of "
        "the matrix, subtracted from it again by the file, which has twice the rank for that), or "
        "loftq (those of what quantising took from the matrix of --original)",
        *one_of(STARTS),
    )
    dora: bool = of_adapter(
        False,
        "DoRA: train the magnitude of each row of a matrix, too; no adapter file can hold that, so "
        "the output is the whole model, merged",
        aliases=("use-dora",),
    )
    plus_ratio: float = of_adapter(
        1.0,
        "LoRA+: learning rate of B as a multiple of that of A",
        "above 0, at most 10000",
        aliases=("loraplus-lr-ratio",),
    )
    seed: int = of_adapter(0, "seed of the random start of A (B starts at zero)", *SEED)
