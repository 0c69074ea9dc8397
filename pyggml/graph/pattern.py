"""Patterns: nodes that belong together, as text, and where a graph has them.

    norm = rms_norm_mul(x, w); turned = rope_apply(norm, table)

Each line names a node, its op and its sources; a name stands for one tensor throughout.

    (mul_mat | out_prod)(b, a)       one of several ops
    add(y, b) or add(b, y)           one of several nodes, in this order of preference
    out_prod(a, transpose(d))        a source that is a node without a name
    mul_mat(w, view(x))              a source that shows the numbers of x, by whatever view
    wide_rows(x, *more)              further sources, whatever they are
    unit = saved(both)               what a node saves
    _rows = repeat(x)                a node, m.rows, that stays, so that others may read it
"""

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from textwrap import dedent
from typing import NamedTuple

from pyggml.graph.graph import Graph
from pyggml.graph.op import has_kernel
from pyggml.graph.overwriting import maker
from pyggml.graph.tensor import Tensor


class _Line(NamedTuple):
    """ops: names. src: of each source its name, and whether it may be seen by a view."""

    ops: frozenset[str]
    src: tuple[tuple[str, bool], ...]
    has_more: bool


_Lines = dict[str, _Line]
_Tensors = Mapping[str, Tensor]


class Match:
    """Where a graph has a pattern; each name of it is an attribute, the tensor.

    nodes   those with a kernel, of all lines but the ones that stay, in the order of the lines
    """

    def __init__(self, graph: Graph, tensors: _Tensors, nodes: Sequence[Tensor]) -> None:
        self.graph, self.tensors, self.nodes = graph, tensors, nodes

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise AttributeError(f"no {name} in {sorted(self.tensors)}") from None

    def get(self, name: str) -> Tensor | None:
        """The tensor of a name that other patterns have, or another choice of this one."""
        return self.tensors.get(name)

    def is_read(self, *tensors: Tensor) -> bool:
        """Whether other nodes, or the caller, read one of these nodes' results."""
        graph, nodes = self.graph, self.nodes
        return any(
            t.base is not None or t in graph.kept or {*graph.users[t]} - {*nodes} for t in tensors
        )


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """A pattern, of text as above; its last line is looked for first.

    reach   how many nodes before the last line's the others stand at most; None: anywhere
    """

    text: str
    reach: int | None = None
    ways: tuple[_Lines, ...] = field(init=False)

    def __post_init__(self) -> None:
        lines = [_choices(line) for line in ast.parse(dedent(self.text)).body]
        ways = (dict(line for lines in way for line in lines) for way in product(*lines))
        object.__setattr__(self, "ways", tuple(ways))

    @property
    def op_names(self) -> tuple[str, ...]:
        """The op of each line, if it has no choice of ops."""
        return tuple(name for line in self.ways[0].values() for name in line.ops)

    def matches(self, graph: Graph, taken: Collection[Tensor] = ()) -> Iterator[Match]:
        """Every match without a node that is taken by the time; those of a node one by one."""
        for lines in self.ways:
            last = next(reversed(lines))
            for t in (t for op in lines[last].ops for t in graph.by_op.get(op, ())):
                search = _Search(graph, lines, taken, graph.places[t], self.reach)
                for tensors in search.rest({last: t}, tuple(reversed(lines))):
                    if t in taken:
                        break
                    going = (tensors[name] for name in lines if not name.startswith("_"))
                    named = {name.removeprefix("_"): t for name, t in tensors.items()}
                    yield Match(graph, named, [t for t in going if has_kernel(t)])


class _Search(NamedTuple):
    """For the nodes of a pattern around one node of a graph, which stands at `place`."""

    graph: Graph
    lines: _Lines
    taken: Collection[Tensor]
    place: int
    reach: int | None

    def rest(self, tensors: _Tensors, missing: Sequence[str]) -> Iterator[_Tensors]:
        """All ways to give tensors to the other names; missing: lines not yet looked at."""
        if not missing:
            if len({tensors[name] for name in self.lines}) == len(self.lines):
                yield tensors
            return
        name = next((name for name in missing if name in tensors), None)
        if name is not None:
            extended = self._with_sources(name, tensors)
            if extended is not None:
                yield from self.rest(extended, [n for n in missing if n != name])
            return
        sources = ((name, *source) for name in missing for source in self.lines[name].src)
        name, of, by_view = next(s for s in sources if s[1] in tensors)
        for t in self._readers(tensors[of], by_view):
            yield from self.rest({**tensors, name: t}, missing)

    def _with_sources(self, name: str, tensors: _Tensors) -> _Tensors | None:
        """The same with the sources of this node; None if it is another one."""
        line, t = self.lines[name], tensors[name]
        is_other = t.op is None or t.op.name not in line.ops or t in self.taken
        src = t.src[: len(line.src)] if line.has_more else t.src
        if is_other or len(src) != len(line.src):
            return None
        tensors = dict(tensors)
        for (of, by_view), s in zip(line.src, src, strict=True):
            s = maker(s) if by_view else s
            if tensors.setdefault(of, s) is not s:
                return None
        return tensors

    def _readers(self, t: Tensor, by_view: bool) -> list[Tensor]:
        """The nodes that read t, the nearest before the first node of the search first."""
        readers = self.graph.users[t.root] if by_view else self.graph.readers[t]
        saved = (s for s in t.saved if s in self.graph.places)
        behind = {r: self.place - self.graph.places[r] for r in (*readers, *saved)}
        if self.reach is not None:
            behind = {r: n for r, n in behind.items() if 0 < n <= self.reach}
        return sorted(behind, key=lambda r: (behind[r] < 0, abs(behind[r])))


# -- text ------------------------------------------------------------------------------------------


def _choices(line: ast.stmt) -> list[list[tuple[str, _Line]]]:
    """What a line can mean, each a node behind its nameless sources."""
    assert isinstance(line, ast.Assign)
    nodes = line.value.values if isinstance(line.value, ast.BoolOp) else [line.value]
    return [[*_lines(ast.unparse(line.targets[0]), node)] for node in nodes]


def _lines(name: str, node: ast.expr) -> Iterator[tuple[str, _Line]]:
    assert isinstance(node, ast.Call)
    src = []
    for i, of in enumerate(node.args):
        by_view = isinstance(of, ast.Call) and ast.unparse(of.func) == "view"
        of = of.args[0] if by_view and isinstance(of, ast.Call) else of
        src.append((f"{name}.{i}" if isinstance(of, ast.Call) else ast.unparse(of), by_view))
        if isinstance(of, ast.Call):
            yield from _lines(f"{name}.{i}", of)
    plain = tuple(source for source in src if not source[0].startswith("*"))
    yield name, _Line(frozenset(ast.unparse(node.func).split(" | ")), plain, len(plain) < len(src))
