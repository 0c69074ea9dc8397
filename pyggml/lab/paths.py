"""Path patching: what one head says to one place, and to no other (Wang et al. 2022, IOI)."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pyggml.errors import ConfigError, suggestion
from pyggml.lab.effects import (
    Effects,
    Metrics,
    Progress,
    Texts,
    head_effects,
    head_places,
    metrics_apart,
    of_pairs,
    read_activations,
    run_cells,
)
from pyggml.lab.linear import branches, exact, head_counts
from pyggml.model import Model
from pyggml.models.edits import At
from pyggml.models.norm import Norm
from pyggml.models.sweep import Cell


@of_pairs
def path_patching(
    model: Model,
    clean: Texts,
    corrupt: Texts,
    metric: Metrics,
    receiver: str,
    heads: Iterable[int] | None = None,
    *,
    through_ffn: bool = True,
    progress: Progress | None = None,
) -> list[Effects]:
    """The metric of the clean text when `receiver` hears each earlier head as in the corrupt text:
    (n_layer, n_head), of blocks before the receiver.

    clean, corrupt  token ids (T,) of one length; or lists of these, pair by pair, of any lengths,
                 which share passes: results are a list, and the metric is one for all or a list
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
    counts = head_counts(model)[: _senders_end(model, receiver)]
    if not any(counts):
        raise ConfigError(f"no head precedes {receiver}")
    model = exact(model)
    cells, names = _sendings(model, clean, corrupt, counts, through_ffn)
    heard = model.sweep(lambda t: t[receiver], clean, *names)(zip(*cells, strict=True))
    patches = _patches(receiver, heard, heads)
    ends = metrics_apart(model, metric, clean, corrupt)
    values_by_pair = run_cells(model, metric, clean, [receiver], patches, progress)
    return head_effects(counts, values_by_pair, ends, f"paths from heads to {receiver}")


def _patches(
    receiver: str, heard: Iterable[Sequence[np.ndarray]], heads: Iterable[int] | None
) -> list[list[Cell]]:
    """Of each text a cell for each sender: what the receiver then is, in its place."""
    where = {} if heads is None else {"heads": [*heads]}
    by_text = zip(*heard, strict=True)
    return [[{"replace": {receiver: At(x, **where)}} for x in own] for own in by_text]


def _sendings(
    model: Model, clean: Texts, corrupt: Texts, counts: list[int], through_ffn: bool
) -> tuple[list[list[Cell]], list[str]]:
    """Of each pair a cell for each head that sends, and the names of what they replace."""
    end = len(counts)
    names = [f"blk.{i}.attention" for i in range(end) if counts[i]]
    names += [n for n in model.activations if not through_ffn and _is_ffn(n, end)]
    runs = (read_activations(model, texts, names) for texts in (clean, corrupt))
    cells: list[list[Cell]] = [
        [{"replace": _hearing(i, h, counts[i], *pair)} for i, h in head_places(counts)]
        for pair in zip(*runs, strict=True)
    ]
    return cells, names


def _hearing(
    layer: int, head: int, n: int, here: Mapping[str, np.ndarray], there: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
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
    activations, n = model.activations, model.config.n_layer
    final = [part.name for part in [model.parts.decoder.norm] if isinstance(part, Norm)]
    ends = dict.fromkeys((*final, "output", "logits"), n)
    for i, block in enumerate(model.parts.decoder.blocks):
        ends |= {f"blk.{i}.{x}": i for x in "qkv"}
        for b in branches(block):
            if b.part.branch == "ffn_out":
                after = i + (f"blk.{i}.mid" in activations)
                ends |= {f"blk.{i}.{p.name}": after for p in b.before if isinstance(p, Norm)}
    ends = {name: end for name, end in ends.items() if name in activations}
    if receiver not in ends:
        near = suggestion(receiver, ends) or f"; there are {', '.join(ends)}"
        raise ConfigError(f"{receiver} is nothing that reads the residual stream{near}")
    return ends[receiver]


def _is_ffn(name: str, end: int) -> bool:
    """Whether an activation is what a feed-forward part of an earlier block adds."""
    _, block, ending = (*name.split(".", 2), "", "")[:3]
    return ending == "ffn_out" and block.isdigit() and int(block) < end
