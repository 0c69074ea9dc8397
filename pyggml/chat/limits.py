"""Limits on what a chat template may cost: each operation is measured before it is made.

size       characters of a text, items of a list: at most MOST in one result, TOTAL in all results
weight     size of a value with everything in it, for comparisons: at most MOST characters in
           VALUES values
steps      passes of loops, calls, filters and tests; also the seconds of processor time for them

A template above a limit is refused with OverflowError. Real ones stay a hundred times below.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable
from time import thread_time
from typing import Any

MOST = 1 << 23
TOTAL = 1 << 26
VALUES = 1 << 18
STEPS = 1 << 21
SECONDS = 5.0
_BITS = 4096  # of an integer
_WORK = 1 << 30  # characters compared in a search: text times pattern
_WIDTH = re.compile(r"\d{5}|\*|\{[^}]*\{")  # 10000 or more, or a width that is an argument
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
        if self.steps > STEPS or thread_time() > self.end:
            raise OverflowError("it does not come to an end")

    def take(self, size: int) -> None:
        """Enter a result of this size, before or right after it is made."""
        self.size += size
        if size > MOST or self.size > TOTAL:
            raise OverflowError("it makes too much text")

    def charge_result(self, result: Any) -> Any:
        if isinstance(result, str | list | tuple | dict):
            self.take(len(result))
        return result


SPENT = Spent()


def charge(*values: Any) -> None:
    """Check the weight of values; OverflowError if it is too much."""
    stack, size, n = list(values), 0, 0
    while stack:
        value = stack.pop()
        n += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, list | tuple):
            stack += value
        elif isinstance(value, dict):
            stack += value
            stack += value.values()
        if size > MOST or n + len(stack) > VALUES:
            raise OverflowError("it makes too much text")


# -- operators ----------------------------------------------------------------------------------


def combine(operator: str, left: Any, right: Any, make: Callable[[Any, Any], Any]) -> Any:
    """left + right, left * right, left ** right or left % right."""
    if operator == "%" and isinstance(left, str):
        check_widths(left)
        charge(right)
    elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        bits = bits * abs(right) if operator == "**" else bits + right.bit_length()
        if bits > _BITS:
            raise OverflowError("it makes too large a number")
    elif operator in ("*", "+"):
        SPENT.take(_size_of(operator, left, right))
        return make(left, right)
    return SPENT.charge_result(make(left, right))


def _size_of(operator: str, left: Any, right: Any) -> int:
    sizes = [len(x) if isinstance(x, str | list | tuple) else None for x in (left, right)]
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


def check_widths(text: str) -> None:
    """OverflowError for a format that pads to thousands of characters."""
    if _WIDTH.search(text):
        raise OverflowError("it pads a text to too many characters")


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
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)  # fmt: skip
    SPENT.take(len(text))
    return text


# -- methods of strings -------------------------------------------------------------------------


def check_method(text: str, name: str, arguments: tuple[Any, ...]) -> None:
    """OverflowError for a call of a string's method that costs too much."""
    texts = [a for a in arguments if isinstance(a, str)]
    if any((len(text) + 1) * len(a) > _WORK for a in texts):
        raise OverflowError("it searches for too long a text")
    if name == "replace" and len(texts) > 1:
        SPENT.take(len(text) + text.count(texts[0]) * len(texts[1]))
    if name in ("format", "format_map"):
        check_widths(text)
