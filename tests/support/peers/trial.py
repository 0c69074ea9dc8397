"""What several tests do with a model: compare logits, ask llama.cpp, train an adapter hard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from extras import need

from pyggml import gguf
from pyggml.graph.dtypes import F32
from pyggml.lora import LoraConfig, TrainConfig, Trainer, attach
from pyggml.lora.adapter.adapter import Adapter
from pyggml.lora.data import Corpus, Dataset
from pyggml.model import Model
from pyggml.quants import dequantize

from peers.peer import LORA_RANK, LORA_SCALE


def llama_cpp_logits(path: Path, tokens: np.ndarray, adapter: Path | None = None) -> np.ndarray:
    """Logits (T, n_vocab) by llama.cpp, with keys and values kept in F32; skips without it."""
    llama_cpp = need("llama_cpp")
    llama = llama_cpp.Llama(
        model_path=str(path),
        lora_path=adapter and str(adapter),
        n_ctx=len(tokens),
        logits_all=True,
        type_k=0,  # F32
        type_v=0,
        flash_attn=False,
        yarn_attn_factor=-1.0,  # what the file says; the binding's defaults are numbers
        yarn_beta_fast=-1.0,
        yarn_beta_slow=-1.0,
        verbose=False,
    )
    llama.eval([int(t) for t in tokens])
    return np.array(llama.scores[: len(tokens)])


def in_f32(source: Path, target: Path) -> Path:
    """A model with all its tensors in F32, so that llama.cpp rounds no activations.

    quantize would leave those alone that llama.cpp's does.
    """
    with gguf.open(source) as file:
        tensors = [
            (name, F32, t.shape, dequantize(file.data(name), t.dtype.name))
            for name, t in file.tensors.items()
        ]
        gguf.write(target, file.metadata, tensors)
    return target


def wide_modules(model: Model, rank: int, applied: bool = True) -> tuple[str, ...]:
    """All linear modules of the blocks that an adapter of this rank fits, experts included.
    applied: those alone whose updates llama.cpp applies."""
    weights, specs = model.parts.weights.items(), model.parts.decoder.tensors()
    wide = {n for n, w in weights if len(w.shape) > 1 and min(w.shape[-2:]) >= rank}
    wide = {n for n in wide if n in specs and (specs[n].applied or not applied)}
    return tuple(
        m for m in model.parts.decoder.modules if any(n.endswith(f".{m}.weight") for n in wide)
    )


def adapted(model: Model, values: Mapping[str, np.ndarray]) -> Model:
    """The model with the golden adapter, which updates every matrix of the blocks."""
    modules, alpha = wide_modules(model, LORA_RANK), LORA_RANK * LORA_SCALE
    made = attach(model, LoraConfig(rank=LORA_RANK, alpha=alpha, modules=modules))
    tensors = {f"lora/{t.name}": t for pair in made.pairs.values() for t in (pair.a, pair.b)}
    assert tensors.keys() == {n for n in values if n.startswith("lora/")}
    for name, t in tensors.items():
        t.data[:] = values[name]
    return made.model


def trained(
    model: Model, rank: int = 4, steps: int = 12, modules: tuple[str, ...] | None = None
) -> Adapter:
    """An adapter of the model, trained on random tokens by steps so long that they change much."""
    made = attach(model, LoraConfig(rank=rank, alpha=2.5 * rank, modules=modules))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.config.n_vocab, (steps, 33)).astype(np.int32)
    corpus = Corpus(Dataset(tokens, np.zeros_like(tokens)), None)
    config = TrainConfig(lr=0.02, warmup_steps=0, lr_scheduler="constant", compute="f32")
    Trainer(made.model, made.parameters, corpus, config).run()
    return made
