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
classify    eight texts to a window, whose labels are learned
embed       eight texts to a window, in pairs
heal        as distill, and the scales of the blocks are trained in the place of an adapter

Prints a JSON line for each. `ratio` is the median over the rounds of a step's time to that of the
plain step of its round, whose order is random. Steps of one kind differ by more than 1 %, so `host`
is measured too: the seconds of a step in which a batch is made and a report recorded, the median of
many. `host_cost` is what of it is above plain, as a share of the plain step. Of objectives `ratio`
is that of the medians to sft's, `learned` the tokens of a step that are learned, which an answer
that ends early lessens, and `bytes` those of graphs, adapter and moments. `gkd` and `grpo` need a
model with a vocabulary, and `heal` one that is quantised: they are left out with a line otherwise.
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
from pyggml.errors import AdapterError, TokenizerError
from pyggml.lora import (
    Corpus,
    Dataset,
    LoraConfig,
    Report,
    RunMemory,
    StepReport,
    TrainConfig,
    Trainer,
    attach,
    train_scales,
)
from pyggml.lora.data import PromptRow, RowPlace
from pyggml.lora.data.groups import ANCHOR, POSITIVE
from pyggml.lora.data.labels import Labels
from pyggml.lora.data.prompts import Prompts
from pyggml.lora.data.windows.batches import READS
from pyggml.lora.objectives.classify import Classify
from pyggml.lora.objectives.distill import Distill
from pyggml.lora.objectives.embed import Embed
from pyggml.lora.objectives.gkd import GKD
from pyggml.lora.objectives.grpo import GRPO
from pyggml.lora.objectives.objective import Objective
from pyggml.lora.objectives.sft import SFT
from pyggml.lora.record import Recorder
from pyggml.model import COMPUTE_TYPES, Model
from pyggml.models.stack import LABELS

from machine import about

N_WINDOWS = 4096
N_DOCUMENTS = 4  # of a packed window
REPEATS = 50  # of what only the host does
N_ANSWERS, N_PROMPT = 4, 8  # answers to a prompt, and its tokens
N_TEXTS = 8  # of a window, where texts have labels or belong together
Run = tuple[Objective, Corpus]


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


def texts(plain: Dataset, last: tuple[int, ...], learned: tuple[int, ...]) -> Dataset:
    """N_TEXTS in each window, which end in these tokens in turn; `learned` are those of them that
    are."""
    n = plain.tokens.shape[1]
    documents = np.arange(n, dtype=np.int32) * N_TEXTS // n
    ends = np.flatnonzero(np.diff(documents, append=-1))
    tokens, trained = plain.tokens.copy(), np.zeros(plain.tokens.shape, np.bool_)
    tokens[:, ends] = np.resize(last, N_TEXTS)
    trained[:, ends] = np.isin(tokens[:, ends], learned)
    return Dataset(tokens, np.broadcast_to(documents, tokens.shape), trained)


def objectives(options: argparse.Namespace, plain: Dataset, n_vocab: int) -> dict[str, Run]:
    """Each with what it reads; `heal` trains scales."""
    n_tokens, teacher = options.tokens, options.teacher or options.model
    sampled = {"answers": N_ANSWERS, "answer_tokens": n_tokens // N_ANSWERS - N_PROMPT}
    text, asked = Corpus(plain, None), Corpus(prompts(n_tokens, n_vocab), None)
    labels = Labels({"first": 3, "second": 4, "third": 5})
    last = tuple(labels.tokens.values())
    labelled = Corpus(texts(plain, last, last), None, about={LABELS: labels.text()})
    pairs = texts(plain, (ANCHOR, POSITIVE), (ANCHOR,))
    return {
        "sft": (SFT(), text),
        "distill": (Distill(teacher=teacher), text),
        "gkd": (GKD(teacher=teacher, **sampled), asked),
        "grpo": (GRPO(reward=(len_of,), **sampled), asked),
        "classify": (Classify(), labelled),
        "embed": (Embed(), Corpus(pairs, None, about={READS: Embed.rows})),
        "heal": (Distill(teacher=teacher), text),
    }


def len_of(completion: str) -> float:
    return float(len(completion))


def objective_costs(
    model: Model, options: argparse.Namespace, plain: Dataset
) -> Iterator[dict[str, object]]:
    """The rows of objectives, each measured by a run of its own."""
    usual = 0.0
    for name, run in objectives(options, plain, model.config.n_vocab).items():
        reports = list[StepReport]()
        try:
            memory = measure(name, model, options, run, reports)
        except (TokenizerError, AdapterError) as error:
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


def measure(
    name: str, model: Model, options: argparse.Namespace, run: Run, reports: list[StepReport]
) -> RunMemory:
    """Train some steps, which are reported; the memory of the run."""
    objective, corpus = run
    is_lora = name != "heal"
    trained = attach(model, LoraConfig(rank=8, alpha=16.0)) if is_lora else train_scales(model)
    config = TrainConfig(max_steps=1 + options.rounds, compute=options.compute)
    parts = (trained.model, trained.parameters, corpus, config, objective)
    trainer = Trainer(*parts, reference=model)
    memory = trainer.reserve()
    trainer.run(lambda e: reports.append(e) if isinstance(e, StepReport) else None, progress=False)
    return memory


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
