"""A graph's way through its passes: what each of them takes away, and what it makes.

with recording_passes() as runs:
    (plan,) = schedule(training_graph(forward, parameters)).plans.values()
for stage in stages(runs, plan.graph):
    print(stage.name, stage.told)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import getdoc

from pyggml.graph import Graph
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import PassRun

_NOTHING = "finds nothing to change here"


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A graph on its way. A pass that replaces nodes has two stages: of the graph before it, and of
    the one that it makes.

    name    of the pass; "as built" of what the first one was given
    about   what the pass does, in a sentence
    told    how much of it changes here, in words
    new     nodes that the pass makes
    gone    nodes that it takes away
    """

    name: str
    about: str
    told: str
    graph: Graph
    new: frozenset[Tensor] = field(default=frozenset())
    gone: frozenset[Tensor] = field(default=frozenset())


def stages(runs: Sequence[PassRun], last: Graph) -> list[Stage]:
    """The stages of the graph that ended as `last`, of those whose passes were recorded."""
    way: list[PassRun] = []
    graph: Graph | None = last
    for run in reversed(runs):
        if run.after is graph:
            way.append(run)
            graph = run.before
    begin = way[-1].before if way else last
    steps = [] if begin is None else [Stage("as built", "", _counts_of_nodes(begin), begin)]
    for run in reversed(way):
        steps += _of(run)
    return steps


def changes(before: Graph, after: Graph) -> tuple[frozenset[Tensor], frozenset[Tensor]]:
    """The nodes that are in the second graph alone, and those in the first alone. A node that is
    the same, but reads another one's successor, counts as neither."""
    old, new = set(before.nodes), set(after.nodes)
    settings = {id(t.params): t for t in before.nodes if t not in new}
    again = {t: settings[id(t.params)] for t in after.nodes if id(t.params) in settings}
    again = {t: of for t, of in again.items() if t not in old and t.op is of.op}
    return frozenset(new - old - again.keys()), frozenset(old - new - set(again.values()))


def _of(run: PassRun) -> list[Stage]:
    name = run.change.__name__
    about = " ".join((getdoc(run.change) or "").split("\n\n")[0].split())
    before, after = run.before, run.after
    if before is None or before is after:
        words = _NOTHING if before is after else _counts_of_nodes(after)
        return [Stage(name, about, words, after)]
    new, gone = changes(before, after)
    if not new and not gone:
        same = [id(t.params) for t in before.nodes] == [id(t.params) for t in after.nodes]
        words = _NOTHING if same else "the same nodes in another order"
        return [Stage(name, about, words, after)]
    stage = Stage(name, about, f"makes {len(new):,}: {_counts_of_nodes(after)}", after, new)
    if not gone:
        return [stage]
    words = f"takes {len(gone):,} of {_counts_of_nodes(before)}"
    return [Stage(name, about, words, before, gone=gone), stage]


def _counts_of_nodes(graph: Graph) -> str:
    return f"{len(graph.nodes):,} nodes"
