"""What is changed: a mutant is one change at one place of a source file."""

import ast
import copy
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parents[2]
_OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_DELETED = (ast.Expr, ast.Raise, ast.Delete, ast.AugAssign, ast.Break, ast.Continue)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_EITHER_WAY = {"add", "mul", "fadd", "fmul", "and_", "or_"}  # of LLVM: two arguments in any order
_OF_PYTHON = {"__slots__", "__all__"}  # names whose values change nothing that is computed


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change. `lines` are those of the statement, or of its head; `place` is the number of the
    node among those of the file that may be changed, and of its change."""

    file: str
    line: int
    kind: str
    was: str
    now: str
    lines: tuple[int, int]
    place: tuple[int, int]
    in_function: bool

    @property
    def name(self) -> str:
        """What no other mutant is called."""
        return f"{self} {self.place}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {self.was} → {self.now}"


@dataclass(frozen=True, slots=True)
class _Node:
    """A node that may be changed, and where it stands."""

    node: ast.AST
    lines: tuple[int, int]
    in_function: bool


def _is_named(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _is_left_out(node: ast.AST) -> bool:
    """Whether changes in it are plainly without effect, or of a message alone."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return True  # a docstring
        case ast.If(test=test):
            return _is_named(test, {"TYPE_CHECKING"})
        case ast.Assign(targets=[target]):
            return _is_named(target, _OF_PYTHON)
        case ast.keyword(arg=name):
            return name in ("strict", "stacklevel")  # strict: lengths that are equal anyway
        case ast.Call(func=function):
            return _is_named(function, {"dataclass", "cast"})
    return isinstance(node, ast.Import | ast.ImportFrom)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes inside, but for type hints and what an error says."""
    hidden = {"annotation", "returns", "exc", "cause", "msg"}
    for name, value in ast.iter_fields(node):
        if name not in hidden:
            inside = value if isinstance(value, list) else [value]
            yield from (v for v in inside if isinstance(v, ast.AST) and not _is_left_out(v))


def _nodes(tree: ast.AST) -> Iterator[_Node]:
    """Every node that may be changed, in the order of the file."""

    def walk(node: ast.AST, lines: tuple[int, int], in_function: bool) -> Iterator[_Node]:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = (node.end_lineno or 0) if not body else max(node.lineno, body[0].lineno - 1)
            lines = node.lineno, last
        yield _Node(node, lines, in_function)
        inside = set()
        if isinstance(node, _FUNCTIONS):
            inside = {id(n) for n in (node.body if isinstance(node.body, list) else [node.body])}
        for child in _children(node):
            yield from walk(child, lines, in_function or id(child) in inside)

    return walk(tree, (0, 0), False)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(what kind of change, what stands in the node's place)."""

    def other(**fields: object) -> ast.AST:
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    def one_more(of: ast.expr) -> ast.expr:
        return ast.BinOp(of, ast.Add(), ast.Constant(1))

    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield "comparison", other(ops=[*ops[:i], _OTHER[type(op)](), *ops[i + 1 :]])
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in _OTHER:
            yield "operator", other(op=_OTHER[type(op)]())
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition", other(test=ast.UnaryOp(ast.Not(), test))
        case ast.comprehension(ifs=[test, *others]):
            yield "condition", other(ifs=[ast.UnaryOp(ast.Not(), test), *others])
        case ast.Constant(value=bool(value)):
            yield "constant", other(value=not value)
        case ast.Constant(value=int(value) | float(value)):
            yield from (("constant", other(value=value + step)) for step in (1, -1))
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return", other(value=ast.Constant(None))
        case ast.Slice(lower=lower, upper=upper):
            if lower is not None and not isinstance(lower, ast.Constant):
                yield "slice", other(lower=one_more(lower))
            if upper is not None and not isinstance(upper, ast.Constant):
                yield "slice", other(upper=one_more(upper))
        case ast.Call(func=function) if _takes_either_order(function):
            pass
        case ast.Call(args=[a, b, *others]) if ast.dump(a) != ast.dump(b):
            if not any(isinstance(x, ast.Starred) for x in (a, b)):
                yield "arguments", other(args=[b, a, *others])
    if _is_deletable(node):
        yield "deletion", ast.Pass()


def _takes_either_order(function: ast.expr) -> bool:
    """Whether the order of its arguments changes nothing."""
    match function:
        case ast.Name(id="min" | "max"):
            return True
        case ast.Attribute(value=ast.Name(id=of) | ast.Attribute(attr=of), attr=name):
            return of in ("b", "builder") and name in _EITHER_WAY
    return False


def _is_deletable(node: ast.AST) -> bool:
    """Whether this is a statement after whose deletion its file still has all its names."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all(isinstance(t, ast.Attribute | ast.Subscript) for t in targets)
    return isinstance(node, _DELETED)


def mutants_of(file: str, root: Path = ROOT) -> Iterator[Mutant]:
    """Every mutant of a file, named from the checkout's root."""
    tree = ast.parse((root / file).read_bytes())
    for i, at in enumerate(_nodes(tree)):
        for k, (kind, new) in enumerate(_changes(at.node)):
            line = getattr(at.node, "lineno", at.lines[0])
            was, now = (" ".join(ast.unparse(n).split())[:80] for n in (at.node, new))
            yield Mutant(file, line, kind, was, now, at.lines, (i, k), at.in_function)


def compile_mutant(mutant: Mutant, root: Path = ROOT) -> CodeType:
    """Its file, compiled with the change."""
    path = root / mutant.file
    tree = ast.parse(path.read_bytes())
    i, k = mutant.place
    old = next(at.node for n, at in enumerate(_nodes(tree)) if n == i)
    new = ast.copy_location([*_changes(old)][k][1], old)
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list) and any(v is old for v in value):
                value[:] = [new if v is old else v for v in value]
    return compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)


def draw(files: Sequence[str], n: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    """n lines of these files, drawn from all that can be changed, and of each line one mutant."""
    lines: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for file in files:
        for mutant in mutants_of(file, root):
            lines[file, mutant.line].append(mutant)
    rng, order = random.Random(seed), sorted(lines)
    rng.shuffle(order)  # a smaller n draws the first of them
    return [rng.choice(lines[line]) for line in order[:n]]
