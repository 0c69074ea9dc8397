"""Edge attribution: a model as a graph whose edges lead from what parts add to the residual stream
to what later parts read of it (ACDC, Conmy et al. 2023), all scored at once by attribution
patching (EAP, Syed et al. 2023).

    score of an edge = Σ_t (what the sender adds, corrupt − clean)_t · (d(metric)/d(what is read))_t

It is how far the metric of the clean text moves, to first order, if the receiver alone hears the
sender as in the corrupt text.

senders     "token_embd", "blk.3.attn_head.1", "blk.3.ffn_out", as activations are named
receivers   "blk.3.q[1]", "blk.3.k[0]", "blk.3.v[0]", "blk.3.ffn", "logits"; heads that share keys
            and values share these receivers too
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from math import inf
from typing import Any, overload

import numpy as np

from pyggml.backward import build_backward
from pyggml.errors import ConfigError, DataError
from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.tensor import leaf, zeros
from pyggml.lab.circuit import Circuit
from pyggml.lab.effects import (
    Metrics,
    Progress,
    Texts,
    head_places,
    metrics_apart,
    of_pairs,
    read_activations,
    run_cells,
)
from pyggml.lab.linear import (
    attention_branch,
    branches,
    check_head,
    exact,
    head_counts,
    matrix_columns,
    refusal,
    refuse_between,
    refuse_turns,
)
from pyggml.model import Model
from pyggml.models import Inputs, Net, Taps
from pyggml.models.batch_rows import BatchRows
from pyggml.models.block import Chain, Residual
from pyggml.models.metric import Gradients
from pyggml.models.texts import Ids, fill
from pyggml.ops import concat, reshape
from pyggml.runtime import bind, schedule


@of_pairs
def edge_attribution(
    model: Model,
    clean: Texts,
    corrupt: Texts,
    metric: Metrics,
    n_steps: int = 1,
    *,
    progress: Progress | None = None,
) -> list[Circuit]:
    """Every edge with its score: senders (S,), receivers (R,), scores (S, R) float64.

    clean, corrupt  token ids (T,) of one length; or lists of these, pair by pair, of any lengths,
             which share passes: results are a list, and the metric is one for all or a list
    metric   as `Model.grad` has it
    n_steps  1: gradients of the clean text. More: their means over so many points on the way from
             the embeddings of the clean text to those of the corrupt one (EAP-IG, Hanna et al.
             2024), which counts what is saturated at either end

    One pass of each text, and one pass back for each step, with one more of each query, key and
    value in its block. Products are exact. Raises DataError for texts of unlike length, ConfigError
    for n_steps below 1 and for a model whose blocks are not attention, then feed-forward, each
    added to one residual stream as it is; ShapeError for a metric that is no number.
    """
    if n_steps < 1:
        raise ConfigError(f"n_steps is {n_steps}, wanted 1 or more")
    refuse_turns(model)
    for i in range(model.config.n_layer):
        _check_block(model, i)
    model = exact(model)
    senders = _senders(model, clean, corrupt)
    gradients = _mean_gradients(model, clean, corrupt, metric, n_steps, progress)
    return [_circuit(model, *each) for each in zip(senders, gradients, strict=True)]


def _circuit(
    model: Model, senders: Mapping[str, np.ndarray], gradients: Mapping[str, np.ndarray]
) -> Circuit:
    """The scores of one pair's edges, of what senders add and receivers' gradients."""
    heard = _stages(senders)[:, None] < _stages(gradients)
    added = np.stack([d.ravel() for d in senders.values()]).astype(np.float64)
    scores = added @ np.stack([g.ravel() for g in gradients.values()]).T
    feeds = [_feeds(model, name, [*senders]) for name in gradients]
    return Circuit([*senders], [*gradients], np.where(heard, scores, np.nan), feeds)


@overload
def circuit_faithfulness(
    model: Model, circuit: Circuit, clean: Ids, corrupt: Ids, metric: Metrics
) -> float: ...


@overload
def circuit_faithfulness(
    model: Model,
    circuit: Circuit | Sequence[Circuit],
    clean: Sequence[Ids],
    corrupt: Sequence[Ids],
    metric: Metrics,
) -> list[float]: ...


def circuit_faithfulness(
    model: Model, circuit: Circuit | Sequence[Circuit], clean: Any, corrupt: Any, metric: Metrics
) -> float | list[float]:
    """How much of the metric is left when all parts outside a circuit are as in the corrupt text: 1
    all, 0 as much as the corrupt text has.

    Parts are heads, feed-forward parts and the embedding; the edges among those of the circuit all
    stay. Lists of texts are as in `edge_attribution`, for one circuit or one of each pair. Raises
    DataError as it does, ConfigError for a circuit of another model.
    """
    return _faithfulness(model, clean, corrupt, metric, circuit)


@of_pairs
def _faithfulness(
    model: Model,
    clean: Texts,
    corrupt: Texts,
    metric: Metrics,
    circuit: Circuit | Sequence[Circuit],
) -> list[float]:
    circuits = [circuit] * len(clean) if isinstance(circuit, Circuit) else [*circuit]
    if len(circuits) != len(clean):
        raise DataError(f"{len(circuits)} circuits, wanted one, or one for each of {len(clean)}")
    counts = head_counts(model)
    heads = [f"blk.{i}.attn_head.{h}" for i, h in head_places(counts)]
    always_kept = ["token_embd", *(f"blk.{i}.ffn_out" for i in range(len(counts)))]
    if strangers := {n for c in circuits for n in c.senders} - {*heads, *always_kept}:
        raise ConfigError(f"the circuit is of another model: this one has no {min(strangers)}")
    model = exact(model)
    ends = metrics_apart(model, metric, clean, corrupt)
    outside = [[n for n in (*always_kept, *heads) if n not in c.parts] for c in circuits]
    names = {n for own in outside for n in own} or {"logits"}
    runs = read_activations(model, corrupt, names)
    cells = [
        [{"replace": {n: run[n] for n in own}}] for run, own in zip(runs, outside, strict=True)
    ]
    metrics_left = run_cells(model, metric, clean, names, cells)
    return [
        (float(x) - target) / (base - target)
        for (x,), (base, target) in zip(metrics_left, ends, strict=True)
    ]


def _mean_gradients(
    model: Model,
    clean: Texts,
    corrupt: Texts,
    metric: Metrics,
    n_steps: int,
    progress: Progress | None,
) -> list[dict[str, np.ndarray]]:
    """Of each pair, receiver → d(metric)/d(what it reads), (T, n_embd) float64, the mean over the
    steps."""
    ends = [read_activations(model, texts, ["token_embd"]) for texts in (clean, corrupt)]
    here, there = ([run["token_embd"] for run in runs] for runs in ends)
    means: list[dict[str, np.ndarray]] = [{} for _ in clean]
    for i in range(n_steps):
        share = np.float32((i + 0.5) / n_steps)
        xs = [a + share * (b - a) for a, b in zip(here, there, strict=True)]
        with model.trace(replace={"token_embd": xs} if n_steps > 1 else None):
            for name, gs in _read_gradients(model, clean, metric):
                for mean, g in zip(means, gs, strict=True):
                    mean[name] = mean.get(name, 0.0) + g.astype(np.float64) / n_steps
        if progress is not None:
            progress(i + 1, n_steps)
    return means


def _check_block(model: Model, layer: int) -> None:
    """ConfigError for a block whose parts are not those of the graph."""
    check_head(model, layer, 0)
    block = model.parts.decoder.blocks[layer]
    parts = block.parts if isinstance(block, Chain) else ()
    kinds = [p.body.branch if isinstance(p, Residual) else "" for p in parts]
    if kinds != ["attn_out", "ffn_out"]:
        raise refusal(model, layer, "is not attention, then feed-forward")
    if sum(b.part.branch == "attn_out" for b in branches(block)) > 1:
        raise refusal(model, layer, "has more than heads in its first branch")
    if any(b.after for b in branches(block)):
        why = "so that what a head adds depends on the others"
        raise refusal(model, layer, f"has a norm behind its branches, {why}")
    attention_branch(model, layer)
    refuse_between(model, layer)


# -- what parts add, what they read ----------------------------------------------------------------


def _senders(model: Model, clean: Texts, corrupt: Texts) -> list[dict[str, np.ndarray]]:
    """Of each pair, sender → what it adds in the corrupt text less that in the clean one,
    (T, n_embd)."""
    layers = range(model.config.n_layer)
    names = [f"blk.{i}.{x}" for i in layers for x in ("attention", "ffn_out")]
    runs = (read_activations(model, texts, [*names, *_FIRST]) for texts in (clean, corrupt))
    changes = [{n: b[n] - a[n] for n in a} for a, b in zip(*runs, strict=True)]
    senders = [{"token_embd": change[_FIRST[0]] - change[_FIRST[1]]} for change in changes]
    for i in layers:
        branch, part = attention_branch(model, i)
        size = part.heads.value_size
        for h in range(part.heads.n):
            columns = matrix_columns(model, f"blk.{i}.attn_output", h * size, size)
            for own, change in zip(senders, changes, strict=True):
                of_head = change[f"blk.{i}.attention"][:, h * size : (h + 1) * size]
                own[f"blk.{i}.attn_head.{h}"] = branch.factor * (of_head @ columns)
        for own, change in zip(senders, changes, strict=True):
            own[f"blk.{i}.ffn_out"] = change[f"blk.{i}.ffn_out"]
    return senders


_FIRST = "blk.0.mid", "blk.0.attn_out"  # their difference is the stream before the first block


def _read_gradients(
    model: Model, texts: Texts, metric: Metrics
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Receiver → d(metric)/d(what it alone reads of the stream), (T, n_embd) of each text."""
    n = model.config.n_layer
    names = [f"blk.{i}.{x}" for i in range(n) for x in ("q", "k", "v", "mid", "out")]
    grads = model.grad(metric, texts, *names, _FIRST[1])
    xs = [g.at[_FIRST[0]] - g.at[_FIRST[1]] for g in grads]
    for i in range(n):
        yield from _of_heads(model, i, xs, grads)
        yield f"blk.{i}.ffn", [g[f"blk.{i}.mid"] - g[f"blk.{i}.out"] for g in grads]
        xs = [g.at[f"blk.{i}.out"] for g in grads]
    yield "logits", [g[f"blk.{n - 1}.out"] for g in grads]


def _of_heads(
    model: Model, layer: int, xs: Texts, grads: Sequence[Gradients]
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Each head's query, each key and value: d(metric)/d(stream x (T, n_embd)) of each text,
    through it alone.

    grads: with d(metric)/d(all queries, keys, values). One program is bound, and run for one head
    after another.
    """
    at, batch = f"blk.{layer}.", BatchRows(tuple(map(len, xs)))
    gradients = {p: np.concatenate([g[f"{at}{p}"] for g in grads]) for p in "qkv"}
    inputs = Inputs.empty(sum(batch.lengths), max(batch.lengths))
    fill(inputs, *(np.zeros(len(x), np.int32) for x in xs))
    inputs = replace(inputs, batch=batch)
    taps = Taps([f"{at}{p}" for p in gradients], [e for trace in model.traces for e in trace.edits])
    net = Net(model.parts.weights, inputs, model.adapters, taps=taps)
    stream = leaf(np.concatenate(xs))
    model.parts.decoder.blocks[layer](net, at, stream)
    parts = [reshape(taps.read[f"{at}{p}"], (sum(batch.lengths), -1)) for p in gradients]
    y = reduce(concat, parts)
    seed = zeros(y.shape)
    back = build_backward(Graph.of(y), [stream], seed)
    program = bind(schedule(back, model.devices), model.release)
    first = 0
    for p, g in gradients.items():
        for h in range(g.shape[1]):
            rows = np.zeros(y.shape, np.float32)
            rows[:, first : first + g.shape[2]] = g[:, h]
            first += g.shape[2]
            write(seed, rows)
            program()
            yield f"{at}{p}[{h}]", batch.arrays("stream", program.read(back.outputs[1]))


# -- how they hang together ------------------------------------------------------------------------


def _stages(names: Iterable[str]) -> np.ndarray:
    """When each sender adds, or each receiver reads: it hears the senders of earlier stages."""
    return np.array([_stage(name) for name in names])


def _stage(name: str) -> float:
    if not name.startswith("blk."):
        return 0 if name == "token_embd" else inf
    layer, part = name.split(".")[1:3]
    return 2 * int(layer) + 1 + part.startswith("ffn")


def _feeds(model: Model, receiver: str, senders: list[str]) -> list[int]:
    """The numbers of the senders that are made of what a receiver reads."""
    if receiver == "logits":
        return []
    layer, part = receiver.split(".")[1:]
    if part == "ffn":
        return [senders.index(f"blk.{layer}.ffn_out")]
    heads = attention_branch(model, int(layer))[1].heads
    group = 1 if part[0] == "q" else heads.n // heads.n_kv
    first = group * int(part[2:-1])
    return [senders.index(f"blk.{layer}.attn_head.{first + i}") for i in range(group)]
