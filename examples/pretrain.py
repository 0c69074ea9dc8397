"""A small language model from nothing but text, trained by this engine: how the demo's was made.

    text → byte-level BPE vocabulary → random weights → AdamW on all of them → quantised GGUF

`pyggml tokenizer`, `pyggml new` and `pyggml-finetune --train full` do the same; this is what they
call, and windows that overlap, for a text that is short.

usage: python examples/pretrain.py TEXT [TEXT ...] -o base.gguf [--steps 1200] [--layers 3] ...
       python examples/pretrain.py --help

The last twentieth of the text is held out, and the file gets the weights that did best on it. The
defaults are those of cli/demo/base.gguf, made from 400 kB of public-domain stories.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from pyggml import fresh, load, lora, tokenizer
from pyggml.requantize import requantize

ARCHITECTURE = "qwen3"
HELD_OUT = 0.05
SHIFTS = 4  # windows start every ctx / SHIFTS tokens: an epoch shows each token in so many places


def write_fresh(path: Path, args: argparse.Namespace, vocabulary: dict[str, Any]) -> None:
    """A model of Qwen 3's shape and random weights, with half as many key heads as query heads."""
    n_head, n_vocab = args.width // args.head, len(vocabulary["tokenizer.ggml.tokens"])
    keys = {
        "embedding_length": args.width,
        "block_count": args.layers,
        "feed_forward_length": args.ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": max(n_head // 2, 1),
        "attention.key_length": args.head,
        "attention.value_length": args.head,
    }
    own = {f"{ARCHITECTURE}.{key}": value for key, value in keys.items()}
    metadata = fresh.hyperparameters(ARCHITECTURE, 10**6, n_vocab, 4 * args.ctx, keys=own)
    named = metadata | {"general.name": "pyggml demo base"}
    fresh.write(path, fresh.Fresh(named, n_vocab, vocabulary), seed=args.seed)


def windows(ids: Sequence[int], ctx: int, step: int) -> lora.Dataset:
    """Every window of ctx + 1 tokens that starts at a multiple of `step`."""
    views = np.lib.stride_tricks.sliding_window_view(np.array(ids, np.int32), ctx + 1)[::step]
    return lora.Dataset(views, np.zeros_like(views))


def train(source: Path, target: Path, corpus: lora.Corpus, config: lora.TrainConfig) -> None:
    """Train all tensors of a file; `target` gets the weights that did best on the held-out text."""
    trained = lora.train_tensors(load(source), ["*"])
    trainer = lora.Trainer(trained.model, trained.parameters, corpus, config)
    n_trained = trained.parameters.n_trained
    print(f"{n_trained:,} weights, {len(corpus.train)} windows, {trainer.n_steps} steps")

    def report(event: lora.Report) -> None:
        if isinstance(event, lora.StepReport) and event.step % 10 == 0:
            print(f"step {event.step:5}  loss {event.loss:.3f}  {event.seconds:.3f} s", flush=True)
        if isinstance(event, lora.ValidationReport):
            print(f"step {event.step:5}  held-out loss {event.loss:.4f}")

    trainer.run(report, progress=False)
    trained.save(target)


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
    vocabulary = fresh.vocabulary_fields([text[:cut]], args.vocab)
    encode = tokenizer.from_metadata(vocabulary).encode
    corpus = lora.Corpus(
        windows(encode(text[:cut]), args.ctx, args.ctx // SHIFTS),
        windows(encode(text[cut:]), args.ctx, args.ctx),
    )
    run = {"batch": args.batch, "max_steps": args.steps}
    rate = {"lr": args.lr, "lr_min": args.lr / 20, "warmup_steps": args.steps // 20}
    adam = {"weight_decay": args.decay, "beta2": 0.98, "seed": args.seed}
    ends = {"val_every": 100, "val_windows": 1000, "keep_best": True, "patience": args.patience}
    config = lora.TrainConfig(**run, **rate, **adam, **ends)
    with TemporaryDirectory() as folder:
        first, best = Path(folder) / "fresh.gguf", Path(folder) / "trained.gguf"
        write_fresh(first, args, vocabulary)
        train(first, best, corpus, config)
        requantize(best, args.output, args.type)


if __name__ == "__main__":
    main()
