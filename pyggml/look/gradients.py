"""Loss and gradients of one sequence, as arrays: for checks and experiments.

L = mean over the counted targets t of −log softmax(logits at t − 1)[tokens_t]
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from pyggml.backward import training_graph
from pyggml.errors import AdapterError, DataError
from pyggml.graph import Graph
from pyggml.graph.tensor import Tensor, leaf
from pyggml.model import Model
from pyggml.models import Inputs, Taps, build_loss, record
from pyggml.models.low_rank import tensors_of_adapters
from pyggml.models.texts import fill
from pyggml.runtime import results


def loss_and_grads(
    model: Model,
    tokens: Sequence[int] | np.ndarray,
    mask: np.ndarray | None = None,
    parameters: Mapping[str, Tensor] | None = None,
) -> tuple[float, dict[str, np.ndarray]]:
    """Mean next-token cross entropy of `tokens` (n,), and its gradient by adapter tensor.

    mask        (n,) bool, whether each token counts as a target; by default all. The first never is
                one
    parameters  leaves by name that gradients are of, such as `Parameters.tensors`; by default all
                tensors of the model's adapter, by their names in its file:
                "blk.0.attn_q.weight.lora_a" (rank, n_in), ".lora_b" (n_out, rank), float32

    There is no dropout. The trace of a model also gets the gradients of activations; a model with
    a trace may have no adapter, or two for one matrix, and then has no gradients of adapters.
    Raises DataError for tokens or a mask that do not fit, and AdapterError if a model without a
    trace has no adapter or two for one matrix.
    """
    parameters = _parameters(model) if parameters is None else parameters
    taps = model.taps()
    model.note_rounding()
    forward = loss_graph(model, tokens, mask, parameters, taps)
    return _differentiate(model, forward, parameters, taps.read if taps else {})


def loss_graph(
    model: Model,
    tokens: Sequence[int] | np.ndarray,
    mask: np.ndarray | None = None,
    parameters: Mapping[str, Tensor] = MappingProxyType({}),
    taps: Taps | None = None,
) -> Graph:
    """The graph of that loss, its output "loss"; arguments and errors as `loss_and_grads`."""
    ids = model.check_tokens(tokens)
    if len(ids) < 2:
        raise DataError(f"{len(ids)} token, wanted at least 2: one to start from and one target")
    if len(ids) - 1 > model.config.n_ctx:
        raise DataError(
            f"{len(ids) - 1} tokens and a target, wanted at most the {model.config.n_ctx} of the "
            "model's context"
        )
    inputs = Inputs.empty(len(ids) - 1)
    fill(inputs, ids[:-1])
    weights = leaf(_weights(len(ids), mask), "weights")
    targets = leaf(ids[1:], "targets")
    return build_loss(model.parts, inputs, targets, weights, model.adapters, parameters, taps=taps)


def _differentiate(
    model: Model, forward: Graph, parameters: Mapping[str, Tensor], read: Mapping[str, Tensor]
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and its gradient by the parameters; a trace gets the activations to read, which are
    further outputs of `forward`, and their gradients."""
    graph = training_graph(forward, {**parameters, **read}, kept_as=model.kept_as)
    arrays = dict(zip(graph.names, results(graph, model.devices), strict=True))
    values = {name: arrays[name] for name in read}
    record(model.traces, values, {name: arrays[f"grad:{name}"] for name in read})
    return float(arrays["loss"]), {name: arrays[f"grad:{name}"] for name in parameters}


def _parameters(model: Model) -> dict[str, Tensor]:
    """Every adapter tensor of the model by the name it has in the adapter file."""
    try:
        parameters = tensors_of_adapters(model.adapters)
    except AdapterError:
        if not model.traces:
            raise
        return {}
    if not parameters and not model.traces:
        raise AdapterError("the model has no adapter: attach one, or load one with the model")
    return parameters


def _weights(n: int, mask: np.ndarray | None) -> np.ndarray:
    """1 / number of counted targets where one counts, else 0, for the n − 1 targets."""
    counted = np.ones(n, bool) if mask is None else np.asarray(mask)
    if counted.shape != (n,) or counted.dtype != np.bool_:
        raise DataError(f"mask is {counted.dtype} of shape {counted.shape}, wanted bool ({n},)")
    if not counted[1:].any():
        raise DataError("the mask counts no target, so there is no loss")
    return np.asarray(counted[1:] / counted[1:].sum(), np.float32)
