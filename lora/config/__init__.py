"""The settings of fine-tunes and evaluations: each one's default, range, help and group, once.

data        what is read, and how it becomes windows of tokens
adapter     what is trained
combination how several adapters become one
train       how it is trained: optimiser, loop, checkpoints, memory
evaluation  what is evaluated, and how it is asked

`pyggml.settings` says what a setting is. A command line makes its options, and a file of settings
its keys, of `dataclasses.fields`.
"""

from pyggml.lora.config.adapter import LoraConfig
from pyggml.lora.config.combination import Combination
from pyggml.lora.config.data import SPECIAL_TOKENS, DataConfig
from pyggml.lora.config.evaluation import EvalConfig
from pyggml.lora.config.train import SCHEDULERS, TrainConfig

__all__ = [
    "SCHEDULERS", "SPECIAL_TOKENS", "Combination", "DataConfig", "EvalConfig", "LoraConfig",
    "TrainConfig",
]  # fmt: skip
