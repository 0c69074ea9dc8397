"""The settings of a fine-tune: every default, its help text and its range stand here once.

A command line takes all three from `dataclasses.fields`: metadata "help", and "wanted" in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pyggml.errors import ConfigError, Fault
from pyggml.lora.data import SPECIAL_TOKENS
from pyggml.model import COMPUTE_TYPES

SCHEDULERS = ("cosine", "linear", "constant")


def _setting(
    default: Any,
    help: str,
    wanted: str = "",
    fits: Callable[[Any], bool] = lambda value: True,
    may_change: bool = False,
) -> Any:
    """A field with its help and range; `may_change`: a resumed run may have another value."""
    about = {"help": help, "wanted": wanted, "fits": fits, "may_change": may_change}
    return field(default=default, metadata=about)


def _at_least(low: int) -> tuple[str, Callable[[Any], bool]]:
    return f"{low} or more", lambda value: value >= low


def _one_of(names: tuple[str, ...]) -> tuple[str, Callable[[Any], bool]]:
    return f"one of {', '.join(names)}", lambda value: value in names


_SEED = ("0 to 2^64 - 1", lambda value: 0 <= value < 1 << 64)
_BETA = ("at least 0 and below 1", lambda value: 0 <= value < 1)


def _modules_fit(names: object) -> bool:
    if not isinstance(names, list | tuple):
        return names is None
    words = all(isinstance(name, str) and name for name in names)
    return len(names) > 0 and words and len(set(names)) == len(names)


def _is_of_kind(value: object, default: object) -> bool:
    """Whether a value is what a setting with this default takes: whole numbers serve as floats,
    True as no number."""
    if default is None:
        return True
    if isinstance(value, bool) or isinstance(default, bool):
        return type(value) is type(default)
    kinds = (int, float) if isinstance(default, float) else type(default)
    return isinstance(value, kinds)


class _Checked:
    """A dataclass whose fields are held against their ranges when it is made."""

    def __post_init__(self) -> None:
        faults = self._faults()
        if faults:
            raise ConfigError(faults)

    def _faults(self) -> list[Fault]:
        found = [(f, getattr(self, f.name)) for f in fields(self)]  # type: ignore[arg-type]
        return [
            (f.name, f"is {value!r}, wanted {f.metadata['wanted'] or 'true or false'}")
            for f, value in found
            if not (_is_of_kind(value, f.default) and f.metadata["fits"](value))
        ]

    def settled(self) -> Mapping[str, Any]:
        """What a resumed run must share, by name."""
        kept = [f.name for f in fields(self) if not f.metadata["may_change"]]  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in kept}


@dataclass(frozen=True, kw_only=True)
class LoraConfig(_Checked):
    """What an adapter is: y += alpha / rank · B(A x), A (rank, n_in), B (n_out, rank), per target.

    Experts have one A and one B each; the token embedding has A (n_vocab, rank), B (n_embd, rank).

    Raises ConfigError with every setting that is out of range.
    """

    rank: int = _setting(8, "rank of the update", "1 to 4096", lambda r: 1 <= r <= 4096)
    alpha: float = _setting(
        16.0, "strength: the update is scaled by alpha / rank", "above 0", lambda a: 0 < a < 1e6
    )
    modules: tuple[str, ...] | None = _setting(
        None,
        "modules to adapt, such as attn_q,ffn_down_exps, output or token_embd (default: all linear "
        "ones in the blocks but experts and their routers)",
        "names, none of them twice",
        _modules_fit,
    )
    skip_layers: int = _setting(
        0,
        "leave the first N blocks alone; the backward pass ends before them, which saves time",
        *_at_least(0),
    )
    seed: int = _setting(0, "seed of the random start of A (B starts at zero)", *_SEED)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(_Checked):
    """How a run trains. Lengths count tokens, windows are `ctx` tokens, a step is one update.

    Raises ConfigError with every setting that is out of range.
    """

    ctx: int = _setting(256, "tokens in a window", "2 to 2^20", lambda n: 2 <= n <= 1 << 20)
    batch: int = _setting(
        1, "windows in one pass; more need more memory", "1 to 65536", lambda n: 1 <= n <= 1 << 16
    )
    grad_accum: int = _setting(1, "passes in one step", "1 to 65536", lambda n: 1 <= n <= 1 << 16)
    epochs: int = _setting(1, "times that the text is read", *_at_least(1))
    max_steps: int = _setting(0, "end after this many steps (0: no limit)", *_at_least(0))
    lr: float = _setting(
        2e-4, "highest learning rate", "above 0, at most 10", lambda x: 0 < x <= 10
    )
    lr_scheduler: str = _setting(
        "cosine", "how the learning rate falls to lr_min after the warm-up", *_one_of(SCHEDULERS)
    )
    lr_min: float = _setting(0.0, "learning rate at the end", "0 or more", lambda x: 0 <= x <= 10)
    warmup_steps: int = _setting(
        10, "steps in which the learning rate rises; at most half of all steps", *_at_least(0)
    )
    weight_decay: float = _setting(0.01, "AdamW's decay", "0 to 1", lambda x: 0 <= x <= 1)
    clip: float = _setting(
        1.0, "longest gradient over all parameters (0: any)", "0 or more", lambda x: 0 <= x < 1e30
    )
    beta1: float = _setting(0.9, "AdamW's memory of the gradient", *_BETA)
    beta2: float = _setting(0.999, "AdamW's memory of its square", *_BETA)
    eps: float = _setting(
        1e-8, "AdamW's guard against a zero square", "above 0, at most 1", lambda x: 0 < x <= 1
    )
    seed: int = _setting(0, "seed of the order of the windows", *_SEED)
    special_tokens: str = _setting(
        "auto",
        "what <|im_start|> and the like are in the text: parse makes each one token, plain leaves "
        "it a few characters, auto parses rows (JSON Lines, JSON, CSV) and leaves plain text plain",
        *_one_of(SPECIAL_TOKENS),
    )
    val_split: float = _setting(
        0.05,
        "share of the text, from its end, held out; of rows (JSON Lines, JSON, CSV) whole ones",
        "0 to 0.5",
        lambda x: 0 <= x <= 0.5,
    )
    val_every: int = _setting(
        100, "steps between validations (0: first and last only)", *_at_least(0), may_change=True
    )
    val_windows: int = _setting(
        32, "most windows that a validation reads", *_at_least(1), may_change=True
    )
    checkpoint_dir: str | None = _setting(
        None, "folder for checkpoints (default: none are kept)", may_change=True
    )
    checkpoint_every: int = _setting(
        100, "steps between checkpoints (0: last only)", *_at_least(0), may_change=True
    )
    grad_checkpointing: bool = _setting(
        False,
        "compute each layer again for its backward pass instead of keeping its inside: far less "
        "memory, about a quarter more time, the same result bit for bit",
        may_change=True,
    )
    threads: int = _setting(0, "threads to use (0: all)", *_at_least(0), may_change=True)
    compute: str = _setting("auto", "how products are computed", *_one_of(COMPUTE_TYPES))

    def _faults(self) -> list[Fault]:
        faults = super()._faults()
        both = (self.lr, self.lr_min)
        if all(_is_of_kind(rate, 0.0) for rate in both) and self.lr_min > self.lr:
            fault = f"is {self.lr_min}, wanted at most the highest rate, which is {self.lr}"
            faults.append(("lr_min", fault))
        return faults

    @property
    def windows_per_step(self) -> int:
        return self.batch * self.grad_accum
