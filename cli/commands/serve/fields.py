"""A JSON object → checked fields. Every fault is kept, and all are told at once.

A library that checks types, such as pydantic, would take over this file's part and no more: ranges
are those of Sampling, messages and tools those of data sets (pyggml.chat.messages), and both are
checked with the same sentences where no request is. A field that the API has and this server has
not is refused by its value (`only`) or passed over (`ignore`), of which a schema says neither. So
there would be two places for what a request may hold.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from pyggml.chat.messages import BadValue, kind_of
from pyggml.cli.web.errors import ApiError
from pyggml.errors import ConfigError

T = TypeVar("T")
D = TypeVar("D")


class Fields:
    """The fields of an object; null is as if the field were not there.

    A reader makes a field of a JSON value, or raises BadValue with what is wrong with it.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = {name: value for name, value in given.items() if value is not None}
        self._faults: list[tuple[str, str]] = []
        self._known: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def take(self, name: str, read: Callable[[Any], T], default: D) -> T | D:
        """What `read` makes of a field; the default where it is missing or faulty."""
        self._known.add(name)
        if name not in self._given:
            return default
        try:
            return read(self._given[name])
        except BadValue as bad:
            self.fault(name, str(bad))
            return default

    def need(self, name: str, read: Callable[[Any], T], default: D) -> T | D:
        """As `take`, of a field that must be there."""
        if name not in self._given:
            self.fault(name, "is missing")
        return self.take(name, read, default)

    def fault(self, name: str, what: str) -> None:
        self._faults.append((name, what))

    def only(self, name: str, values: Iterable[Any], why: str) -> None:
        """A field that is known, and may have no value but these."""
        self._known.add(name)
        if name in self._given and self._given[name] not in values:
            self.fault(name, f"is {brief(self._given[name])}, {why}")

    def ignore(self, *names: str) -> None:
        """Fields that change no answer."""
        self._known.update(names)

    def build(self, make: Callable[..., T], given: Mapping[str, Any]) -> T | None:
        """make(**given), a dataclass of settings; None if it finds a setting out of range."""
        try:
            return make(**given)
        except ConfigError as error:
            for fault in error.faults:
                name, what = ("", fault) if isinstance(fault, str) else fault
                self.fault(name, what if len(what) < 300 else f"{what[:60]} … {what[-200:]}")
            return None

    def check(self) -> None:
        """Raise ApiError with every fault, and with fields that nobody asked for."""
        for name in sorted(self._given.keys() - self._known):
            self.fault(name[:64], "is not supported")
        if self._faults:
            said = dict.fromkeys(f"{name} {what}".strip() for name, what in self._faults)
            raise ApiError(400, "; ".join(list(said)[:20]), self._faults[0][0] or None)


# -- readers ------------------------------------------------------------------------------------


def brief(value: Any) -> str:
    """A value of a client in a sentence."""
    if isinstance(value, str):
        return f"{value[:40]!r}" + "…" * (len(value) > 40)
    if isinstance(value, list | dict):
        return f"a{'n' * isinstance(value, dict)} {kind_of(value)}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value!r}"[:40]


def whole(low: int, high: int) -> Callable[[Any], int]:
    """Whole numbers; a float of such a value is one, as in JavaScript."""

    def read(value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise BadValue(f"is {brief(value)}, wanted a whole number from {low} to {high}")
        return value

    return read


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadValue(f"is {brief(value)}, wanted true or false")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadValue(f"is {brief(value)}, wanted a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadValue("has half of a surrogate pair") from None
    return value


def object_of(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadValue(f"is {brief(value)}, wanted an object")
    return value


def anything(value: Any) -> Any:
    return value
