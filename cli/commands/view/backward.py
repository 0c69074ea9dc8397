"""One backward pass, run node by node: of each tensor its numbers, its gradient, who reads it, and
where its memory lies."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import getdoc
from threading import Event
from typing import Any

import numpy as np

from pyggml import ops
from pyggml.alloc import Plan
from pyggml.alloc.lifetime import FOREVER
from pyggml.backward import Keep, training_graph
from pyggml.cli.commands.view.net import small_net
from pyggml.cli.commands.view.queries import TextQuery
from pyggml.cli.commands.view.reading import ids_of
from pyggml.cli.commands.view.source import Cancelled
from pyggml.cli.commands.view.weights import sample
from pyggml.cli.web.errors import ApiError
from pyggml.files.json_text import finite
from pyggml.graph import Graph
from pyggml.graph.arrays import array
from pyggml.graph.op import SAVED, NoGrad, has_kernel
from pyggml.graph.tensor import Tensor
from pyggml.kernels.reference import in_float64
from pyggml.look.draw import Section, constants, every, inside, sections
from pyggml.look.draw.fold import forward_tensors
from pyggml.look.draw.graph import is_small
from pyggml.look.gradients import loss_graph
from pyggml.lora import LoraConfig, attach
from pyggml.model import Model
from pyggml.models.low_rank import tensors_of_adapters
from pyggml.runtime import Devices, Program, bind, schedule

_MOST_TOKENS = 48
_ROWS, _COLUMNS = 6, 8  # of a tensor's numbers that are shown
_DIGITS = 4


def of_net(question: TextQuery, stop: Event) -> dict[str, Any]:
    """The pass of the small net."""
    loss, parameters = small_net()
    graph = training_graph(loss, parameters, keep=Keep.COSTLY)
    about = "two layers learn XOR from four points; w2 is read twice"
    return _run_node_by_node(graph, Devices(), parameters.values(), 0, stop) | {"about": about}


def of_text(model: Model, question: TextQuery, stop: Event) -> dict[str, Any]:
    """The pass of training on the first tokens of a text, at one part of the model: question.block
    counts the parts, block 0 by default. Raises DataError for a text of one token."""
    ids, n_all = ids_of(model, question.text, min(_MOST_TOKENS, model.config.n_ctx))
    about = "with the run's adapter"
    if not model.adapters:
        model = attach(model, LoraConfig()).model
        about = "with a LoRA as training begins: B is 0, and so are A's gradients"
    trained = tensors_of_adapters(model.adapters)
    loss = loss_graph(model, ids, parameters=trained)
    graph = training_graph(loss, trained, kept_as=model.kept_as, keep=Keep.COSTLY)
    part = 1 if question.block is None else question.block
    numbers = _run_node_by_node(graph, model.devices, trained.values(), part, stop)
    return numbers | {"n_tokens": len(ids), "n_all": n_all, "about": about}


def _run_node_by_node(
    graph: Graph, devices: Devices, trained: Iterable[Tensor], part: int, stop: Event
) -> dict[str, Any]:
    whole = schedule(graph, devices)
    (plan,) = whole.plans.values()
    parts = [] if is_small(plan.graph) else sections(plan.graph, folded=False)
    if part >= max(len(parts), 1):
        raise ApiError(404, f"the graph has {len(parts)} parts, wanted one below it", "block")
    nodes = plan.graph.nodes
    if parts:
        inside_part = {*parts[part].forward, *parts[part].backward}
        nodes = tuple(t for t in nodes if t in inside_part)
    shown = dict.fromkeys([*nodes, *(s for t in nodes for s in t.src)])
    program = bind(whole)
    values = dict(_numbers(program, plan, shown, stop))
    telling = _Telling(plan, shown, values)
    forward, notes = forward_tensors(plan.graph), plan.graph.notes
    return {
        "parts": [s.title for s in parts],
        "part": part,
        "loss": finite(program.read(graph["loss"]).item()),
        "arena": plan.n_bytes,
        "n_nodes": len(plan.graph.nodes),
        "steps": [telling.number[t] for t in nodes],
        "begin": next((i for i, t in enumerate(nodes) if t in notes.backward), 0),
        "tensors": [telling.about(t) for t in shown],
        "pictures": _pictures(plan.graph, parts[part:], frozenset(trained), forward, telling),
    }


def _pictures(
    graph: Graph,
    parts: Sequence[Section],
    trained: frozenset[Tensor],
    forward: frozenset[Tensor],
    telling: "_Telling",
) -> list[dict[str, Any]]:
    """Pictures with the number of the tensor that each of their nodes is; all of a small graph."""
    if not parts:
        drawn = [("the graph", every(graph), (*graph.leaves, *graph.nodes))]
    else:
        drawn = [
            (way, inside(nodes, way, trained, forward), nodes)
            for way, nodes in (("forward", parts[0].forward), ("backward", parts[0].backward))
            if nodes
        ]
    return [
        {"title": title, "svg": svg, "tensors": [telling.number.get(t, -1) for t in nodes]}
        for title, svg, nodes in drawn
    ]


class _Telling:
    """What is told of the tensors of a plan: of those in `shown`, others by their names alone."""

    def __init__(
        self, plan: Plan, shown: Mapping[Tensor, None], values: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        self._plan, self._values = plan, values
        self.number = {t: i for i, t in enumerate(shown)}
        self._gradient_of = {g: t for t, g in plan.graph.notes.gradients.items()}

    def about(self, t: Tensor) -> dict[str, Any]:
        graph = self._plan.graph
        rule = graph.notes.backward.get(t)
        gradient, of = graph.notes.gradients.get(t), self._gradient_of.get(t)
        is_computed = gradient is not None and (gradient in graph.places or gradient.op is None)
        sums = graph.notes.sums.get(t)
        return {
            "name": t.name,
            "op": t.op.name if t.op else "leaf",
            "type": f"{t.dtype}",
            "shape": list(t.shape),
            "constants": constants(t),
            "at": graph.places.get(t),
            "formula": _formula(t),
            "rule": "" if rule is None else _rule(rule),
            "rule_of": rule and self._reference(rule),
            "sums": sums and self._reference(sums),
            "gradient": self._reference(gradient) if is_computed and gradient else None,
            "gradient_of": of and self._reference(of),
            "reads": [self._reference(s) for s in t.src],
            "readers": [self._reference(r) for r in graph.readers.get(t, ())],
            "memory": self._memory(t),
            "value": self._values.get(t),
        }

    def _reference(self, t: Tensor) -> dict[str, Any]:
        """A tensor's number among those shown, or −1, and its name."""
        at = self._plan.graph.places.get(t)
        name = t.name or (f"{t.op.name} {at}" if t.op else "leaf")
        return {"i": self.number.get(t, -1), "name": name}

    def _memory(self, t: Tensor) -> dict[str, Any] | None:
        """Its bytes in the arena; None of what lies in a leaf."""
        p, root = self._plan, t.root
        if root not in p.offsets:
            return None
        life, over = p.lives[root], p.reused.get(root)
        return {
            "offset": p.offsets[root] + (t.offset if t is not root else 0),
            "bytes": t.n_bytes,
            "lives": [life.first, None if life.last == FOREVER else life.last],
            "view_of": None if t is root else self._reference(root),
            "over": None if over is None else self._reference(over),
        }


def _numbers(
    program: Program, plan: Plan, tensors: Mapping[Tensor, None], stop: Event
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Run the pass; the numbers of these tensors, each read while its memory still has them."""
    nodes = plan.graph.nodes
    for t in tensors:
        if t.root.op is None:
            yield t, _of_leaf(t)
    for node, device in program.walk():
        if stop.is_set():
            raise Cancelled
        at = plan.graph.places[node]
        for t in (node, *_without_kernel(nodes, at + 1)):
            if t in tensors and t.root.op is not None:
                yield t, summary(in_float64(device.read(t), t.dtype))


def _without_kernel(nodes: Sequence[Tensor], begin: int) -> Iterator[Tensor]:
    """The views, and what the last kernel saved, that follow it at once."""
    for t in nodes[begin:]:
        if has_kernel(t):
            return
        yield t


def _of_leaf(t: Tensor) -> dict[str, Any]:
    """Of a weight, which may be large, a sample counts."""
    data = array(t)
    rows = data.reshape(-1, data.shape[-1])[:_ROWS] if data.ndim else data.reshape(1, 1)
    few = in_float64(np.ascontiguousarray(rows), t.dtype)
    if not t.dtype.quantised:
        return summary(in_float64(data, t.dtype))
    most = sample(data, t.dtype).astype(np.float64)
    part = {} if most.size == t.n_elements else {"sampled": int(most.size)}
    return summary(most) | part | _corner(few, t.n_elements // t.shape[-1], t.shape[-1])


def summary(a: np.ndarray) -> dict[str, Any]:
    """What an array is like, and its first numbers, as JSON has them: None for what is not
    finite."""
    rows = a.reshape(-1, a.shape[-1]) if a.ndim else a.reshape(1, 1)
    kept = a[np.isfinite(a)].astype(np.float64)
    about: dict[str, Any] = {"finite": bool(kept.size == a.size)}
    if kept.size:
        with np.errstate(over="ignore"):
            length = np.sqrt(np.sum(kept**2))
        measures = {"min": kept.min(), "max": kept.max(), "mean": kept.mean(), "length": length}
        about |= {name: finite(x) for name, x in measures.items()}
    return about | _corner(rows, *rows.shape)


def _corner(rows: np.ndarray, n_rows: int, n_columns: int) -> dict[str, Any]:
    numbers = [[finite(x, _DIGITS) for x in row] for row in rows[:_ROWS, :_COLUMNS]]
    return {"first": numbers, "rows": n_rows, "columns": n_columns}


def _formula(t: Tensor) -> str:
    """What a node's op computes."""
    if t.op is SAVED:
        return "what that kernel leaves for a gradient rule, or for later readers"
    function = None if t.op is None else getattr(ops, t.op.name, None)
    return " ".join((getdoc(function) or "").split("\n\n")[0].split()) if function else ""


def _rule(t: Tensor) -> str:
    """The gradient rule of a forward node's op."""
    if t.op is None or isinstance(t.op.grad, NoGrad):
        return ""
    return (getdoc(t.op.grad) or "").split("\n")[0]
