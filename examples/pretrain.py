"""A small language model from nothing but text, trained by this engine: how the demo's was made.

    text → byte-level BPE vocabulary → random weights → AdamW on all of them → quantised GGUF

usage: python examples/pretrain.py TEXT [TEXT ...] -o base.gguf [--steps 1200] [--layers 3] ...
       python examples/pretrain.py --help

The last twentieth of the text is held out, and the file gets the weights that did best on it. The
defaults made cli/demo/base.gguf from 400 kB of public-domain stories.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from pyggml import gguf, load, lora, tokenizer
from pyggml.graph import arrays
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Shape
from pyggml.models import tensors_of
from pyggml.requantize import requantize
from pyggml.tokenizer.bpe import splits
from pyggml.tokenizer.pretokenizers import PRETOKENIZERS

Arrays = dict[str, np.ndarray]
PRE_TOKENIZER = "qwen2"
END = "<|endoftext|>"
NORMAL, CONTROL = 1, 3  # of tokenizer.ggml.token_type
HELD_OUT = 0.05
SHIFTS = 4  # windows start every ctx / SHIFTS tokens: an epoch shows each token in so many places


def train_vocabulary(text: str, n_vocab: int) -> dict[str, Any]:
    """GGUF keys of a byte-level BPE vocabulary: 256 bytes, the commonest merges, an end token."""
    bpe: Any = Tokenizer(models.BPE())
    bpe.pre_tokenizer = splits(PRETOKENIZERS[PRE_TOKENIZER])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rule = trainers.BpeTrainer(
        vocab_size=n_vocab - 1, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([text], rule)
    trained = json.loads(bpe.to_str())["model"]
    tokens = [*sorted(trained["vocab"], key=trained["vocab"].__getitem__), END]
    end = len(tokens) - 1
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PRE_TOKENIZER,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([NORMAL] * end + [CONTROL], np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in trained["merges"]],
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
    }


def hyperparameters(args: argparse.Namespace) -> dict[str, Any]:
    """GGUF keys of Qwen 3's shape, with half as many key heads as query heads."""
    n_head = args.width // args.head
    keys = {
        "context_length": 4 * args.ctx,
        "embedding_length": args.width,
        "block_count": args.layers,
        "feed_forward_length": args.ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": max(n_head // 2, 1),
        "attention.key_length": args.head,
        "attention.value_length": args.head,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    }
    own = {f"qwen3.{key}": value for key, value in keys.items()}
    return {"general.architecture": "qwen3", "general.name": "pyggml demo base"} | own


def random_weights(metadata: Mapping[str, Any], n_vocab: int, seed: int) -> Arrays:
    """Norms 1; matrices normal, smaller where they add to the residual stream.

    There is no output matrix: the token embedding serves as one.
    """
    rng = np.random.default_rng(seed)

    def start(name: str, shape: Shape) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        spread = 0.02 if name == "token_embd.weight" else shape[1] ** -0.5
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            spread /= (2 * metadata["qwen3.block_count"]) ** 0.5
        return rng.normal(0, spread, shape).astype(np.float32)

    wanted = tensors_of(metadata, n_vocab)
    return {name: start(name, spec.shape) for name, spec in wanted.items() if not spec.optional}


def write(path: Path, metadata: dict[str, Any], weights: Arrays) -> None:
    gguf.write(path, metadata, [(name, F32, a.shape, a) for name, a in weights.items()])


def windows(ids: Sequence[int], ctx: int, step: int) -> lora.Dataset:
    """Every window of ctx + 1 tokens that starts at a multiple of `step`."""
    views = np.lib.stride_tricks.sliding_window_view(np.array(ids, np.int32), ctx + 1)[::step]
    return lora.Dataset(views, np.zeros_like(views))


def train(path: Path, corpus: lora.Corpus, config: lora.TrainConfig, patience: int) -> Arrays:
    """The weights that did best on the held-out text; ends once `patience` validations found none.

    The model's leaves are replaced by trainable ones; the trainer does not know the difference.
    """
    model = load(path)
    parameters = lora.Parameters({name: t.shape for name, t in model.parts.weights.items()})
    for name, t in parameters.tensors.items():
        arrays.write(t, arrays.read(model.parts.weights[name]))
    model.parts = replace(model.parts, weights=parameters.tensors)
    trainer = lora.Trainer(model, parameters, corpus, config)
    print(f"{parameters.n_trained:,} weights, {len(corpus.train)} windows, {trainer.n_steps} steps")
    best, lowest, n_worse = parameters.data.copy(), np.inf, 0

    def report(event: lora.Report) -> None:
        nonlocal lowest, n_worse
        if isinstance(event, lora.StepReport) and event.step % 10 == 0:
            print(f"step {event.step:5}  loss {event.loss:.3f}  {event.seconds:.3f} s", flush=True)
        if isinstance(event, lora.ValidationReport):
            n_worse = 0 if event.loss < lowest else n_worse + 1
            print(f"step {event.step:5}  held-out loss {event.loss:.4f}{' *' * (n_worse == 0)}")
            if n_worse == 0:
                lowest, best[:] = event.loss, parameters.data
            elif n_worse == patience:
                trainer.stop()

    trainer.run(report, progress=False)
    parameters.data[:] = best
    return {name: arrays.read(t) for name, t in parameters.tensors.items()}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="+", type=Path, help="UTF-8 text files")
    parser.add_argument("-o", "--output", required=True, type=Path)
    parser.add_argument("--type", default="Q8_0", help="file type of the result: Q8_0, Q4_K_M, ...")
    sizes = {"vocab": 1024, "width": 256, "layers": 3, "ff": 640, "head": 64, "ctx": 128}
    run = {"batch": 8, "steps": 1200, "patience": 3, "seed": 0, "lr": 2e-3, "decay": 0.1}
    for name, default in (sizes | run).items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{default}")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in args.text)
    cut = round(len(text) * (1 - HELD_OUT))
    vocabulary = train_vocabulary(text[:cut], args.vocab)
    encode = tokenizer.from_metadata(vocabulary).encode
    corpus = lora.Corpus(
        windows(encode(text[:cut]), args.ctx, args.ctx // SHIFTS),
        windows(encode(text[cut:]), args.ctx, args.ctx),
    )
    run = {"batch": args.batch, "max_steps": args.steps}
    rate = {"lr": args.lr, "lr_min": args.lr / 20, "warmup_steps": args.steps // 20}
    adam = {"weight_decay": args.decay, "beta2": 0.98, "seed": args.seed}
    config = lora.TrainConfig(**run, **rate, **adam, val_every=100, val_windows=1000)
    metadata = hyperparameters(args) | vocabulary
    start = random_weights(metadata, len(vocabulary["tokenizer.ggml.tokens"]), args.seed)
    with TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.gguf"
        write(whole, metadata, start)
        write(whole, metadata, train(whole, corpus, config, args.patience))
        requantize(whole, args.output, args.type)


if __name__ == "__main__":
    main()
