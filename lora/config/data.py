"""What is read, and how it becomes windows."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml.lora.config.settings import Settings, one_of, setting

SPECIAL_TOKENS = ("auto", "plain", "parse")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Settings):
    """What is read, and how it becomes windows of `ctx` tokens. See `pyggml.lora.data`."""

    ctx: int = setting(
        256,
        "tokens in a window",
        "2 to 2^20",
        lambda n: 2 <= n <= 1 << 20,
        group="data",
        common=True,
    )
    val_split: float = setting(
        0.05,
        "share of the text, from its end, held out; of rows (JSON Lines, JSON, CSV) whole ones",
        "0 to 0.5",
        lambda x: 0 <= x <= 0.5,
        group="data",
        common=True,
    )
    special_tokens: str = setting(
        "auto",
        "what <|im_start|> and the like are in the text: parse makes each one token, plain leaves "
        "it a few characters, auto parses rows (JSON Lines, JSON, CSV) and leaves plain text plain",
        *one_of(SPECIAL_TOKENS),
        group="data",
    )
