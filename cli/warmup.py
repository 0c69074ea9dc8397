"""`pyggml warmup`: a tiny random model of every architecture and type takes one step of training
and writes one token, so that every kernel that these need lies compiled on the disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np

from pyggml import gguf, load
from pyggml._jit import max_threads, set_threads
from pyggml.cli.options import SETTINGS, threads_option
from pyggml.cli.show import say, span
from pyggml.dtypes import F32
from pyggml.generation import Session
from pyggml.lora import Corpus, Dataset, TrainConfig, Trainer, attach
from pyggml.models import ARCHITECTURES, ModelConfig
from pyggml.models.config import RopeConfig
from pyggml.quants import FILE_TYPES
from pyggml.requantize import requantize

_CTX, _N_VOCAB, _WIDTH = 32, 64, 256  # rows of 256 are the shortest that every type can hold
_LAYERS = 2  # so few that a mixed file type still shows both of its types


@click.command("warmup", context_settings=SETTINGS)
@threads_option
def command(threads: int) -> None:
    """Compile all kernels now, so that later commands start at once.

    They are kept in the user's cache folder until Python, Numba or pyggml change.
    """
    set_threads(threads or max_threads())
    began = perf_counter()
    first, *others = ARCHITECTURES
    work = [(first, t) for t in FILE_TYPES] + [(name, next(iter(FILE_TYPES))) for name in others]
    with tempfile.TemporaryDirectory(prefix="pyggml-", ignore_cleanup_errors=True) as folder:
        for number, (architecture, file_type) in enumerate(work, 1):
            say(f"{number:2}/{len(work)} {architecture:<8} {file_type:<8} ", end="")
            started = perf_counter()
            plain, packed = Path(folder, f"{architecture}.gguf"), Path(folder, f"{number}.gguf")
            _write(plain, _config(architecture))
            requantize(plain, packed, file_type)
            _use(packed, threads)
            say(span(perf_counter() - started))
    say(f"ready after {span(perf_counter() - began)}")


def _config(architecture: str) -> ModelConfig:
    rope = RopeConfig(
        n_dims=64, freq_base=1e4, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0, n_ctx_orig=_CTX
    )
    return ModelConfig(
        architecture=architecture,
        n_vocab=_N_VOCAB,
        n_ctx=_CTX,
        n_embd=_WIDTH,
        n_layer=_LAYERS,
        n_ff=_WIDTH,
        n_head=4,
        n_head_kv=2,
        n_embd_head=64,
        rms_eps=1e-6,
        rope=rope,
    )


def _write(path: Path, c: ModelConfig) -> None:
    """A model with every tensor that its architecture may have, but the output's bias, which few
    models have and which would keep the fused loss from being compiled."""
    rng = np.random.default_rng(0)
    shapes, _ = ARCHITECTURES[c.architecture].shapes(c)
    tensors = [
        (name, F32, shape, rng.standard_normal(prod(shape), np.float32).reshape(shape))
        for name, shape in shapes.items()
        if name != "output.bias"
    ]
    gguf.write(path, _metadata(c), tensors)


def _metadata(c: ModelConfig) -> Mapping[str, Any]:
    own = {
        "context_length": c.n_ctx,
        "embedding_length": c.n_embd,
        "block_count": c.n_layer,
        "feed_forward_length": c.n_ff,
        "attention.head_count": c.n_head,
        "attention.head_count_kv": c.n_head_kv,
        "attention.layer_norm_rms_epsilon": c.rms_eps,
    }
    named = {f"{c.architecture}.{key}": value for key, value in own.items()}
    return {"general.architecture": c.architecture} | named


def _use(path: Path, threads: int) -> None:
    model = load(path)
    window = np.arange(_CTX + 1, dtype=np.int32)[None]
    windows = Dataset(window, np.zeros_like(window))
    settings = TrainConfig(ctx=_CTX, threads=threads, max_steps=1)
    Trainer(model, attach(model).parameters, Corpus(windows, windows), settings).run()
    session = Session(model, _CTX)
    session.feed(window[0, :4])
    session.feed([4])
