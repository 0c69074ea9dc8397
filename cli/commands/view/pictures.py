"""Graphs and plans, drawn and searched. Nothing is run: building and planning take a second."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import Any

from pyggml.alloc import Plan
from pyggml.alloc.lifetime import FOREVER
from pyggml.alloc.usage import bytes_at, moment
from pyggml.backward import Keep, training_graph
from pyggml.cli.commands.inspect.training import PlanSettings, plan_pass
from pyggml.cli.commands.view.net import small_net
from pyggml.cli.commands.view.queries import PassQuery
from pyggml.cli.terminal.generation import n_ctx_of
from pyggml.cli.terminal.show import size
from pyggml.cli.web.errors import ApiError
from pyggml.graph import Graph
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import recording_passes
from pyggml.look.draw import Section, constants, every, inside, lanes, sections
from pyggml.look.draw.fold import forward_tensors, op_counts
from pyggml.look.draw.graph import is_small, stream_between
from pyggml.look.draw.lanes import MARGIN, WIDTH
from pyggml.look.passes import Stage, stages
from pyggml.lora import DataConfig, TrainConfig
from pyggml.lora.trainer.memory import held_bytes
from pyggml.model import Model
from pyggml.models import Inputs, build
from pyggml.runtime import schedule

_MOST_PICTURES = 4  # passes whose pictures stay
_MOST_HITS = 100
_OF_PLAN = "Every result gets its place in one arena, which those that die leave to later ones."
_BLOCK = re.compile(r"\bblk\.(\d{1,6})\.")


@dataclass(frozen=True, eq=False)
class Picture:
    """A planned pass, and the way to it.

    asked        its settings
    trained      tensors that are trained
    n_trained    bytes of these, their gradients and the optimiser's moments
    stages       of its graph; the last one is that of the plan, which follows as one stage more
    """

    asked: PassQuery
    plan: Plan
    trained: frozenset[Tensor]
    n_trained: int
    stages: Sequence[Stage]

    @property
    def graph(self) -> Graph:
        return self.plan.graph

    @cached_property
    def shown(self) -> Sequence["Shown"]:
        """The stages as they are drawn."""
        return [Shown(stage) for stage in self.stages]

    def at(self, stage: int | None) -> "Shown":
        """By number; None: the last one, which is also that of the plan behind it. Raises ApiError
        if there is none."""
        n = len(self.stages)
        if stage is not None and stage > n:
            raise ApiError(404, f"stage is {stage}, wanted at most {n}, the plan")
        return self.shown[n - 1 if stage is None else min(stage, n - 1)]

    def section(self, stage: int | None, i: int, direction: str) -> Section:
        """What stands at a stage for section i of the last one. Raises ApiError where nothing does,
        in this direction: "forward" or "backward"."""
        there = self.at(stage).sections if i < len(self.shown[-1].sections) else ()
        for section in there:
            if _overlap(section, self.shown[-1].sections[i]) and of(section, direction):
                return section
        raise ApiError(404, f"the graph has no section {i} with {direction} nodes")

    def number(self, section: Section) -> int:
        """Of the section of the last stage that stands for this one."""
        last = self.shown[-1].sections
        return next((i for i, s in enumerate(last) if _overlap(s, section)), 0)


class Shown:
    """A stage of a graph, in sections, with what its pass makes or takes marked."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.graph = stage, stage.graph
        self.marks = dict.fromkeys(stage.new, "new") | dict.fromkeys(stage.gone, "gone")

    @cached_property
    def sections(self) -> Sequence[Section]:
        return sections(self.graph)

    @cached_property
    def forward(self) -> frozenset[Tensor]:
        return forward_tensors(self.graph)

    def marked(self, nodes: Sequence[Tensor]) -> dict[str, int]:
        """How many of these nodes are new, or go."""
        return Counter(self.marks[t] for t in nodes if t in self.marks)


def of(section: Section, direction: str) -> Sequence[Tensor]:
    return section.forward if direction == "forward" else section.backward


def _overlap(a: Section, b: Section) -> bool:
    """Whether two sections have a block in common."""
    return max(a.first, b.first) < min(a.first + a.n, b.first + b.n)


class Pictures:
    """Pictures of passes, each made when it is first asked for.

    model    None where the file is none, for which `fault` is the reason
    """

    def __init__(self, model: Model | None, fault: str = "") -> None:
        self._model, self._fault = model, fault
        self._pictures: dict[PassQuery, Picture] = {}
        self._lock = Lock()

    def of(self, asked: PassQuery) -> Picture:
        """Raises ConfigError for settings that the model refuses, ApiError without a model."""
        if asked.kind == "net":
            asked = PassQuery("net")
        elif self._model is None:
            raise ApiError(409, self._fault)
        else:
            asked = replace(asked, ctx=n_ctx_of(self._model, asked.ctx, DataConfig.ctx))
        with self._lock:
            if asked not in self._pictures:
                while len(self._pictures) >= _MOST_PICTURES:
                    del self._pictures[next(iter(self._pictures))]
                self._pictures[asked] = _build(self._model, asked)
            return self._pictures[asked]


def _build(model: Model | None, asked: PassQuery) -> Picture:
    trained, n_trained = frozenset[Tensor](), 0
    with recording_passes() as runs:
        if model is None or asked.kind == "net":
            loss, parameters = small_net()
            graph = training_graph(loss, parameters, keep=Keep.COSTLY)
            (plan,) = schedule(graph).plans.values()
            trained = frozenset(parameters.values())
            n_trained = 2 * sum(t.n_bytes for t in trained)
        elif asked.kind == "logits":
            out = build(model.parts, Inputs.empty(asked.ctx), model.adapters)
            (plan,) = schedule(Graph.of(out), model.devices).plans.values()
        else:
            planned = plan_pass(model, settings_of(asked))
            plan, trained = planned.plan, frozenset(planned.parameters.tensors.values())
            n_trained = held_bytes(planned.parameters, TrainConfig())
    return Picture(asked, plan, trained, n_trained, stages(runs, plan.graph))


def settings_of(asked: PassQuery) -> PlanSettings:
    names = tuple(m.strip() for m in asked.modules.split(",") if m.strip())
    return PlanSettings(asked.rank, asked.ctx, asked.batch, asked.keep == "layers", names or None)


# -- graphs ---------------------------------------------------------------------------------------


def graph_facts(picture: Picture, stage: int | None = None) -> dict[str, Any]:
    """A stage of the graph: its sections, or every node of a small one; and the list of stages."""
    named = [{"name": s.name, "about": s.about, "told": s.told} for s in picture.stages]
    named.append({"name": "plan", "about": _OF_PLAN, "told": size(picture.plan.n_bytes)})
    facts = {"pass": asdict(picture.asked), "stages": named}
    if stage == len(picture.stages):
        return facts | {"stage": stage, "plan": True}
    shown = picture.at(stage)
    graph = shown.graph
    ops = Counter(t.op.name for t in graph.nodes if t.op is not None and not t.is_view)
    return facts | {
        "stage": picture.shown.index(shown),
        "svg": every(graph, shown.marks) if is_small(graph) else "",
        "n_nodes": len(graph.nodes),
        "n_leaves": len(graph.leaves),
        "ops": ops.most_common(),
        "sections": [_section(s, picture, shown) for s in shown.sections],
        "streams": [stream_between(a.forward, b.forward) for a, b in pairwise(shown.sections)],
    }


def _section(section: Section, picture: Picture, shown: Shown) -> dict[str, Any]:
    about: dict[str, Any] = {"title": section.title, "n": section.n}
    for direction in ("forward", "backward"):
        nodes = of(section, direction)
        about[direction] = len(nodes)
        about[f"{direction}_ops"] = op_counts(nodes)
        about[f"{direction}_marked"] = shown.marked(nodes)
    return about | {"index": picture.number(section)}


def section_facts(
    picture: Picture, i: int, direction: str, stage: int | None = None
) -> dict[str, Any]:
    """The inside of section i and the list of its nodes. Raises ApiError if there is none."""
    shown, section = picture.at(stage), picture.section(stage, i, direction)
    nodes = of(section, direction)
    is_last = shown is picture.shown[-1]
    return {
        "title": section.title,
        "svg": inside(nodes, direction, picture.trained, shown.forward, shown.marks),
        "nodes": [_node(t, picture, shown.marks, is_last) for t in nodes],
    }


def _node(
    t: Tensor, picture: Picture, marks: Mapping[Tensor, str], is_last: bool
) -> dict[str, Any]:
    life = picture.plan.lives.get(t.root) if is_last else None
    last = None if life is None or life.last == FOREVER else life.last
    return _tensor(t) | {
        "reads": [_tensor(s) for s in t.src],
        "constants": constants(t),
        "trained": any(s in picture.trained for s in t.src),
        "bytes": 0 if t.is_view else t.n_bytes,
        "lives": None if life is None else [life.first, last],
        "planned": is_last,
        "mark": marks.get(t, ""),
    }


def _tensor(t: Tensor) -> dict[str, Any]:
    made_by = t.op.name if t.op else "leaf"
    return {"name": t.name, "op": made_by, "type": f"{t.dtype}", "shape": list(t.shape)}


def search(picture: Picture, words: str, stage: int | None = None) -> dict[str, Any]:
    """Nodes that have these words in their name, their op's or the name of a leaf that they read.

    Of blocks that are drawn as one, the first stands for the one that was named.
    """
    hits = []
    for section in picture.at(stage).sections:
        part = _in_section(words.lower(), section)
        i = picture.number(section)
        for direction in ("forward", "backward"):
            for j, t in enumerate(of(section, direction) if part else ()):
                if any(part in name.lower() for name in _names(t)):
                    about = {"section": i, "title": section.title, "direction": direction}
                    hits.append(about | {"node": j} | _tensor(t))
    return {"hits": hits[:_MOST_HITS], "n_hits": len(hits)}


def _in_section(words: str, section: Section) -> str:
    """The words as they stand in the section's first block; "" for those of another block."""
    named = _BLOCK.search(words)
    if named is None:
        return words
    if not section.first <= int(named[1]) < section.first + section.n:
        return ""
    return words.replace(named[0], f"blk.{section.first}.")


def _names(t: Tensor) -> Iterator[str]:
    yield t.name
    if t.op is not None:
        yield t.op.name
    yield from (s.name for s in t.src if s.op is None)


# -- plans ----------------------------------------------------------------------------------------


def plan_facts(picture: Picture, wide: int = int(WIDTH)) -> dict[str, Any]:
    """The lanes of a plan, and its bytes in use at every node. wide: pixels of the axis."""
    p = picture.plan
    used = bytes_at(p)
    return {
        "pass": asdict(picture.asked),
        "svg": lanes(p, wide),
        "axis": [MARGIN, wide],
        "facts": [
            ("arena", size(p.n_bytes)),
            ("trained parameters, gradients, optimizer state", size(picture.n_trained)),
            ("nodes", f"{len(picture.graph.nodes):,}"),
            ("results in place of a source", f"{len(p.reused):,}"),
            ("packed operands that several nodes read", f"{len(set(p.shared.values())):,}"),
        ],
        "used": used,
        "peak": used.index(max(used)),
    }


def moment_facts(picture: Picture, i: int) -> dict[str, Any]:
    """What is in memory while node i runs. Raises ApiError if there is none."""
    if i >= len(picture.graph.nodes):
        raise ApiError(404, f"the plan has {len(picture.graph.nodes)} nodes, wanted one below it")
    at = moment(picture.plan, i)
    return {
        "node": _tensor(at.node),
        "bytes": at.n_bytes,
        "kinds": at.by_kind(),
        "tensors": len(at.alive),
    }
