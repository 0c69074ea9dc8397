"""The planner. One walk over the graph, in the order of execution, finds when pieces of memory are
taken and given back; best fit gives them addresses.

Best fit leaves gaps where short lives begin and end between long ones, as in a training step. So
there is a second plan, in which all that is alive at the peak lies side by side behind the rest,
without gaps, and a third, which places the largest first, each at the lowest address that is free
as long as it lives. The smallest one is taken.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from pyggml.alloc.fit import ALIGNMENT, Arena, lowest
from pyggml.alloc.lifetime import FOREVER, Lifetime, lifetimes, reusable_source
from pyggml.alloc.sharing import sharing
from pyggml.alloc.usage import peak, table
from pyggml.backends.base import Backend
from pyggml.errors import GraphError
from pyggml.graph import Graph
from pyggml.graph.graph import expect_graph
from pyggml.graph.op import SAVED, computes
from pyggml.graph.tensor import Tensor
from pyggml.sizes import round_up

_GAPS = 1.01  # if a plan is this many times its peak, another is made, and the smallest taken


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan:
    """Offsets in bytes into one arena of `n_bytes`. Planning allocates nothing.

    offsets     of every tensor that owns memory
    scratch     of each node that needs any
    n_scratch   bytes of each of these nodes' scratch
    reused      node -> the tensor whose memory it overwrites
    shared      node -> scratch that it shares with others; the first of them fills it
    """

    graph: Graph
    backend: Backend
    offsets: dict[Tensor, int]
    scratch: dict[Tensor, int]
    n_scratch: dict[Tensor, int]
    reused: dict[Tensor, Tensor]
    shared: dict[Tensor, Tensor]
    lives: dict[Tensor, Lifetime]
    n_bytes: int

    def __repr__(self) -> str:
        """<Plan of loss on cpu: nodes 812, bytes 1,234,567>"""
        of = self.graph.outputs[0].name or "a graph"
        n = len(self.graph.nodes)
        return f"<Plan of {of} on {self.backend.name}: nodes {n:,}, bytes {self.n_bytes:,}>"

    def __str__(self) -> str:
        """A table of a dozen lines: what has memory, the peak, what is alive then."""
        return table(self)

    def origin(self, t: Tensor) -> Tensor:
        """The tensor that first had the memory of t."""
        while t in self.reused:
            t = self.reused[t]
        return t


def plan(
    graph: Graph, backend: Backend | None = None, reuse: bool = True, share: bool = True
) -> Plan:
    """The memory of a graph on a backend.

    For tests and timings: reuse=False gives every tensor an address of its own, share=False lets
    every node pack its sources for itself. Results are bitwise the same. Raises GraphError for what
    is no graph, and without a backend.
    """
    expect_graph("plan", graph)
    if backend is None:
        raise GraphError("plan needs a backend; schedule(graph) plans for the host")
    pieces = _Pieces(graph, backend, reuse, share)
    best = pieces.place()
    if not (reuse and graph.nodes):
        return best
    most = peak(best)
    if best.n_bytes <= _GAPS * most.n_bytes:
        return best
    gapless = pieces.place({best.origin(t) for t in most.alive})
    best = min(best, gapless, key=lambda p: p.n_bytes)
    if best.n_bytes <= _GAPS * most.n_bytes or backend.room:
        return best
    return min(best, pieces.place_by_size(), key=lambda p: p.n_bytes)


_TAKE, _GIVE_BACK, _SCRATCH, _SCRATCH_BACK = range(4)
_SMALL = 1 << 20  # bytes of scratch that is kept while the next nodes run


class _Pieces:
    """The pieces of memory of a graph: `steps` take them and give them back as the nodes run.

    A result that overwrites a source has no piece of its own: it keeps that of its origin.
    Scratch is free again as soon as its node has run; a little, when those have run that may run
    beside it.
    """

    def __init__(self, graph: Graph, backend: Backend, reuse: bool, share: bool) -> None:
        self.graph, self.backend, self.reuse = graph, backend, reuse
        self.lives = lifetimes(graph)
        self.shared: dict[Tensor, Tensor] = {}
        if share:
            self._share()
        self.origins: dict[Tensor, Tensor] = {}  # of results that overwrite a source
        self.reused: dict[Tensor, Tensor] = {}
        self.handed_on: set[Tensor] = set()  # the values of `reused`
        self.dying: dict[int, list[Tensor]] = defaultdict(list)
        for t, life in self.lives.items():
            if life.last != FOREVER:
                self.dying[life.last].append(t)
        self.n_scratch: dict[Tensor, int] = {}
        self.sizes: dict[Tensor, int] = {}  # bytes of each piece
        self.steps: list[tuple[int, Tensor, int]] = []  # what is done, whose piece, its bytes
        self._walk()

    def place(self, lasting: Collection[Tensor] = ()) -> Plan:
        """A plan by best fit; `lasting` pieces lie behind all others, side by side."""
        arena, n_behind = Arena(self.backend.room), 0
        offsets: dict[Tensor, int] = {}
        scratch: dict[Tensor, int] = {}
        behind: dict[Tensor, int] = {}
        for act, t, n_bytes in self.steps:
            if act == _SCRATCH:
                scratch[t] = arena.take(n_bytes)
            elif act == _SCRATCH_BACK:
                arena.give_back(scratch[t], n_bytes)
            elif t in lasting:
                if act == _TAKE:
                    behind[t] = n_behind
                    n_behind += round_up(n_bytes, ALIGNMENT)
            elif act == _TAKE:
                offsets[t] = arena.take(n_bytes)
            else:
                arena.give_back(offsets[t], n_bytes)
        offsets |= {t: arena.peak + offset for t, offset in behind.items()}
        return self._plan(offsets, scratch, arena.peak + n_behind)

    def place_by_size(self) -> Plan:
        """A plan in which the largest pieces have the lowest addresses."""
        taken: dict[tuple[int, Tensor], int] = {}  # piece → its place among `lives`
        lives = list[tuple[int, float, int]]()  # first and last step, bytes
        owners = list[tuple[int, Tensor]]()
        for i, (act, t, n_bytes) in enumerate(self.steps):
            if act in (_GIVE_BACK, _SCRATCH_BACK):
                place = taken[act - (_GIVE_BACK - _TAKE), t]
                first, _, size = lives[place]
                lives[place] = first, i, size
                continue
            taken[act, t] = len(lives)
            owners.append((act, t))
            lives.append((i, inf, round_up(n_bytes, ALIGNMENT)))
        starts, n_bytes = lowest(lives)
        each = [*zip(owners, starts.tolist(), strict=True)]
        offsets = {t: start for (act, t), start in each if act == _TAKE}
        scratch = {t: start for (act, t), start in each if act == _SCRATCH}
        return self._plan(offsets, scratch, n_bytes)

    def _plan(self, offsets: dict[Tensor, int], scratch: dict[Tensor, int], n_bytes: int) -> Plan:
        offsets |= {t: offsets[origin] for t, origin in self.origins.items()}
        return Plan(
            self.graph, self.backend, offsets, scratch, self.n_scratch, self.reused,
            self.shared, self.lives, n_bytes,
        )  # fmt: skip

    def _share(self) -> None:
        """Enter what nodes share, alive from the first of them to the last; a little, longer."""
        places, end = self.graph.places, len(self.graph.nodes) - 1
        for scratch, nodes in sharing(self.graph, self.backend):
            last = min(places[nodes[-1]] + self._waits(scratch.n_bytes), end)
            self.lives[scratch] = Lifetime(places[nodes[0]], last)
            self.shared |= dict.fromkeys(nodes, scratch)

    def _waits(self, n_bytes: int) -> int:
        """How many of the next nodes run before scratch is free again."""
        return self.backend.beside if n_bytes <= _SMALL else 0

    def _walk(self) -> None:
        taken: set[Tensor] = set()  # of what is shared
        back = defaultdict[int, list[tuple[int, Tensor, int]]](list)  # place -> scratch given back
        for i, node in enumerate(self.graph.nodes):
            if node.base is None and node.op is not SAVED:
                self._enter(node, i)
            for s in node.saved:
                self._take(s)
            shared = self.shared.get(node)
            if shared is not None and shared not in taken:
                taken.add(shared)
                self._take(shared)
            n_bytes = self.backend.scratch(node) if computes(node) else 0
            if n_bytes:
                self.n_scratch[node] = n_bytes
                self.steps.append((_SCRATCH, node, n_bytes))
                back[i + self._waits(n_bytes)].append((_SCRATCH_BACK, node, n_bytes))
            self.steps += back.pop(i, ()) if self.reuse else ()
            if self.reuse:
                self._release(i)

    def _enter(self, node: Tensor, i: int) -> None:
        """Take a piece for a result, or go on with that of a source that dies here."""
        source = reusable_source(node, i, self.lives) if self.reuse else None
        if source is None:
            self._take(node)
        else:
            self.reused[node] = source
            self.handed_on.add(source)
            self.origins[node] = self.origins.get(source, source)

    def _take(self, t: Tensor) -> None:
        n_bytes = self.sizes[t] = t.n_bytes
        self.steps.append((_TAKE, t, n_bytes))

    def _release(self, i: int) -> None:
        """Give back the pieces of what dies here, unless a result goes on with them."""
        for t in self.dying[i]:
            if t not in self.handed_on:
                origin = self.origins.get(t, t)
                self.steps.append((_GIVE_BACK, origin, self.sizes[origin]))
