"""The settings of a fine-tune: each one's default, range, help text and group stand here once.

settings   what a setting is, and how a dataclass of them is checked
data       what is read, and how it becomes windows of tokens
adapter    what is trained
train      how it is trained: optimiser, loop, checkpoints, memory
preference what is minimised

A command line makes its options, and a file of settings its keys, of `dataclasses.fields`.
"""

from pyggml.lora.config.adapter import LoraConfig
from pyggml.lora.config.data import SPECIAL_TOKENS, DataConfig
from pyggml.lora.config.preference import OBJECTIVES, PreferenceConfig
from pyggml.lora.config.settings import GROUPS, Settings
from pyggml.lora.config.train import SCHEDULERS, TrainConfig

__all__ = [
    "GROUPS",
    "OBJECTIVES",
    "SCHEDULERS",
    "SPECIAL_TOKENS",
    "DataConfig",
    "LoraConfig",
    "PreferenceConfig",
    "Settings",
    "TrainConfig",
]
