"""From a file to a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.errors import ModelError
from pyggml.gguf import GGUFFile
from pyggml.models.architecture import Architecture
from pyggml.models.config import ModelConfig, read_config, short
from pyggml.models.llama import LLAMA
from pyggml.models.net import Cache, Inputs, LoraPairs, Net
from pyggml.models.qwen2 import QWEN2
from pyggml.models.qwen3 import QWEN3
from pyggml.models.weights import Weights, read_weights
from pyggml.ops import add, cross_entropy_rows, get_rows, linear_cross_entropy
from pyggml.tensor import Tensor, leaf

ARCHITECTURES: dict[str, Architecture] = {a.name: a for a in (LLAMA, QWEN2, QWEN3)}


@dataclass(frozen=True, slots=True)
class Parts:
    """A model's fixed parts: what a graph is built from."""

    architecture: Architecture
    config: ModelConfig
    weights: Weights

    @property
    def output_name(self) -> str:
        """The output matrix: its own, or the token embedding where the two are tied."""
        return "output" if "output.weight" in self.weights else "token_embd"


def read(file: GGUFFile) -> Parts:
    """Config and weights of a model file.

    Raises ModelError for an unknown architecture, one of several split files, hyperparameters out
    of range and tensors that are missing, misshapen or of an unknown type.
    """
    name = file.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{file.path}: architecture {short(name)} is not known; known are {known}")
    split = file.get("split.count", 0)
    if isinstance(split, int) and split > 1:
        raise ModelError(f"{file.path}: is one of {split} split files, wanted a whole model")
    architecture = ARCHITECTURES[name]
    config = read_config(file, name)
    if config.n_layer > len(file.tensors):
        raise ModelError(
            f"{file.path}: block_count is {config.n_layer}, but there are only "
            f"{len(file.tensors)} tensors"
        )
    return Parts(architecture, config, read_weights(file, *architecture.shapes(config)))


def build(
    parts: Parts,
    inputs: Inputs,
    adapters: Sequence[LoraPairs] = (),
    cache: Cache | None = None,
    last_only: bool = False,
) -> Tensor:
    """Logits (T, n_vocab) of the tokens in `inputs`, or (1, n_vocab) of the last one alone."""
    net = Net(parts.config, parts.weights, inputs, adapters, cache)
    h = parts.architecture.hidden(net)
    if last_only:
        h = get_rows(h, leaf(np.array([h.shape[0] - 1], np.int32), "last token"))
    return _logits(net, parts.output_name, h).named("logits")


def _logits(net: Net, output_name: str, h: Tensor) -> Tensor:
    """The output matrix's bias is output.bias, even where the matrix is the embedding."""
    logits = net.linear(output_name, h)
    bias = net.weights.get("output.bias") if output_name != "output" else None
    return logits if bias is None else add(logits, bias)


def build_loss(
    parts: Parts,
    inputs: Inputs,
    targets: Tensor,
    weights: Tensor,
    adapters: Sequence[LoraPairs] = (),
    gradient: bool = True,
    fused: bool = True,
) -> Tensor:
    """Σ_t weights_t · cross entropy of the logits at t and targets_t, a scalar.

    The fused loss makes no logits matrix; it serves unless the output matrix has an adapter or a
    bias. fused=False is its slow twin, wanted when the output matrix itself is trained.
    """
    net = Net(parts.config, parts.weights, inputs, adapters)
    h = parts.architecture.hidden(net)
    full = f"{parts.output_name}.weight"
    plain = "output.bias" not in parts.weights
    if fused and plain and not any(full in pairs for pairs in adapters):
        loss = linear_cross_entropy(h, parts.weights[full], targets, weights, gradient)
    else:
        loss = cross_entropy_rows(_logits(net, parts.output_name, h), targets, weights)
    return loss.named("loss")
