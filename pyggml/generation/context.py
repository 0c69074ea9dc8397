"""How a sequence's context is kept: the settings that every command with a cache shares."""

from dataclasses import dataclass

from pyggml.generation.memory import CACHE_TYPES
from pyggml.settings import Settings, at_least, one_of, setting


@dataclass(frozen=True, kw_only=True)
class Context(Settings):
    """Raises ConfigError with every setting that is out of range."""

    cache_type: str = setting(
        "f16",
        "type of the KV cache; q8_0 takes about half the memory",
        *one_of(CACHE_TYPES),
        group="memory",
        common=True,
    )
    context_shift: bool = setting(
        False,
        "context shift: a full context drops half of its tokens and goes on",
        group="memory",
        common=True,
        brief="drop half of a full context and go on",
    )
    keep: int = setting(0, "first tokens that a context shift keeps", *at_least(0), group="memory")

    @property
    def n_keep(self) -> int | None:
        """First tokens that a shift keeps; None: a full context ends the text."""
        return self.keep if self.context_shift else None
