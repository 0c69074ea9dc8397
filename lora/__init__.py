"""LoRA: `attach` makes updates of a model, which are trained and written as llama.cpp loads them.

In short:

    model = pyggml.load("model.gguf")
    adapter = attach(model, LoraConfig(rank=8))
    corpus = read_corpus("text.txt", model.tokenizer, DataConfig(ctx=256))
    Trainer(adapter.model, adapter.parameters, corpus, TrainConfig(lr=1e-4)).run()
    adapter.save("adapter.gguf")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyggml.look.gradients import loss_and_grads
    from pyggml.lora.adapter import (
        Adapter,
        Extract,
        Parameters,
        TrainedTensors,
        attach,
        combine,
        extract,
        merge,
        train_packed,
        train_scales,
        train_tensors,
        unfreeze,
    )
    from pyggml.lora.config import Combination, DataConfig, LoraConfig, TrainConfig
    from pyggml.lora.data import Corpus, Dataset, Source, WindowBatch, corpus, read_corpus
    from pyggml.lora.evaluate import Perplexity, perplexity
    from pyggml.lora.objectives import OBJECTIVES, Objective, Rewards
    from pyggml.lora.trainer.fit import Fit, fit
    from pyggml.lora.trainer.loop import Trainer
    from pyggml.lora.trainer.memory import RunMemory
    from pyggml.lora.trainer.reports import (
        CheckpointReport,
        History,
        Report,
        StepReport,
        ValidationReport,
    )

# Imported when first used: who chats or serves needs neither the trainer nor its data.
_NAMES = {
    "pyggml.look.gradients": "loss_and_grads",
    "pyggml.lora.adapter": "Adapter Extract Parameters TrainedTensors attach combine extract merge "
    "train_packed train_scales train_tensors unfreeze",
    "pyggml.lora.config": "Combination DataConfig LoraConfig TrainConfig",
    "pyggml.lora.data": "WindowBatch Corpus Dataset Source corpus read_corpus",
    "pyggml.lora.evaluate": "Perplexity perplexity",
    "pyggml.lora.objectives": "OBJECTIVES Objective Rewards",
    "pyggml.lora.trainer.fit": "Fit fit",
    "pyggml.lora.trainer.loop": "Trainer",
    "pyggml.lora.trainer.memory": "RunMemory",
    "pyggml.lora.trainer.reports": "CheckpointReport History Report StepReport ValidationReport",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "OBJECTIVES", "Adapter", "CheckpointReport", "Combination", "Corpus", "DataConfig", "Dataset",
    "Extract", "Fit", "History", "LoraConfig", "Objective", "Parameters", "Perplexity", "Report",
    "Rewards", "RunMemory", "Source", "StepReport", "TrainConfig", "TrainedTensors", "Trainer",
    "ValidationReport", "WindowBatch", "attach", "combine", "corpus", "extract", "fit",
    "loss_and_grads", "merge", "perplexity", "read_corpus", "train_packed", "train_scales",
    "train_tensors", "unfreeze",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'pyggml.lora' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
