"""An adapter: which tensors get an update, how it starts, and the file that holds it.

targets      config, model → the tensors that get an update, with their ranks and scales
starts       initial values of A and B
parameters   all trained numbers in one flat buffer
attach       model → Adapter: fresh updates, or those of a loaded adapter
adapter      the updates of a model's matrices
file         updates → an adapter file that llama.cpp loads
combine      adapters of a model → one adapter, at a rank
extract      two models → the adapter of their difference, at a rank
merge        model with adapters → a model file with the updates in its weights
tensors      a model's own tensors or the scales of its blocks, trained without an adapter
"""

from pyggml.lora.adapter.adapter import Adapter
from pyggml.lora.adapter.attach import attach, unfreeze
from pyggml.lora.adapter.combine import combine
from pyggml.lora.adapter.extract import Extract, extract
from pyggml.lora.adapter.merge import merge
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.adapter.tensors import TrainedTensors, train_packed, train_scales, train_tensors

__all__ = [
    "Adapter", "Extract", "Parameters", "TrainedTensors", "attach", "combine", "extract", "merge",
    "train_packed", "train_scales", "train_tensors", "unfreeze",
]  # fmt: skip
