"""Path patching: what one head says to one place, and to no other (Wang et al. 2022, IOI)."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pyggml.errors import ConfigError, suggestion
from pyggml.lab.effects import (
    Effects,
    Progress,
    check_pair,
    head_effects,
    head_places,
    metrics_apart,
    read_activations,
    run_cells,
)
from pyggml.lab.linear import branches, exact, head_counts
from pyggml.model import Ids, Model
from pyggml.models.edits import At
from pyggml.models.metric import Metric
from pyggml.models.norm import Norm


def path_patching(
    model: Model,
    clean: Ids,
    corrupt: Ids,
    metric: Metric,
    receiver: str,
    heads: Iterable[int] | None = None,
    *,
    through_ffn: bool = True,
    progress: Progress | None = None,
) -> Effects:
    """The metric of the clean text when `receiver` hears each earlier head as in the corrupt text:
    (n_layer, n_head), of blocks before the receiver.

    receiver     "blk.3.q", ".k" or ".v", "blk.3.ffn_norm" (what the feed-forward part reads, by the
                 norm's name in the file), or "output_norm" (what the logits are made of)
    heads        of q, k or v, which receive; with shared keys and values these are the shared ones.
                 None: all
    through_ffn  whether feed-forward parts on the way pass on what they hear, as in the paper; or
                 stay as they are, so that the path is direct

    For each sender the clean text is run with that head's result of the corrupt text, and all other
    heads' of the clean one; what the receiver then is, is put into a clean run. `shares` of the
    result is how far the metric moves towards the corrupt text's. Two programs run all of it;
    products are exact. Raises DataError for texts of unlike length and a metric that is the same of
    both, ConfigError for receivers and heads that there are not or that no head precedes,
    ShapeError for a metric that is no number.
    """
    pair = check_pair(model, clean, corrupt)
    counts = head_counts(model)[: _senders_end(model, receiver)]
    if not any(counts):
        raise ConfigError(f"no head precedes {receiver}")
    model = exact(model)
    cells, names = _sendings(model, pair, counts, through_ffn)
    heard = model.sweep(lambda t: t[receiver], pair[0], *names)(cells)
    where = {} if heads is None else {"heads": [*heads]}
    patches = [{"replace": {receiver: At(x, **where)}} for x in heard]
    ends = metrics_apart(model, metric, *pair)
    found = run_cells(model, metric, pair[0], [receiver], patches, progress)
    return head_effects(counts, found, *ends, f"paths from heads to {receiver}")


def _sendings(
    model: Model, pair: tuple[np.ndarray, np.ndarray], counts: list[int], through_ffn: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """A cell for each head that sends, and the names of what they replace."""
    end = len(counts)
    names = [f"blk.{i}.attention" for i in range(end) if counts[i]]
    names += [n for n in model.activations if not through_ffn and _is_ffn(n, end)]
    here, there = (read_activations(model, ids, names) for ids in pair)
    places = head_places(counts)
    return [{"replace": _hearing(i, h, counts[i], here, there)} for i, h in places], names


def _hearing(
    layer: int, head: int, n: int, here: Mapping[str, np.ndarray], there: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """What is replaced while one head sends: its result, and from its block on all others by their
    own."""
    mixed = dict(here)
    name = f"blk.{layer}.attention"
    own, other = (a[name].reshape(len(a[name]), n, -1) for a in (here, there))
    of_head = np.arange(n)[:, None] == head
    mixed[name] = np.where(of_head, other, own).reshape(here[name].shape)
    return {n: a for n, a in mixed.items() if int(n.split(".")[1]) >= layer}


def _senders_end(model: Model, receiver: str) -> int:
    """The first block none of whose heads precede a receiver. ConfigError for what is none."""
    known, n = model.activations, model.config.n_layer
    final = [part.name for part in [model.parts.decoder.norm] if isinstance(part, Norm)]
    ends = dict.fromkeys((*final, "output", "logits"), n)
    for i, block in enumerate(model.parts.decoder.blocks):
        ends |= {f"blk.{i}.{x}": i for x in "qkv"}
        for b in branches(block):
            if b.part.branch == "ffn_out":
                after = i + (f"blk.{i}.mid" in known)
                ends |= {f"blk.{i}.{p.name}": after for p in b.before if isinstance(p, Norm)}
    ends = {name: end for name, end in ends.items() if name in known}
    if receiver not in ends:
        near = suggestion(receiver, ends) or f"; there are {', '.join(ends)}"
        raise ConfigError(f"{receiver} is nothing that reads the residual stream{near}")
    return ends[receiver]


def _is_ffn(name: str, end: int) -> bool:
    """Whether an activation is what a feed-forward part of an earlier block adds."""
    _, block, ending = (*name.split(".", 2), "", "")[:3]
    return ending == "ffn_out" and block.isdigit() and int(block) < end
