"""Expressions as the text of a language: statements for what is used twice, the rest in one piece.

A language has a table of functions by their name in an expression, with places for the operands,
and says how it writes a number and names a value. What is Python is compiled here.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyggml.formulas.expression import Expression, multiple, number, parts_of

_SIGNS = {"+": "({0} + {1})", "*": "({0} * {1})", "/": "({0} / {1})"}
_SIGNS |= {"<": "({0} < {1})", "<=": "({0} <= {1})"}


@dataclass(frozen=True, eq=False)
class Language:
    """How a device writes expressions.

    functions   by name: the call, with {0}, {1}, … for the operands
    number      a number's text
    let         the statement that names a value, with {0} for the name and {1} for the value
    """

    functions: Mapping[str, str]
    number: Callable[[float], str]
    let: str = "{0} = {1}"

    def lines(
        self,
        roots: Sequence[Expression],
        symbols: Mapping[str, str] | None = None,
        temporary: str = "t",
    ) -> tuple[list[str], list[str]]:
        """Statements, and the texts of the roots after them.

        symbols: the texts of symbols; their own names if there are none. temporary: how the names
        of what is used twice begin
        """
        statements: list[str] = []
        texts: dict[Expression, str] = {}
        parts = list(parts_of(*roots))
        uses = Counter((*roots, *(o for e in parts for o in e.operands)))
        for e in parts:
            text = self._text(e, texts, symbols or {})
            if uses[e] > 1 and e.operands:
                name = f"{temporary}{len(statements)}"
                statements.append(self.let.format(name, text))
                text = name
            texts[e] = text
        return statements, [texts[root] for root in roots]

    def _text(
        self, e: Expression, texts: Mapping[Expression, str], symbols: Mapping[str, str]
    ) -> str:
        if e.operation == "number":
            return self.number(float(e.value))
        if e.operation == "symbol":
            return symbols.get(str(e.value), str(e.value))
        if e.operation == "*" and e.operands[0] is number(-1):
            return f"(-{texts[e.operands[1]]})"
        if e.operation == "+":
            negative = [o for o in e.operands if multiple(o)[0] == -1]
            if len(negative) == 1 and negative[0].operands:
                (other,) = (o for o in e.operands if o is not negative[0])
                return f"({texts[other]} - {texts[negative[0].operands[1]]})"
        pattern = _SIGNS.get(e.operation) or self.functions[e.operation]
        return pattern.format(*(texts[o] for o in e.operands))


def float32_python(functions: Mapping[str, str]) -> Language:
    """Python for Numba, of float32 numbers, with these functions besides its own. f4 is NumPy's
    float32."""
    own = {
        "where": "({1} if {0} else {2})",
        "minimum": "min({0}, {1})",
        "maximum": "max({0}, {1})",
        "abs": "abs({0})",
        "sgn": "(f4({0} > f4(0)) - f4({0} < f4(0)))",
    }
    return Language({**own, **functions}, number=lambda value: f"f4({value!r})")


def define_function(
    language: Language,
    name: str,
    arguments: Sequence[str],
    results: Sequence[Expression],
    names: Mapping[str, Any],
) -> Callable[..., Any]:
    """The function, in Python, of symbols that returns the value of an expression, or of several
    the tuple."""
    statements, values = language.lines(results)
    body = "".join(f"    {line}\n" for line in (*statements, f"return {', '.join(values)}"))
    return define(f"def {name}({', '.join(arguments)}):\n{body}", name, names)


def define(text: str, name: str, names: Mapping[str, Any]) -> Callable[..., Any]:
    """The function of this name that a text of Python defines with these global names. Numba finds
    its machine code again by this file and by the function's name."""
    scope = dict(names)
    exec(compile(text, __file__, "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return function
