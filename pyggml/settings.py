"""What a setting is: a field of a dataclass, with its help, range and group as metadata.

help         what it does, in half a sentence
range        the values that it may have, in words
fits         its range, as a function of the value (default: that of the words, `numbers_in`)
brief        what it does, in the few words of a short help (default: the first clause of `help`)
aliases      what other trainers call it, where the meaning is the same
group        where help lists it, one of GROUPS
common       whether short help lists it
repeated     whether its option is given once for every value, as --stop, rather than with commas
may_change   whether a resumed run may have another value: no number before that depends on it
like         of a default None, a value of the kind that the setting takes
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import partial
from operator import le, lt
from typing import Any

from pyggml.errors import ConfigError, Fault, suggestion

_MOST_SAID = 80  # characters of a value in a sentence
_NUMBER = r"(-?[\d.]+(?:e-?\d+)?|2\^\d+)"
_RANGE = re.compile(rf"(above )?{_NUMBER}(?: or more|(?: to|,)( at most| below)? {_NUMBER})?")
GROUPS = ("model", "data", "sampling", "adapter", "optimiser", "memory", "server", "output")


def setting(
    default: Any,
    help: str,
    range_text: str = "",
    fits: Callable[[Any], bool] | None = None,
    *,
    group: str,
    aliases: tuple[str, ...] = (),
    brief: str = "",
    common: bool = False,
    repeated: bool = False,
    may_change: bool = False,
    like: Any = None,
) -> Any:
    """A field of a dataclass of settings."""
    assert group in GROUPS, f"{group} is no group of settings"
    fits = fits or numbers_in(range_text)
    about = {"help": help, "range": range_text, "fits": fits, "group": group, "common": common}
    about |= {"aliases": aliases, "brief": brief}
    about |= {"repeated": repeated, "may_change": may_change, "like": like}
    return field(default=default, metadata=about)


of_model, of_data, of_sampling, of_adapter, of_optimiser, of_memory, of_server, of_output = (
    partial(setting, group=group) for group in GROUPS
)


def numbers_in(words: str) -> Callable[[Any], bool]:
    """Whether a value is in a range, such as "0 to 2^20", "0 to below 1", "1 or more", "above 0, at
    most 10" or "above 0, below 1"; any value is in "". ValueError for other words."""
    if not words:
        return lambda value: True
    match = _RANGE.fullmatch(words)
    if match is None:
        raise ValueError(f"{words!r} is no range of numbers")
    above, low, bound, high = match.groups()
    least, most = _number(low), _number(high or "inf")
    from_least, to_most = lt if above else le, le if high and bound != " below" else lt
    return lambda value: from_least(least, value) and to_most(value, most)


def _number(word: str) -> float:
    base, power, exponent = word.partition("^")
    return float(base) ** int(exponent) if power else float(word)


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether a value is one of some names."""

    names: tuple[str, ...]

    def __call__(self, value: Any) -> bool:
        return value in self.names

    def suggest(self, value: Any) -> str:
        """The name that was probably meant, as the end of a sentence; "" if none is near."""
        return suggestion(value, self.names) if isinstance(value, str) else ""


def one_of(names: tuple[str, ...]) -> tuple[str, Choice]:
    return f"one of {', '.join(names)}", Choice(names)


SEED = ("0 to 2^64 - 1", lambda value: 0 <= value < 1 << 64)


def is_of_kind(value: object, default: object) -> bool:
    """Whether a value is what a setting with this default takes: whole numbers serve as floats,
    True as no number."""
    if default is None:
        return True
    if isinstance(value, bool) or isinstance(default, bool):
        return type(value) is type(default)
    kinds = (int, float) if isinstance(default, float) else type(default)
    return isinstance(value, kinds)


def _as_python(value: Any) -> Any:
    """A number of NumPy or PyTorch as one of Python, which ranges and files of settings know, and
    so those of a mapping or a list; all else as it is."""
    if isinstance(value, Mapping):
        return {key: _as_python(number) for key, number in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_as_python, value))
    return value.item() if getattr(value, "shape", None) == () else value


def _fits(of: Field[Any], value: object) -> bool:
    if value is None:
        return of.default is None
    like = of.metadata["like"] if of.default is None else of.default
    return is_of_kind(value, like) and bool(of.metadata["fits"](value))


def _fault(of: Field[Any], value: Any) -> str:
    """What is wrong with a value of a setting, as the rest of a sentence."""
    about = of.metadata
    like = about["like"] if of.default is None else of.default
    if isinstance(value, float) and type(like) is int:
        return f"is {value!r}, wanted a whole number, {about['range']}"
    fits = about["fits"]
    near = fits.suggest(value) if isinstance(fits, Choice) else ""
    said = repr(value) if len(repr(value)) <= _MOST_SAID else f"{repr(value)[:_MOST_SAID]}…"
    return f"is {said}, wanted {about['range'] or 'true or false'}{near}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A dataclass whose fields are held against their ranges when it is made. NumPy's numbers
    become Python's.

    Raises ConfigError with every setting that is out of range.
    """

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _as_python(getattr(self, f.name)))
        faults = self._faults()
        if faults:
            raise ConfigError(faults)

    def _faults(self) -> list[Fault]:
        values = [(f, getattr(self, f.name)) for f in fields(self)]
        return [(f.name, _fault(f, value)) for f, value in values if not _fits(f, value)]

    def shared_by_runs(self) -> Mapping[str, Any]:
        """What a resumed run must share, by name."""
        kept = [f.name for f in fields(self) if not f.metadata["may_change"]]
        return {name: getattr(self, name) for name in kept}
