"""Jinja2, with the meaning that chat templates expect and the rights that a stranger's may have.

The meaning is that of transformers' apply_chat_template: blocks are trimmed, loops have break and
continue, `tojson` escapes nothing, and there are `raise_exception`, `strftime_now` and {%
generation %}, which marks what the assistant writes. The rights are listed here: filters, tests,
functions, and methods of strings and mappings. All are measured, see `limits`.
"""

import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from jinja2 import nodes, pass_context, pass_eval_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import sync_do_join
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from pyggml.chat import limits
from pyggml.chat.limits import SPENT
from pyggml.chat.marks import CLOSE, MARKING, OPEN

FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float"),
    *("int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject"),
    *("rejectattr", "reverse", "safe", "select", "selectattr", "sort", "string", "title"),
    *("truncate", "unique", "upper", "wordcount"),
)
METHODS = {
    str: {
        *("capitalize", "count", "endswith", "find", "format", "index", "isalnum", "isalpha"),
        *("isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle"),
        *("isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix"),
        *("replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines"),
        *("startswith", "strip", "swapcase", "title", "upper"),
    },
    dict: {"get", "items", "keys", "values"},
    tuple: {"grouper", "list"},  # of those that groupby makes
}
_LINE_END = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_PLACES = 300  # of a number that is rounded
_BUILT_IN = (str, bytes, int, float, complex, list, tuple, set, frozenset, dict, range)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template."""

    intercepted_binops = frozenset(("+", "-", "*", "**", "//", "%"))
    intercepted_unops = frozenset(("-", "+"))
    concat = staticmethod(limits.join)

    def __init__(self, strftime_now: Callable[[str], str]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, loopcontrols],
            finalize=_charge,
        )
        filters, tests = dict[str, Any](self.filters), dict[str, Any](self.tests)
        checks = dict.fromkeys(FILTERS, _check_filter) | CHECKS
        self.filters = {name: _measure(filters[name], check) for name, check in checks.items()}
        self.filters |= {"join": _join, "tojson": limits.to_json}
        self.filters |= {"_join_parts": limits.join, "_step": _step, "_charge": _charge}
        self.filters["_take"] = SPENT.charge_result
        self.tests = {name: _measure(test, _check_filter) for name, test in tests.items()}
        del self.globals["lipsum"]
        self.globals |= {
            "dict": _Dict(),
            "namespace": _Namespace,
            "raise_exception": _raise,
            "strftime_now": strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        changed: nodes.Template = _Measuring().visit(tree)
        return changed

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, _BUILT_IN):
            return any(isinstance(obj, kind) and attr in METHODS[kind] for kind in METHODS)
        return super().is_safe_attribute(obj, attr, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, str | int | float | slice | None):
            raise SecurityError(f"{type(argument).__name__} is no index")
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return limits.combine(operator, left, right, self.binop_table[operator])

    def call_unop(self, context: Context, operator: str, arg: Any) -> Any:
        return SPENT.charge_result(self.unop_table[operator](arg))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        SPENT.step()
        limits.charge(*args, *kwargs.values())
        bound = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(bound, "__self__", None)
        if isinstance(owner, str):
            limits.check_method(owner, bound.__name__, (*args, *kwargs.values()))
            if bound.__name__ == "join":
                (parts,) = args
                return limits.join(parts, owner)
        return SPENT.charge_result(super().call(__context, __obj, *args, **kwargs))


class _Measuring(NodeTransformer):
    """A template with measured loops, concatenations (~) and comparisons."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        count = _filter("_step", nodes.Const(0), node)
        node.body.insert(0, nodes.ExprStmt(count).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter("_join_parts", nodes.List(node.nodes), node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _wrap(node.expr)
        for operand in node.ops:
            operand.expr = _wrap(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _take(node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _take(node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _take(node) if node.ctx == "load" else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _wrap(node.key)
        return node


def _filter(name: str, value: nodes.Expr, at: nodes.Node) -> nodes.Filter:
    """What a filter makes of a value, on the line of a node."""
    filtered = nodes.Filter(value, name, [], [], None, None)
    filtered.set_lineno(at.lineno)
    return filtered


def _wrap(node: nodes.Expr) -> nodes.Expr:
    """The same, whose weight is checked."""
    return node if isinstance(node, nodes.Const) else _filter("_charge", node, node)


def _take(node: nodes.Expr) -> nodes.Expr:
    """The same, whose result is measured."""
    return _filter("_take", node, node)


# -- filters and functions ----------------------------------------------------------------------


def _measure(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """A filter or test of Jinja's as one step, after a check of its arguments."""
    takes_context = hasattr(function, "jinja_pass_arg")

    @wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        SPENT.step()
        check(*args[takes_context:], **kwargs)
        return SPENT.charge_result(function(*args, **kwargs))

    return measured


def _check_filter(*args: Any, **kwargs: Any) -> None:
    limits.charge(*args, *kwargs.values())


def _check_format(text: Any, *args: Any, **kwargs: Any) -> None:
    limits.charge(text, *args, *kwargs.values())
    limits.check_format(str(text), (*args, *kwargs.values()))


def _check_indent(text: Any, width: int | str = 4, *_: Any, **__: Any) -> None:
    """Jinja makes the indentation also where no line has it; its lines have many kinds of end."""
    limits.charge(text, width)
    n_lines = len(_LINE_END.findall(str(text))) + 2
    limits.SPENT.take(n_lines * (width if isinstance(width, int) else len(width)))


def _check_list(value: Any, *args: Any, **kwargs: Any) -> None:
    limits.check_listed(value)
    limits.charge(value, *args, *kwargs.values())


def _check_replace(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    limits.charge(text, old, new)
    limits.check_method(str(text), "replace", (str(old), str(new)))


def _check_trim(text: Any, chars: Any = None) -> None:
    limits.check_method(str(text), "strip", (chars,))


def _check_round(value: Any, precision: int = 0, method: str = "common") -> None:
    limits.charge(value)
    if abs(precision) > _PLACES:
        raise OverflowError("it makes too large a number")


def _check_sum(values: Any, attribute: Any = None, start: int | float = 0) -> None:
    """Numbers alone: each sum of lists is copied anew."""
    limits.charge(values)
    if not isinstance(start, int | float):
        raise OverflowError("it adds up what are no numbers")


def _check_batch(values: Any, linecount: int, fill_with: Any = None) -> None:
    limits.charge(values, fill_with)
    if linecount > limits.VALUES:
        raise OverflowError("it makes too long a list")


CHECKS: dict[str, Callable[..., None]] = {
    "batch": _check_batch,
    "round": _check_round,
    "sum": _check_sum,
    "groupby": _check_list,
    "format": _check_format,
    "indent": _check_indent,
    "list": _check_list,
    "sort": _check_list,
    "replace": _check_replace,
    "trim": _check_trim,
}


@pass_eval_context
def _join(
    context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    """Jinja's join of a list that has been measured."""
    SPENT.step()
    limits.check_listed(value)
    items = list(value)
    limits.charge(items)
    SPENT.take(len(items) * len(d))
    return str(SPENT.charge_result(sync_do_join(context, items, d, attribute)))


@pass_context  # so that it is not computed once, when the template is compiled
def _step(context: Context, value: Any) -> Any:
    SPENT.step()
    return value


def _charge(value: Any) -> Any:
    """The value itself, after its weight is checked."""
    if not isinstance(value, str):
        limits.charge(value)
    return value


def _raise(message: str) -> None:
    raise Refusal(message)


class Refusal(TemplateError):
    """The template's own complaint about the messages, made with raise_exception."""


class _Dict:
    """The type dict as a function, since its attributes lead into Python's internals."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(Namespace):
    """Jinja's namespace without private names, which lead into Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *mappings = args
        attributes = dict(*mappings, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def weighed(self) -> Iterable[Any]:
        """What its text holds."""
        attributes: dict[str, Any] = object.__getattribute__(self, "_Namespace__attrs")
        return (*attributes, *attributes.values())


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"{name!r} is a private name")


class Generation(Extension):
    """{% generation %} … {% endgeneration %}: what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012  # Jinja2 declares it so, a set of the class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{OPEN}{caller()}{CLOSE}" if MARKING.on else caller()
