"""Limits on what a chat template may cost: each operation is measured before it is made.

size       characters of a text, eight for an item of a list: at most MOST in one result, TOTAL in
           all results
weight     size of a value with everything in it, for comparisons: at most MOST characters in
           VALUES values
steps      passes of loops, calls, filters and tests; also the seconds of processor time for them

A template above a limit is refused with OverflowError. Real ones stay a hundred times below.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable
from itertools import islice
from time import thread_time
from typing import Any

MOST = 1 << 23
TOTAL = 1 << 26
VALUES = 1 << 18
STEPS = 1 << 21
SECONDS = 5.0
ITEM = 8  # characters that an item of a list counts as: it has a place, and may be a number
_BITS = 4096  # of an integer
_WORK = 1 << 30  # characters compared in a search: text times pattern
_WIDTH = re.compile(r"\d{5}|\*|\{[^}]*\{")  # 10000 or more, or a width that is an argument
_NUMBER, _GAP = re.compile(r"\d+"), re.compile(r"\s+")
_QUOTED = re.compile(r"!|%(?:\([^)]*\))?[^%()a-zA-Z]*[ar]")  # a conversion to Python's own form
_ESCAPED = 10  # characters that Python's form has for one, at most
_DIGITS = 400  # of a number with a fraction, written out
_LISTS: Any = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))
_DATE = re.compile(r"%[^A-Za-z%]*\d")  # C libraries take widths in formats of dates


class Spent(threading.local):
    """The cost, so far, of the rendering in this thread."""

    size = 0
    steps = 0
    end = float("inf")

    def begin(self) -> None:
        self.size, self.steps, self.end = 0, 0, thread_time() + SECONDS

    def step(self) -> None:
        self.steps += 1
        # The clock costs more than most steps, which take milliseconds at most.
        if self.steps > STEPS or (self.steps % 8 == 0 and thread_time() > self.end):
            raise OverflowError("it does not come to an end")

    def take(self, size: int) -> None:
        """Enter a result of this size, before or right after it is made."""
        self.size += size
        if size > MOST or self.size > TOTAL:
            raise OverflowError("it makes too much text")

    def charge_result(self, result: Any) -> Any:
        if isinstance(result, str):
            self.take(len(result))
        elif isinstance(result, list | tuple | dict):
            self.take(ITEM * len(result))
        elif isinstance(result, int) and result.bit_length() > 64:
            self.take(result.bit_length() // 8)
        return result


SPENT = Spent()


def charge(*values: Any) -> int:
    """The weight of values; OverflowError if it is too much.

    A namespace and what shows a mapping's content weigh what is in them, as their text has it all.
    """
    stack, size, n = list(values), 0, 0
    while stack:
        value = stack.pop()
        n += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, _LISTS):
            if len(value) > VALUES:
                raise OverflowError("it makes too much text")
            stack += value
        elif isinstance(value, dict):
            stack += value
            stack += value.values()
        elif isinstance(value, int):
            size += value.bit_length() // 32
        elif (content_of := getattr(type(value), "weighed", None)) is not None:
            stack += content_of(value)
        if size > MOST or n + len(stack) > VALUES:
            raise OverflowError("it makes too much text")
    return size


def check_listed(value: Any) -> None:
    """OverflowError for a text too long to be a list of its characters."""
    if isinstance(value, str) and len(value) > VALUES:
        raise OverflowError("it makes too long a list")


# -- operators ----------------------------------------------------------------------------------


def combine(operator: str, left: Any, right: Any, make: Callable[[Any, Any], Any]) -> Any:
    """left + right, left * right, left ** right or left % right."""
    if operator == "%" and isinstance(left, str):
        if isinstance(right, dict):  # whose values are written as often as they are named
            check_format(left, right.values())
        else:
            check_format(left, right if isinstance(right, tuple) else (right,), is_once=True)
    elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        bits = bits * abs(right) if operator == "**" else bits + right.bit_length()
        if bits > _BITS:
            raise OverflowError("it makes too large a number")
    elif operator in ("*", "+") and not (isinstance(left, int) and isinstance(right, int)):
        SPENT.take(_size_of(operator, left, right))
        return make(left, right)
    return SPENT.charge_result(make(left, right))


def _size_of(operator: str, left: Any, right: Any) -> int:
    sizes = [
        len(x) if isinstance(x, str) else ITEM * len(x) if isinstance(x, list | tuple) else None
        for x in (left, right)
    ]
    if operator == "+":
        return sum(size or 0 for size in sizes)
    (a, b), (m, n) = sizes, (left, right)
    return a * n if a is not None and isinstance(n, int) else b * m if b and type(m) is int else 0


def join(parts: Iterable[Any], between: str = "") -> str:
    """The texts of the parts, one after the other."""
    texts, size = list[str](), 0
    for part in parts:
        if not isinstance(part, str):
            charge(part)
        texts.append(str(part))
        size += len(texts[-1]) + len(between)
        if size > MOST:
            break
    SPENT.take(size)
    return between.join(texts)


def check_format(text: str, values: Iterable[Any], is_once: bool = False) -> None:
    """OverflowError for a format that may write too much: wide fields, many, or of long values.

    is_once: each value is written once at most, else each as often as there are fields.
    """
    if _WIDTH.search(text.replace("{{", " ")):  # an escaped brace opens no field
        raise OverflowError("it pads a text to too many characters")
    is_quoted = _QUOTED.search(text) is not None
    sizes = [_n_characters(value, is_quoted) for value in values]
    fields = text.count("%") + text.count("{")
    most = sum(sizes) if is_once else fields * max(sizes, default=0)
    if len(text) + sum(map(int, _NUMBER.findall(text))) + most > MOST:
        raise OverflowError("it makes too much text")


def _n_characters(value: Any, is_quoted: bool) -> int:
    """The most characters that one field makes of a value."""
    if isinstance(value, str) and not is_quoted:
        return len(value)
    if isinstance(value, int):
        return _DIGITS + value.bit_length()
    return _DIGITS + _ESCAPED * charge(value)


def check_date(text: str) -> None:
    if len(text) > 1000 or _DATE.search(text):
        raise OverflowError("it pads a date")


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON, in which < and & are not escaped, unlike Jinja's own."""
    charge(value)
    if indent is not None and not 0 <= indent <= 16:
        raise OverflowError("it indents too far")
    if indent or separators:
        between = sum(map(len, separators or ())) + 2
        # Most have so few parts that they are short however deep; that costs a tenth to know.
        compact = json.dumps(value)
        n_inside = compact.count("[") + compact.count("{")
        n_parts = compact.count(",") + compact.count(":") + 2 * n_inside
        if len(compact) + n_parts * (between + (indent or 0) * n_inside) > MOST:
            _check_json(value, indent or 0, between)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)  # fmt: skip
    SPENT.take(len(text))
    return text


def _check_json(value: Any, indent: int, between: int) -> None:
    """OverflowError for a value whose JSON would be long with all that stands between its parts."""
    level, depth, size = [value], 0, 0
    while level:
        inner = [v for v in level if isinstance(v, list | tuple | dict)]
        size += len(level) * (indent * depth + between) + len(inner) * (indent * depth)
        size += sum(len(v) for v in level if isinstance(v, str))
        size += sum(len(key) for v in inner if isinstance(v, dict) for key in map(str, v))
        if size > MOST:
            raise OverflowError("it makes too much text")
        level = [x for v in inner for x in (v.values() if isinstance(v, dict) else v)]
        depth += 1


# -- methods of strings -------------------------------------------------------------------------


def check_method(text: str, name: str, arguments: tuple[Any, ...]) -> None:
    """OverflowError for a call of a string's method that costs too much."""
    texts = [a for a in arguments if isinstance(a, str)]
    if any((len(text) + 1) * len(a) > _WORK for a in texts):
        raise OverflowError("it searches for too long a text")
    if name == "replace" and len(texts) > 1:
        SPENT.take(len(text) + text.count(texts[0]) * len(texts[1]))
    if name in ("format", "format_map"):
        check_format(text, arguments)
    if name in ("split", "rsplit", "splitlines", "partition", "rpartition"):
        SPENT.take(len(text))
        _check_parts(text, name, texts[0] if texts else None)


def _check_parts(text: str, name: str, separator: str | None) -> None:
    """OverflowError for a text that is split into too many."""
    if len(text) <= VALUES or "partition" in name:
        return
    n_parts = (
        text.count(separator) if separator else sum(1 for _ in islice(_GAP.finditer(text), VALUES))
    )
    if n_parts >= VALUES:
        raise OverflowError("it makes too long a list")
