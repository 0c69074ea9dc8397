"""Tables of what a metric is without each head."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from pyggml.errors import ConfigError, DataError
from pyggml.lab.effects import (
    Effects,
    Progress,
    head_effects,
    head_places,
    metric_of,
    read_activations,
    run_cells,
)
from pyggml.lab.linear import exact, head_counts
from pyggml.model import Ids, Model, is_several
from pyggml.models.edits import At
from pyggml.models.metric import Metric

KINDS = "zero", "mean", "resample"


def head_ablation(
    model: Model,
    ids: Ids,
    metric: Metric,
    kind: Literal["zero", "mean", "resample"] = "zero",
    reference: Sequence[Ids] = (),
    *,
    progress: Progress | None = None,
) -> Effects:
    """The metric of a text (T,) with each head's result replaced: (n_layer, n_head).

    zero      by 0
    mean      by its mean over all positions of the reference texts, or of the text itself
    resample  by what it is at the same positions of a reference text of T tokens; of several, the
              values are means over them

    All cells run in one program; products are exact. NaN where a block has fewer heads or none.
    `changes` of the result is how far the metric moves. Raises ConfigError for another kind and for
    a model without heads, DataError for references that do not fit, ShapeError for a metric that is
    no number.
    """
    ids = model.check_tokens(ids)
    if kind not in KINDS:
        raise ConfigError(f"kind is {kind!r}, wanted {', '.join(KINDS)}")
    texts = _references(model, ids, kind, reference)
    counts = head_counts(model)
    model = exact(model)
    names = {i: f"blk.{i}.attention" for i, n in enumerate(counts) if n}
    runs = [read_activations(model, text, names.values()) for text in texts]
    sources = [_sources(kind, names, runs)] if kind != "resample" else runs
    cells = [
        _cell(names[i], h, source[names[i]]) for source in sources for i, h in head_places(counts)
    ]
    found = run_cells(model, metric, ids, names.values(), cells, progress)
    values = found.reshape(len(sources), -1).mean(axis=0)
    base = metric_of(model, metric, ids)
    return head_effects(counts, values, base, float("nan"), f"{kind} ablation of heads")


def _references(model: Model, ids: np.ndarray, kind: str, given: Sequence[Ids]) -> list[np.ndarray]:
    """The texts to take heads' results from."""
    if len(given) and not is_several(given):
        raise DataError("reference is one text, wanted a list of texts")
    texts = [model.check_tokens(text) for text in given]
    if kind == "zero":
        if texts:
            raise DataError("zero ablation takes no reference texts")
        return []
    if kind == "mean":
        return texts or [ids]
    if not texts:
        raise DataError("resample takes reference texts, whose heads' results are put in")
    if wrong := [n for n, text in enumerate(texts) if len(text) != len(ids)]:
        raise DataError(
            f"reference text {wrong[0]} has {len(texts[wrong[0]])} tokens, wanted {len(ids)} as "
            "the text: positions are resampled by their numbers"
        )
    return texts


def _sources(
    kind: str, names: dict[int, str], runs: Sequence[dict[str, np.ndarray]]
) -> dict[str, Any]:
    """What stands in the place of all heads' results of each block: 0, or a mean (n · size,)."""
    if kind == "zero":
        return dict.fromkeys(names.values(), 0.0)
    return {n: np.concatenate([run[n] for run in runs]).mean(axis=0) for n in names.values()}


def _cell(name: str, head: int, source: Any) -> dict[str, Any]:
    return {"replace": {name: At(source, heads=[head])}}
