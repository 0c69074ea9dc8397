"""How a sequence's context is kept: the settings that every command with a cache shares."""

from dataclasses import dataclass

from pyggml.errors import Fault
from pyggml.generation.memory import CACHE_TYPES, CacheType
from pyggml.settings import Settings, at_least, one_of, setting

_WANTED, _IS_TYPE = one_of(CACHE_TYPES)
_OF_ONE = _WANTED, lambda name: name is None or _IS_TYPE(name)


@dataclass(frozen=True, kw_only=True)
class Context(Settings):
    """How much a sequence may hold, and how its cache keeps it.

    Raises ConfigError with every setting that is out of range.
    """

    cache_type: str = setting(
        "f16",
        "type of the KV cache; q8_0 takes about half the memory, q4_0 about a quarter",
        *one_of(CACHE_TYPES),
        group="memory",
        common=True,
    )
    cache_type_k: str | None = setting(None, "type of the keys alone", *_OF_ONE, group="memory")
    cache_type_v: str | None = setting(None, "type of the values alone", *_OF_ONE, group="memory")
    context_shift: bool = setting(
        False,
        "context shift: a full context drops half of its tokens and goes on",
        group="memory",
        common=True,
        brief="drop half of a full context and go on",
    )
    keep: int = setting(0, "first tokens that a context shift keeps", *at_least(0), group="memory")

    def _faults(self) -> list[Fault]:
        usual = type(self).__dataclass_fields__["cache_type"].default
        if self.cache_type != usual and self.cache_type_k and self.cache_type_v:
            said = f"is {self.cache_type}, but keys and values have types of their own: drop it"
            return [*super()._faults(), ("cache_type", said)]
        return super()._faults()

    @property
    def cache_types(self) -> CacheType:
        """The types of keys and of values."""
        return self.cache_type_k or self.cache_type, self.cache_type_v or self.cache_type

    @property
    def n_keep(self) -> int | None:
        """First tokens that a shift keeps; None: a full context ends the text."""
        return self.keep if self.context_shift else None
