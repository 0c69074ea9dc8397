"""How a sequence's context is kept: the settings that every command with a cache shares."""

from dataclasses import dataclass

from pyggml.errors import Fault
from pyggml.generation.memory import CACHE_TYPES, CacheType
from pyggml.settings import Settings, of_memory, one_of

_WANTED, _IS_TYPE = one_of(CACHE_TYPES)
_OF_ONE = _WANTED, lambda name: name is None or _IS_TYPE(name)


@dataclass(frozen=True, kw_only=True)
class Context(Settings):
    """How much a sequence may hold, and how its cache keeps it.

    Raises ConfigError with every setting that is out of range.
    """

    cache_type: str = of_memory(
        "f16",
        "type of the KV cache; q8_0 takes about half the memory, q4_0 about a quarter",
        *one_of(CACHE_TYPES),
        common=True,
    )
    cache_type_k: str | None = of_memory(None, "type of the keys alone", *_OF_ONE)
    cache_type_v: str | None = of_memory(None, "type of the values alone", *_OF_ONE)
    context_shift: bool = of_memory(
        False,
        "context shift: a full context drops half of its tokens and goes on",
        common=True,
        brief="drop half of a full context and go on",
    )
    keep: int = of_memory(0, "first tokens that a context shift keeps", "0 or more")

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
