"""Tables of what a metric is without each head."""

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np

from pyggml.errors import ConfigError, DataError
from pyggml.lab.effects import (
    Effects,
    Metrics,
    Progress,
    Texts,
    head_effects,
    head_places,
    metric_of,
    read_activations,
    run_cells,
)
from pyggml.lab.linear import exact, head_counts
from pyggml.look.lens import of_texts
from pyggml.model import Model
from pyggml.models.edits import At
from pyggml.models.sweep import Cell
from pyggml.models.texts import Ids, is_several

KINDS = "zero", "mean", "resample"


@of_texts
def head_ablation(
    model: Model,
    texts: Sequence[Ids],
    metric: Metrics,
    kind: Literal["zero", "mean", "resample"] = "zero",
    reference: Sequence[Ids] | Sequence[Sequence[Ids]] = (),
    *,
    progress: Progress | None = None,
) -> list[Effects]:
    """The metric of a text (T,) with each head's result replaced: (n_layer, n_head).

    zero      by 0
    mean      by its mean over all positions of the reference texts, or of the text itself
    resample  by what it is at the same positions of a reference text of T tokens; of several, the
              values are means over them

    A list of texts, of any lengths, shares passes and gives a list; the metric is then one for all
    or a list, the reference texts are for all or a list of lists. All cells run in one program;
    products are exact. NaN where a block has fewer heads or none. `changes` of the result is how
    far the metric moves. Raises ConfigError for another kind and for a model without heads,
    DataError for references that do not fit, ShapeError for a metric that is no number.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind is {kind!r}, wanted {', '.join(KINDS)}")
    arrays = [model.check_tokens(ids) for ids in texts]
    references = _references(model, arrays, kind, reference)
    counts = head_counts(model)
    model = exact(model)
    names = {i: f"blk.{i}.attention" for i, n in enumerate(counts) if n}
    sources = _sources(model, kind, names.values(), references)
    places = head_places(counts)
    cells = [[_cell(names[i], h, each) for each in own for i, h in places] for own in sources]
    values_by_text = run_cells(model, metric, arrays, names.values(), cells, progress)
    values = [v.reshape(-1, len(places)).mean(axis=0) for v in values_by_text]
    ends = [(base, float("nan")) for base in metric_of(model, metric, arrays)]
    return head_effects(counts, values, ends, f"{kind} ablation of heads")


def _references(model: Model, texts: Texts, kind: str, given: Sequence[Any]) -> list[Texts]:
    """The texts to take heads' results from, of each text."""
    if len(given) and not is_several(given):
        raise DataError("reference is one text, wanted a list of texts")
    if any(map(is_several, given)):
        if len(given) != len(texts):
            raise DataError(
                f"reference has {len(given)} lists, wanted one for each of {len(texts)} texts"
            )
    else:
        given = [given] * len(texts)
    pairs = zip(texts, given, strict=True)
    return [_own_references(model, ids, kind, own) for ids, own in pairs]


def _own_references(model: Model, ids: np.ndarray, kind: str, given: Sequence[Ids]) -> Texts:
    """The same of one text."""
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
    model: Model, kind: str, names: Collection[str], references: Sequence[Texts]
) -> Sequence[Sequence[Mapping[str, Any]]]:
    """What stands in the place of all heads' results of each block (T, n · size), 0, or their mean
    (n · size,): of each text one, or one for each of its references."""
    if kind == "zero":
        return [[dict.fromkeys(names, 0.0)] for _ in references]
    runs = iter(read_activations(model, [text for own in references for text in own], names))
    by_text = [[*islice(runs, len(own))] for own in references]
    if kind == "resample":
        return by_text
    return [
        [{n: np.concatenate([run[n] for run in own]).mean(axis=0) for n in names}]
        for own in by_text
    ]


def _cell(name: str, head: int, source: Mapping[str, Any]) -> Cell:
    return {"replace": {name: At(source[name], heads=[head])}}
