"""One pass of LoRA training, planned but not run: its memory, its nodes, its pictures."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from pyggml.alloc import Plan
from pyggml.alloc.usage import Moment, peak
from pyggml.backward import Keep
from pyggml.cli.commands.inspect.sections import CellTable, ReportSection
from pyggml.cli.terminal.generation import n_ctx_of
from pyggml.cli.terminal.show import plural, printable, size
from pyggml.look.draw import inside, lanes, overview, sections
from pyggml.look.draw.fold import op_counts
from pyggml.lora import LoraConfig, TrainConfig, attach
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.trainer.memory import held_bytes
from pyggml.lora.trainer.passes import Passes
from pyggml.model import Model

_KINDS = 20  # of tensors at the peak


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Of the pass that is planned: windows of ctx tokens, so many at once, LoRA of this rank.

    modules: matrices that get updates; None: all linear ones
    """

    rank: int
    ctx: int
    batch: int
    checkpointing: bool
    modules: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class PassPlan:
    """A pass of training: its plan, and what is trained in it."""

    settings: PlanSettings
    plan: Plan
    parameters: Parameters


def plan_pass(model: Model, settings: PlanSettings) -> PassPlan:
    """Raises ConfigError for a context that the model lacks, AdapterError for a rank."""
    s = settings
    n_ctx_of(model, s.ctx)
    adapter = attach(model, LoraConfig(rank=s.rank, modules=s.modules))
    keep = Keep.LAYERS if s.checkpointing else Keep.COSTLY
    passes = Passes(adapter.model, adapter.parameters, s.batch * s.ctx, n_ctx=s.ctx, keep=keep)
    (plan,) = passes.training.plans.values()
    return PassPlan(s, plan, adapter.parameters)


def facts(p: PassPlan) -> dict[str, Any]:
    """The plan as plain values: bytes, nodes by op, and what there is at the peak."""
    moment, s = peak(p.plan), p.settings
    return {
        "rank": s.rank,
        "ctx": s.ctx,
        "batch": s.batch,
        "grad_checkpointing": s.checkpointing,
        "arena_bytes": p.plan.n_bytes,
        "parameter_bytes": held_bytes(p.parameters, TrainConfig()),
        "n_nodes": len(p.plan.graph.nodes),
        "nodes": dict(_ops(p.plan).most_common()),
        "peak_bytes": moment.n_bytes,
        "peak_node": moment.index,
        "at_peak": [dict(zip(("kind", "n", "n_bytes"), r, strict=True)) for r in moment.by_kind()],
    }


def _ops(plan: Plan) -> Counter[str]:
    return Counter(t.op.name for t in plan.graph.nodes if t.op is not None)


# -- memory -------------------------------------------------------------------------------------


def plan_sections(p: PassPlan) -> list[ReportSection]:
    """What the pass takes, what its kernels do, and what lies in memory at the peak."""
    s, nodes = p.settings, p.plan.graph.nodes
    again = ", gradient checkpointing" * s.checkpointing
    rows = [
        ("pass", f"{plural(s.batch, 'window')} of {s.ctx} tokens, LoRA of rank {s.rank}{again}"),
        ("graph", size(p.plan.n_bytes)),
        (
            "adapter",
            f"{size(held_bytes(p.parameters, TrainConfig()))}, with gradients and optimizer state",
        ),
        ("nodes", f"{len(nodes):,}, of which {len(p.plan.reused):,} write in place of a source"),
    ]
    ops = CellTable(("op", "nodes"), [(n, f"{k:,}") for n, k in _ops(p.plan).most_common()], _LAST)
    return [
        ReportSection("memory plan", rows, pictures=[lanes(p.plan)]),
        ReportSection("at the peak", *_at_peak(peak(p.plan))),
        ReportSection("nodes by op", table=ops, folded=True),
        _fusion_section(p.plan),
    ]


_LAST = frozenset({1})


def _at_peak(moment: Moment) -> tuple[list[tuple[str, str]], CellTable]:
    node = moment.node
    name = node.name or (node.op.name if node.op else "")
    what = f"{size(moment.n_bytes)} while node {moment.index:,}, {printable(name)}, runs"
    kinds = moment.by_kind()
    rows = [(kind, f"{n:,}", size(n_bytes)) for kind, n, n_bytes in kinds[:_KINDS]]
    if len(kinds) > _KINDS:
        rest = kinds[_KINDS:]
        n, n_bytes = sum(row[1] for row in rest), sum(row[2] for row in rest)
        rows.append((f"and {len(rest)} kinds more", f"{n:,}", size(n_bytes)))
    return [("peak", what)], CellTable(("tensors", "n", "bytes"), rows, frozenset({1, 2}))


def _fusion_section(plan: Plan) -> ReportSection:
    """Where one kernel does the work of several ops, and what several kernels share."""
    counts = Counter(t.op for t in plan.graph.nodes if t.op is not None and t.op.fuses)
    rows = [(op.name, f"{n:,}", ", ".join(op.fuses)) for op, n in counts.most_common()]
    shared = f"read by {plural(len(plan.shared), 'product')}"
    rows.append(("packed operands", f"{len(set(plan.shared.values())):,}", shared))
    table = CellTable(("kernel", "nodes", "stands for"), rows, _LAST)
    return ReportSection("fused", table=table, folded=True)


# -- the graph ------------------------------------------------------------------------------------


def graph_section(p: PassPlan) -> ReportSection:
    """The graph block by block, equal blocks as one."""
    graph, trained = p.plan.graph, p.parameters.tensors.values()
    rows, pictures = [], [overview(graph)]
    for section in sections(graph):
        for kind, nodes in (("forward", section.forward), ("backward", section.backward)):
            ops = ", ".join(f"{name} ×{n}" if n > 1 else name for name, n in op_counts(nodes))
            rows.append((section.title if kind == "forward" else "", kind, ops))
            if nodes:
                drawn = inside(nodes, kind, list(trained))
                title = f"inside of {section.title}, {kind}"
                pictures.append(f"<details><summary>{title}</summary>{drawn}</details>")
    table = CellTable(("part", "", "ops"), rows)
    return ReportSection("graph", table=table, pictures=pictures, folded=True)
