"""Changes of a model as low-rank updates of its matrices, which an adapter file holds.

without_heads     what heads write is taken away: columns of the output matrix
without_neurons   what neurons of the feed-forward write: columns of its last matrix
steering          the update that comes nearest to a vector which is always added

`model.with_adapters(*model.adapters, updates)` is the changed model, and `pyggml.lora.combine` of
that writes the file, which llama.cpp loads. An update is linear in what its matrix reads: it can
take away or turn what the matrix writes, and adds nothing where the matrix reads 0. So what is
added whatever is read, such as a mean in the place of a head or a steering vector, is no update;
`steering` gives the nearest one with its error, and a control vector (`pyggml.look.control`) holds
such a vector exactly.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.errors import ConfigError, DataError, ShapeError
from pyggml.graph.tensor import leaf
from pyggml.lab.linear import check_block, check_head, exact, head_counts, matrix_columns, refusal
from pyggml.lab.passages import activations_of
from pyggml.model import Model
from pyggml.models import LoraPair, LoraPairs
from pyggml.models.texts import Ids

_DAMPING = 1e-3  # of a least-squares fit, by the mean square of a neuron


def update(model: Model, b: np.ndarray, a: np.ndarray) -> LoraPair:
    """The update b @ a of a matrix: b (n_out, r), a (r, n_in), any floats."""
    first, second = (leaf(np.ascontiguousarray(x, np.float32)) for x in (a, b))
    model.devices.hold(first, second)
    return LoraPair(first, second, 1.0)


def without_heads(model: Model, heads: Mapping[int, Iterable[int]]) -> LoraPairs:
    """The updates that take heads away, {layer: heads}; of each layer the rank is the size of a
    head times how many go.

    They are those of the model with the adapters that it has. Exact to the rounding of products,
    also where a gate or a norm stands between heads and their matrix: what the heads write is 0,
    what others write stays. Raises ConfigError for heads that there are not, and for none.
    """
    model, updates = exact(model), dict[str, LoraPair]()
    for layer, chosen in heads.items():
        for head in (chosen := sorted({*chosen})):
            check_head(model, layer, head)
        module = f"blk.{layer}.attn_output"
        size = _n_in(model, module) // head_counts(model)[layer]
        columns = [head * size + i for head in chosen for i in range(size)]
        if columns:
            updates[f"{module}.weight"] = _without_columns(model, module, columns)
    return _some(updates, "heads")


def without_neurons(model: Model, neurons: Mapping[int, Iterable[int]]) -> LoraPairs:
    """The updates that take neurons of feed-forward parts away, {layer: neurons}, of a rank of one
    each. Otherwise as `without_heads`. ConfigError for experts, which share no matrix."""
    model, updates = exact(model), dict[str, LoraPair]()
    for layer, chosen in neurons.items():
        module = down(model, layer)
        n_in = _n_in(model, module)
        columns = sorted({*chosen})
        if strange := [i for i in columns if not 0 <= i < n_in]:
            raise ConfigError(f"block {layer} has no neuron {strange[0]} among its {n_in}")
        if columns:
            updates[f"{module}.weight"] = _without_columns(model, module, columns)
    return _some(updates, "neurons")


@dataclass(frozen=True, slots=True)
class Steering:
    """The update that comes nearest to a vector which is always added.

    updates   of one matrix, of rank 1
    error     how far what it adds is from the vector, by the vector's length: the root mean square
              over tokens that the fit has not seen. 0 is exact, 1 as far as no update
    """

    updates: LoraPairs
    error: float


def steering(model: Model, vector: np.ndarray, layer: int, texts: Sequence[Ids]) -> Steering:
    """A vector (n_embd,) added after a block by an update of the feed-forward's last matrix.

    For a token with the neurons x it adds vector · (a · x), where a is fitted by least squares so
    that a · x is near to 1; every fifth token of the texts is kept from the fit, for the error.

    Raises ConfigError for a block whose feed-forward is not added as it is, ShapeError for a vector
    of another length, and DataError for too few tokens.
    """
    v = np.asarray(vector, np.float64)
    if v.shape != (model.config.n_embd,) or not np.isfinite(v).all():
        raise ShapeError(f"the vector has shape {v.shape}, wanted ({model.config.n_embd},), finite")
    model, module = exact(model), down(model, layer)
    if not _adds_as_it_is(model, layer):
        fault = "changes what its feed-forward adds: a control vector is exact"
        raise refusal(model, layer, fault)
    x = neurons_of(model, layer, texts)
    if len(x) < 5:
        raise DataError(f"the texts have {len(x)} tokens, wanted 5 at least")
    unseen = np.arange(len(x)) % 5 == 4
    seen = x[~unseen]
    squares = seen.T @ seen
    squares += _DAMPING * np.trace(squares) / len(squares) * np.eye(len(squares))
    a = np.linalg.solve(squares, seen.sum(axis=0))
    error = float(np.sqrt(np.mean(np.square(x[unseen] @ a - 1))))
    return Steering({f"{module}.weight": update(model, v[:, None], a[None])}, error)


def neurons_of(model: Model, layer: int, texts: Sequence[Ids]) -> np.ndarray:
    """What the last matrix of a feed-forward reads of every token of the texts, (n, n_ff) float64.
    DataError for no texts."""
    if not texts:
        raise DataError("no texts, wanted one at least")
    name = f"blk.{layer}.ffn_neurons"
    rows = [arrays[name] for _, arrays in activations_of(model, texts, name)]
    return np.concatenate(rows).astype(np.float64)


def down(model: Model, layer: int) -> str:
    """The last module of a block's feed-forward. ConfigError for a block that lacks one."""
    module = f"blk.{layer}.ffn_down"
    check_block(model, layer)
    if f"{module}.weight" not in model.parts.weights:
        raise refusal(model, layer, "has no feed-forward with one last matrix")
    return module


# -- how ------------------------------------------------------------------------------------------


def _n_in(model: Model, module: str) -> int:
    if f"{module}.weight" not in model.parts.weights:
        raise ConfigError(f"{model.config.architecture} has no {module}.weight")
    return model.parts.weights[f"{module}.weight"].shape[-1]


def _without_columns(model: Model, module: str, columns: Sequence[int]) -> LoraPair:
    """The update that makes columns of a matrix 0."""
    n_in = _n_in(model, module)
    chosen = np.zeros((len(columns), n_in), np.float32)
    chosen[np.arange(len(columns)), columns] = 1
    written = matrix_columns(model, module, 0, n_in)[columns]
    return update(model, -written.T, chosen)


def _some(updates: dict[str, LoraPair], what: str) -> LoraPairs:
    if not updates:
        raise ConfigError(f"no {what}, wanted one at least: {{layer: {what}}}")
    return updates


def _adds_as_it_is(model: Model, layer: int) -> bool:
    """Whether what the last matrix writes is what the block adds."""
    names = [f"blk.{layer}.ffn_down", f"blk.{layer}.ffn_out"]
    with model.trace(*names) as t:
        model.logits([0])
    return np.array_equal(*(t[name] for name in names))
