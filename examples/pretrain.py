"""A small language model from plain text alone, trained by this engine: the demo's base model.

    text → byte-level BPE vocabulary → random weights → AdamW on all of them → quantised GGUF

usage: python examples/pretrain.py TEXT [TEXT ...] -o base.gguf [--steps 1500] [--layers 4] ...
       python examples/pretrain.py --help

The last twentieth of the text is held out, and the file gets the weights that did best on it. The
defaults made cli/demo/base.gguf from 400 kB of public-domain stories.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import pyggml
from pyggml import gguf, tokenizer
from pyggml.dtypes import F32
from pyggml.lora import (
    Corpus,
    Dataset,
    Parameters,
    Report,
    StepReport,
    TrainConfig,
    Trainer,
    ValidationReport,
)
from pyggml.models import ARCHITECTURES, ModelConfig
from pyggml.models.config import RopeConfig
from pyggml.requantize import requantize
from pyggml.tensor import Shape
from pyggml.tokenizer.bpe import splits
from pyggml.tokenizer.pretokenizers import PRETOKENIZERS

PRE_TOKENIZER = "qwen2"
END = "<|endoftext|>"
NORMAL, CONTROL = 1, 3  # of tokenizer.ggml.token_type
HELD_OUT = 0.05
SHIFTS = 4  # windows start every ctx / SHIFTS tokens, so that a token is seen in as many places


# -- the file's metadata ------------------------------------------------------------------------


def train_vocabulary(text: str, n_vocab: int) -> dict[str, Any]:
    """The keys of a byte-level BPE vocabulary: 256 bytes, the commonest merges, an end token."""
    bpe: Any = Tokenizer(models.BPE())
    bpe.pre_tokenizer = splits(PRETOKENIZERS[PRE_TOKENIZER].patterns)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    wanted = trainers.BpeTrainer(
        vocab_size=n_vocab - 1, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([text], wanted)
    found = json.loads(bpe.to_str())["model"]
    tokens = [*sorted(found["vocab"], key=found["vocab"].__getitem__), END]
    end = len(tokens) - 1
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PRE_TOKENIZER,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([NORMAL] * end + [CONTROL], np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in found["merges"]],
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
    }


def sizes(args: argparse.Namespace, n_vocab: int) -> ModelConfig:
    """Qwen 3's architecture: tied embedding, q and k normed per head, half as many key heads."""
    n_head = args.width // args.head
    return ModelConfig(
        architecture="qwen3",
        n_vocab=n_vocab,
        n_ctx=4 * args.ctx,
        n_embd=args.width,
        n_layer=args.layers,
        n_ff=args.ff,
        n_head=n_head,
        n_head_kv=max(n_head // 2, 1),
        n_embd_head=args.head,
        rms_eps=1e-6,
        rope=RopeConfig(args.head, 10000.0, 1.0, 0.0, 1.0, 4 * args.ctx),
    )


def hyperparameters(c: ModelConfig) -> dict[str, Any]:
    """The keys that a reader of the file gets the same config from."""
    keys = {
        "context_length": c.n_ctx,
        "embedding_length": c.n_embd,
        "block_count": c.n_layer,
        "feed_forward_length": c.n_ff,
        "attention.head_count": c.n_head,
        "attention.head_count_kv": c.n_head_kv,
        "attention.key_length": c.n_embd_head,
        "attention.value_length": c.n_embd_head,
        "attention.layer_norm_rms_epsilon": c.rms_eps,
        "rope.freq_base": c.rope.freq_base,
    }
    name = {"general.architecture": c.architecture, "general.name": "pyggml demo base"}
    return name | {f"{c.architecture}.{key}": value for key, value in keys.items()}


# -- weights and windows ------------------------------------------------------------------------


def random_weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Norms 1; matrices normal, those that add to the residual stream smaller with depth."""
    shapes, optional = ARCHITECTURES[config.architecture].shapes(config)
    rng = np.random.default_rng(seed)

    def start(name: str, shape: Shape) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        spread = 0.02 if name == "token_embd.weight" else shape[1] ** -0.5
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            spread /= (2 * config.n_layer) ** 0.5
        return rng.normal(0, spread, shape).astype(np.float32)

    return {name: start(name, shape) for name, shape in shapes.items() if name not in optional}


def windows(ids: Sequence[int], ctx: int, step: int) -> Dataset:
    """Every window of ctx + 1 tokens that starts at a multiple of `step`."""
    views = np.lib.stride_tricks.sliding_window_view(np.array(ids, np.int32), ctx + 1)[::step]
    return Dataset(views, np.zeros_like(views))


def write(path: Path, metadata: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
    gguf.write(path, metadata, [(name, F32, a.shape, a) for name, a in weights.items()])


# -- training -----------------------------------------------------------------------------------


def train(path: Path, corpus: Corpus, config: TrainConfig, patience: int) -> dict[str, np.ndarray]:
    """The weights, by name, that did best on the held-out text; ends early if they are old."""
    model = pyggml.load(path)
    parameters = Parameters({name: t.shape for name, t in model.parts.weights.items()})
    for name, t in parameters.tensors.items():
        t.data[:] = model.parts.weights[name].data
    model.parts = replace(model.parts, weights=parameters.tensors)
    trainer = Trainer(model, parameters, corpus, config, fused=False)
    print(f"{parameters.n_trained:,} weights, {len(corpus.train)} windows, {trainer.n_steps} steps")
    best, lowest, since = parameters.data.copy(), np.inf, 0

    def report(event: Report) -> None:
        nonlocal lowest, since
        if isinstance(event, StepReport) and event.step % 10 == 0:
            print(f"step {event.step:5}  loss {event.loss:.3f}  {event.seconds:.3f} s")
        if isinstance(event, ValidationReport):
            better = event.loss < lowest
            lowest, since = min(lowest, event.loss), 0 if better else since + 1
            print(f"step {event.step:5}  held-out loss {event.loss:.4f}{' *' * better}")
            if better:
                best[:] = parameters.data
            if since >= patience:
                trainer.stop()

    trainer.run(report)
    parameters.data[:] = best
    return {name: t.data for name, t in parameters.tensors.items()}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", nargs="+", type=Path, help="UTF-8 text files")
    parser.add_argument("-o", "--output", required=True, type=Path)
    parser.add_argument("--type", default="Q8_0", help="file type of the result")
    sizes = {"vocab": 1024, "width": 192, "layers": 4, "ff": 512, "head": 32, "ctx": 128}
    run = {"steps": 1500, "batch": 16, "seed": 0, "patience": 5}
    for name, default in (sizes | run).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in args.text)
    cut = round(len(text) * (1 - HELD_OUT))
    vocabulary = train_vocabulary(text[:cut], args.vocab)
    encode = tokenizer.from_metadata(vocabulary).encode
    corpus = Corpus(
        windows(encode(text[:cut]), args.ctx, args.ctx // SHIFTS),
        windows(encode(text[cut:]), args.ctx, args.ctx),
    )
    config = sizes(args, len(vocabulary["tokenizer.ggml.tokens"]))
    metadata = hyperparameters(config) | vocabulary
    settings = TrainConfig(
        ctx=args.ctx,
        batch=args.batch,
        epochs=args.steps,
        max_steps=args.steps,
        lr=args.lr,
        lr_min=args.lr / 20,
        warmup_steps=args.steps // 20,
        weight_decay=args.decay,
        beta2=0.98,
        seed=args.seed,
        val_every=50,
        val_windows=1000,
    )
    with TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.gguf"
        write(whole, metadata, random_weights(config, args.seed))
        write(whole, metadata, train(whole, corpus, settings, args.patience))
        requantize(whole, args.output, args.type)


if __name__ == "__main__":
    main()
