"""What an adapter is."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml.lora.config.settings import SEED, Settings, at_least, setting


def _modules_fit(names: object) -> bool:
    if not isinstance(names, list | tuple):
        return names is None
    words = all(isinstance(name, str) and name for name in names)
    return len(names) > 0 and words and len(set(names)) == len(names)


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Settings):
    """What an adapter is: y += alpha / rank · B(A x), A (rank, n_in), B (n_out, rank), per target.

    Experts have one A and one B each; the token embedding has A (n_vocab, rank), B (n_embd, rank).
    """

    rank: int = setting(
        8,
        "rank of the update",
        "1 to 4096",
        lambda r: 1 <= r <= 4096,
        group="adapter",
        common=True,
    )
    alpha: float = setting(
        16.0,
        "strength: the update is scaled by alpha / rank",
        "above 0",
        lambda a: 0 < a < 1e6,
        group="adapter",
        common=True,
    )
    modules: tuple[str, ...] | None = setting(
        None,
        "modules to adapt, such as attn_q,ffn_down_exps, output or token_embd (default: all linear "
        "ones in the blocks but experts and their routers)",
        "names, none of them twice",
        _modules_fit,
        group="adapter",
        common=True,
    )
    skip_layers: int = setting(
        0,
        "leave the first N blocks alone; the backward pass ends before them, which saves time",
        *at_least(0),
        group="adapter",
    )
    seed: int = setting(
        0, "seed of the random start of A (B starts at zero)", *SEED, group="adapter"
    )
