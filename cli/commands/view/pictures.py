"""Graphs and plans, drawn and searched. Nothing is run: building and planning take a second."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from threading import Lock
from typing import Any

from pyggml.alloc import Plan
from pyggml.alloc.lifetime import FOREVER
from pyggml.alloc.usage import bytes_at, moment
from pyggml.cli.commands.inspect.training import Settings, plan_pass
from pyggml.cli.commands.view.queries import Pass
from pyggml.cli.terminal.generation import n_ctx_of
from pyggml.cli.terminal.show import size
from pyggml.cli.web.errors import ApiError
from pyggml.graph import Graph, reachable
from pyggml.graph.tensor import Tensor
from pyggml.look.draw import Section, constants, inside, lanes, sections
from pyggml.look.draw import picture as drawn
from pyggml.lora import DataConfig
from pyggml.model import Model
from pyggml.models import Inputs, build
from pyggml.runtime import schedule

_MOST_PICTURES = 4  # passes whose pictures stay
_MOST_HITS = 100
_BLOCK = re.compile(r"\bblk\.(\d{1,6})\.")


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A planned pass.

    asked        its settings
    trained      tensors that are trained
    n_trained    bytes of these, their gradients and the optimiser's moments
    """

    asked: Pass
    plan: Plan
    sections: Sequence[Section]
    trained: frozenset[Tensor]
    n_trained: int

    @property
    def graph(self) -> Graph:
        return self.plan.graph

    @property
    def forward(self) -> frozenset[Tensor]:
        result, *_ = self.graph.outputs
        return frozenset(reachable(result))

    def nodes(self, i: int, direction: str) -> Sequence[Tensor]:
        """The nodes of section i; direction: "forward" or "backward"."""
        section = self.sections[i]
        return section.forward if direction == "forward" else section.backward


class Pictures:
    """Pictures of passes of one model, each made when it is first asked for."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._pictures: dict[Pass, Picture] = {}
        self._lock = Lock()

    def of(self, asked: Pass) -> Picture:
        """Raises ConfigError for settings that the model refuses."""
        asked = replace(asked, ctx=n_ctx_of(self._model, asked.ctx, DataConfig.ctx))
        with self._lock:
            if asked not in self._pictures:
                while len(self._pictures) >= _MOST_PICTURES:
                    del self._pictures[next(iter(self._pictures))]
                self._pictures[asked] = _build(self._model, asked)
            return self._pictures[asked]


def _build(model: Model, asked: Pass) -> Picture:
    if asked.kind == "logits":
        out = build(model.parts, Inputs.empty(asked.ctx), model.adapters)
        (logits_plan,) = schedule(Graph.of(out), model.devices).plans.values()
        return Picture(asked, logits_plan, sections(logits_plan.graph), frozenset(), 0)
    names = tuple(m.strip() for m in asked.modules.split(",") if m.strip())
    checkpointing = asked.keep == "layers"
    p = plan_pass(model, Settings(asked.rank, asked.ctx, asked.batch, checkpointing, names or None))
    trained = frozenset(p.parameters.tensors.values())
    return Picture(asked, p.plan, sections(p.plan.graph), trained, p.parameters.n_bytes())


# -- graphs ---------------------------------------------------------------------------------------


def graph_facts(picture: Picture) -> dict[str, Any]:
    """The overview and the list of its sections."""
    ops = Counter(t.op.name for t in picture.graph.nodes if t.op is not None and not t.is_view)
    return {
        "pass": asdict(picture.asked),
        "svg": drawn(picture.graph),
        "n_nodes": len(picture.graph.nodes),
        "n_leaves": len(picture.graph.leaves),
        "ops": ops.most_common(),
        "sections": [
            {"title": s.title, "n": s.n, "forward": len(s.forward), "backward": len(s.backward)}
            for s in picture.sections
        ],
    }


def section_facts(picture: Picture, i: int, direction: str) -> dict[str, Any]:
    """The inside of section i and the list of its nodes. Raises ApiError if there is none."""
    if i >= len(picture.sections) or not picture.nodes(i, direction):
        raise ApiError(404, f"the graph has no section {i} with {direction} nodes")
    nodes = picture.nodes(i, direction)
    return {
        "title": picture.sections[i].title,
        "svg": inside(nodes, direction, picture.trained, picture.forward),
        "nodes": [_node(t, picture) for t in nodes],
    }


def _node(t: Tensor, picture: Picture) -> dict[str, Any]:
    life = picture.plan.lives.get(t.root)
    last = None if life is None or life.last == FOREVER else life.last
    return _tensor(t) | {
        "reads": [_tensor(s) for s in t.src],
        "constants": constants(t),
        "trained": any(s in picture.trained for s in t.src),
        "bytes": 0 if t.is_view else t.n_bytes,
        "lives": None if life is None else [life.first, last],
    }


def _tensor(t: Tensor) -> dict[str, Any]:
    made_by = t.op.name if t.op else "leaf"
    return {"name": t.name, "op": made_by, "type": f"{t.dtype}", "shape": list(t.shape)}


def search(picture: Picture, words: str) -> dict[str, Any]:
    """Nodes that have these words in their name, their op's or the name of a leaf that they read.

    Of blocks that are drawn as one, the first stands for the one that was named.
    """
    hits = []
    for i, section in enumerate(picture.sections):
        wanted = _in_section(words.lower(), section)
        for direction in ("forward", "backward"):
            for j, t in enumerate(picture.nodes(i, direction) if wanted else ()):
                if any(wanted in name.lower() for name in _names(t)):
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


def plan_facts(picture: Picture) -> dict[str, Any]:
    """The lanes of a plan, and its bytes in use at every node."""
    p = picture.plan
    used = bytes_at(p)
    return {
        "pass": asdict(picture.asked),
        "svg": lanes(p),
        "facts": [
            ("arena", size(p.n_bytes)),
            ("adapter, gradients, optimizer state", size(picture.n_trained)),
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
