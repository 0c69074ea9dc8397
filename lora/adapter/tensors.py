"""Full fine-tuning of some of a model's own tensors: norms, biases, an embedding, a small model.

The trained tensors replace the file's in the model's graphs. An adapter file cannot hold them, so
the result is a model file.
"""

import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pyggml.errors import AdapterError, suggestion
from pyggml.graph.arrays import read, write
from pyggml.graph.dtypes import BF16, F16, F32
from pyggml.graph.tensor import Tensor
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.adapter.starts import unpack
from pyggml.lora.adapter.targets import fits
from pyggml.model import Model
from pyggml.requantize import PackingLosses, rewrite

_FLOATS = (F32, F16, BF16)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedTensors:
    """A model's own tensors, trained directly.

    model        the model with these tensors: its logits follow training
    parameters   their numbers in float32, whatever the file's type
    """

    model: Model
    parameters: Parameters

    def save(
        self, path: str | os.PathLike[str], metadata: Mapping[str, Any] | None = None
    ) -> PackingLosses:
        """Write the whole model, with these tensors in the types of its file.

        metadata: further keys, or others in place of the file's, over those of the parameters;
        None: a key is left out.

        Returns how much of what was trained is in the file, by tensor. An older file at `path`
        stays whole until the new one is complete. Raises QuantError for numbers that F16 cannot
        hold, PyggmlError if the disk refuses.
        """
        self.model.devices.gather(self.parameters.buffers["data"])  # in a callback a device has it
        keys = {**self.parameters.metadata, **(metadata or {})}
        changed = {name: partial(_numbers, t) for name, t in self.parameters.tensors.items()}
        return rewrite(self.model.file, path, changed=changed, metadata=keys)


def _numbers(t: Tensor) -> np.ndarray:
    return np.asarray(read(t))


def train_tensors(model: Model, patterns: Sequence[str]) -> TrainedTensors:
    """Make all tensors trainable that match one of the patterns; `model` itself stays as it is.

    Patterns are those of LoraConfig.rank_pattern. Raises AdapterError for a pattern without a
    match, and with every matching tensor that is not F32, F16 or BF16.
    """
    weights = model.parts.weights
    chosen = [name for name in weights if any(fits(p, name) for p in patterns)]
    types = {name: model.file.tensors[name].dtype for name in chosen}
    wrong = [f"{name} is {d}" for name, d in types.items() if d not in _FLOATS]
    faults = [
        f"{pattern!r} fits no tensor of the model{suggestion(pattern, weights)}"
        for pattern in patterns
        if not any(fits(pattern, name) for name in weights)
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more are no floats" if len(wrong) > 5 else ""
        faults.append(f"{', '.join(wrong[:5])}{more}, wanted F32, F16 or BF16: only floats train")
    if faults:
        raise AdapterError([("train_tensors", f"cannot be done: {'; '.join(faults)}")])
    about = {"train_tensors": list(patterns)}
    parameters = Parameters({name: weights[name].shape for name in chosen}, about)
    for name, t in parameters.tensors.items():
        write(t, unpack(weights[name]).reshape(t.shape))
    trained = copy(model)
    trained.parts = replace(model.parts, weights={**weights, **parameters.tensors})
    return TrainedTensors(trained, parameters)
