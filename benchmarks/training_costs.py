"""The cost of masks, packing, streaming, metrics and objectives: training steps with and without.

usage: training_costs.py MODEL.gguf [--tokens 512] [--rounds 7] [--compute auto|int8|bf16|f32]
                         [--teacher MODEL]

plain       windows in memory, each one document of which every token is learned; nothing recorded
masks       the same windows with a mask, which lets every token be learned
packing     four documents to a window
streaming   the windows of `plain` from a file on disk, as those of large texts are
metrics     `plain`, with adapter.metrics.jsonl written, and the gradient's length block by block

sft         one step after the other of a run of its own, whose windows are those of `plain`
distill     the same, and a teacher (by default the model itself) reads the windows
gkd         four answers to a prompt, of as many tokens in all, are sampled; the teacher reads them
grpo        they are sampled and rewarded by their length

Prints a JSON line for each. `ratio` is the median over the rounds of a step's time to that of the
plain step of its round, whose order is random. Steps of one kind differ by more than 1 %, so `host`
is measured too: the seconds of a step in which a batch is made and a report recorded, the median of
many. `host_cost` is what of it is above plain, as a share of the plain step. Of objectives `ratio`
is that of the medians to sft's, `learned` the tokens of a step that are learned, which an answer
that ends early lessens, and `bytes` those of graphs, adapter and moments. `gkd` and `grpo` need a
model with a vocabulary, and are left out with a line otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import pyggml
from pyggml.errors import TokenizerError
from pyggml.lora import (
    Corpus,
    Dataset,
    LoraConfig,
    Report,
    StepReport,
    TrainConfig,
    Trainer,
    attach,
)
from pyggml.lora.data import PromptRow, RowPlace
from pyggml.lora.data.prompts import Prompts
from pyggml.lora.objectives.distill import Distill
from pyggml.lora.objectives.gkd import GKD
from pyggml.lora.objectives.grpo import GRPO
from pyggml.lora.objectives.objective import Objective
from pyggml.lora.objectives.sft import SFT
from pyggml.lora.record import Recorder
from pyggml.model import COMPUTE_TYPES, Model

from machine import about

N_WINDOWS = 4096
N_DOCUMENTS = 4  # of a packed window
REPEATS = 50  # of what only the host does
N_ANSWERS, N_PROMPT = 4, 8  # answers to a prompt, and its tokens


def windows(n_tokens: int, n_vocab: int) -> dict[str, Dataset]:
    """The same random tokens as each kind of windows."""
    shape = (N_WINDOWS, n_tokens + 1)
    tokens = np.random.default_rng(0).integers(0, n_vocab, shape, np.int32)
    plain = Dataset(tokens, np.zeros(shape, np.int32))
    several = np.broadcast_to(np.arange(n_tokens + 1) * N_DOCUMENTS // (n_tokens + 1), shape)
    return {
        "plain": plain,
        "masks": replace(plain, trained=np.ones(shape, np.bool_)),
        "packing": Dataset(tokens, several.astype(np.int32)),
        "streaming": Dataset(on_disk(tokens), on_disk(plain.documents)),
        "metrics": plain,
    }


def on_disk(values: np.ndarray) -> np.ndarray:
    with tempfile.TemporaryFile() as file:
        values.tofile(file)
        file.flush()
        return np.memmap(file, values.dtype, "r", shape=values.shape).view(np.ndarray)


def steps(trainer: Trainer, data: dict[str, Dataset], recorder: Recorder) -> list[dict[str, float]]:
    """Seconds of a step of each kind, round by round; the first round may compile."""
    n, rng = trainer.n_steps // len(data), np.random.default_rng(2)
    names = [str(name) for _ in range(n) for name in rng.permutation(list(data))]
    rounds = [dict[str, float]() for _ in range(n)]
    trainer.corpus = Corpus(data[names[0]], None)

    def report(event: Report) -> None:
        assert isinstance(event, StepReport)
        began, name = perf_counter(), names[event.step - 1]
        if name == "metrics":
            recorder(event)
        rounds[(event.step - 1) // len(data)][name] = event.seconds + perf_counter() - began
        trainer.corpus = Corpus(data[names[event.step % len(names)]], None)

    trainer.run(report, progress=False)
    return rounds[1:]


def host(name: str, data: Dataset, recorder: Recorder) -> float:
    """Seconds of a step in which its batch is made and, with metrics, its report recorded."""
    taken = []
    for i in np.random.default_rng(1).integers(0, N_WINDOWS, REPEATS):
        began = perf_counter()
        list(data.batches([i], 1))
        n_tokens = data.n_targets([i])
        if name == "metrics":
            recorder(StepReport(2, 1000, 0, 1.0, 1e-4, 1.0, n_tokens, 1.0))
        taken.append(perf_counter() - began)
    return median(taken)


def prompts(n_tokens: int, n_vocab: int) -> Prompts:
    """Random prompts, as many as there are windows."""
    shape = (N_WINDOWS, n_tokens + 1)
    tokens = np.random.default_rng(0).integers(0, n_vocab, shape, np.int32)
    documents = np.full(shape, -1, np.int32)
    documents[:, :N_PROMPT] = np.arange(N_WINDOWS)[:, None]
    rows = np.empty(N_WINDOWS, object)
    rows[:] = [PromptRow(RowPlace("random", "row", 1 + i), str(i)) for i in range(N_WINDOWS)]
    return Prompts(tokens, documents, rows=rows)


def objectives(teacher: str, n_tokens: int) -> dict[str, Objective]:
    sampled = {"answers": N_ANSWERS, "answer_tokens": n_tokens // N_ANSWERS - N_PROMPT}
    return {
        "sft": SFT(),
        "distill": Distill(teacher=teacher),
        "gkd": GKD(teacher=teacher, **sampled),
        "grpo": GRPO(reward=(len_of,), **sampled),
    }


def len_of(completion: str) -> float:
    return float(len(completion))


def objective_costs(
    model: Model, options: argparse.Namespace, plain: Dataset
) -> Iterator[dict[str, object]]:
    """The rows of objectives, each measured by a run of its own."""
    usual = 0.0
    of_prompts = prompts(options.tokens, model.config.n_vocab)
    for name, objective in objectives(options.teacher or options.model, options.tokens).items():
        adapter = attach(model, LoraConfig(rank=8, alpha=16.0))
        corpus = Corpus(of_prompts if objective.rows == "prompts" else plain, None)
        config = TrainConfig(max_steps=1 + options.rounds, compute=options.compute)
        trainer = Trainer(
            adapter.model, adapter.parameters, corpus, config, objective, reference=model
        )
        reports = list[StepReport]()
        try:
            memory = trainer.reserve()
            trainer.run(
                lambda e, to=reports: to.append(e) if isinstance(e, StepReport) else None,
                progress=False,
            )
        except TokenizerError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        taken = median(report.seconds for report in reports[1:])  # the first may compile
        usual = usual or taken
        yield {
            "kind": name,
            "seconds": round(taken, 4),
            "ratio": round(taken / usual, 4),
            "learned": round(median(report.n_tokens for report in reports[1:])),
            "bytes": memory.arena + memory.parameters,
        }


def options_of_a_run() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compute", choices=COMPUTE_TYPES, default="auto")
    parser.add_argument("--teacher", help="of distill and gkd; by default the model")
    return parser.parse_args()


def main() -> None:
    options = options_of_a_run()
    model = pyggml.load(options.model, compute=options.compute)
    adapter = attach(model, LoraConfig(rank=8, alpha=16.0))
    data = windows(options.tokens, model.config.n_vocab)
    config = TrainConfig(max_steps=len(data) * (1 + options.rounds), compute=options.compute)
    corpus = Corpus(data["plain"], None)
    trainer = Trainer(adapter.model, adapter.parameters, corpus, config)
    with (
        tempfile.TemporaryDirectory() as folder,
        Recorder(trainer, Path(folder, "adapter.gguf")) as recorder,
    ):
        rounds = steps(trainer, data, recorder)
        on_host = {name: host(name, each, recorder) for name, each in data.items()}
    plain = median(taken["plain"] for taken in rounds)
    common = {
        "benchmark": "training_costs",
        "model": Path(options.model).name,
        "compute": model.backend.compute,
        "tokens": options.tokens,
        "rounds": options.rounds,
    }
    for name in data:
        result = {
            **common,
            "kind": name,
            "seconds": round(median(taken[name] for taken in rounds), 4),
            "ratio": round(median(taken[name] / taken["plain"] for taken in rounds), 4),
            "host": round(on_host[name], 6),
            "host_cost": round((on_host[name] - on_host["plain"]) / plain, 6),
            **about("pyggml", "numba", "numpy"),
        }
        print(json.dumps(result))
    trainer.free()
    for row in objective_costs(model, options, data["plain"]):
        print(json.dumps({**common, **row, **about("pyggml", "numba", "numpy")}))


if __name__ == "__main__":
    main()
