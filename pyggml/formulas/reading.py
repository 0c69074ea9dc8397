"""Expressions as people write them: dy · (1 - y) · y."""

from collections.abc import Iterator

from pyggml.formulas.expression import Expression, multiple

# How firmly an operation holds its operands; what is written as a call, more firmly than these.
_BINDS = {"where": 0, "<": 1, "<=": 1, "+": 2, "*": 3, "/": 3}
_NAMES = {"sigmoid": "σ", "minimum": "min", "maximum": "max"}


def reading(e: Expression, first: str = "") -> str:
    """One line; in products the symbol of the name `first` comes first."""
    if e.operation == "number":
        return f"{e.value:.6g}"
    if e.operation == "symbol":
        return str(e.value)
    if e.operation not in _BINDS:
        operands = ", ".join(reading(o, first) for o in e.operands)
        return f"{_NAMES.get(e.operation, e.operation)}({operands})"
    if e.operation == "*":
        factors = sorted(_factors(e), key=lambda f: (f.operation != "number", f.value != first))
        texts = [_inner(f, _BINDS["*"], first) for f in factors]
        return "-" + " · ".join(texts[1:]) if multiple(e)[0] == -1 else " · ".join(texts)
    binds = max(_BINDS[e.operation], 1)  # more to the right, where equals stand apart: a / (b / c)
    inner = [_inner(o, binds + i, first) for i, o in enumerate(e.operands)]
    if e.operation == "where":
        return f"{inner[1]} where {inner[0]}, else {inner[2]}"
    if e.operation == "+":
        plus, minus = sorted((_inner(o, 2, first) for o in e.operands), key=_is_negative)
        return f"{plus} - {minus[1:]}" if _is_negative(minus) else f"{plus} + {minus}"
    return f" {e.operation} ".join(inner)


def _is_negative(text: str) -> bool:
    return text.startswith("-")


def _inner(e: Expression, binds: int, first: str) -> str:
    """In parentheses, if what is around it binds more than it does."""
    text = reading(e, first)
    is_loose = _BINDS.get(e.operation, binds) < binds
    return f"({text})" if is_loose or (_is_negative(text) and binds >= _BINDS["*"]) else text


def _factors(e: Expression) -> Iterator[Expression]:
    if e.operation == "*":
        for operand in e.operands:
            yield from _factors(operand)
    else:
        yield e
