"""Drift: long training on every path. Each ends as near to its text as float32 does.

python -m attacks.drift                          every architecture, 2,000 steps by each compute
python -m attacks.drift llama mamba --steps 500  some of them

A small model of each architecture, its matrices in Q8_0, learns the characters of the demo's text
with an adapter, by "f32", "bf16" and "int8". The validation losses at the end may differ from
float32's by 0.2 %. Rounding alone moves a sensitive model further: one that is further away is
trained by other seeds, too, and the mean over all seeds may differ by 0.2 %. A line of each run
goes to `--results`; runs that have theirs are not run again.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any
from zlib import crc32

import numpy as np

import pyggml
from pyggml import gguf
from pyggml.cli import demo
from pyggml.graph.dtypes import DTYPES, F32, DType
from pyggml.lora import LoraConfig, TrainConfig, Trainer, attach
from pyggml.lora.data import Corpus, Dataset
from pyggml.models import ARCHITECTURES, draw, small_metadata, tensors_of
from pyggml.quants import quantize

COMPUTES = ("f32", "bf16", "int8")
MOST = 0.002  # of float32's loss
_SIZES = {"embedding_length": 64, "feed_forward_length": 64}
_CTX, _N_VOCAB, _N_HELD_OUT = 32, 64, 512
_Q8_0 = DTYPES["Q8_0"]
_UNDIVIDED = {"gemma3n", "gemma4"}  # scores are q·k, not q·k / √size: training makes q short


def write_model(path: Path, architecture: str) -> Path:
    """A small model with numbers as large as in trained ones, its matrices in Q8_0."""
    example = ARCHITECTURES[architecture].example
    sizes = {k: v for k, v in _SIZES.items() if k not in example}
    metadata = small_metadata(ARCHITECTURES[architecture], sizes)
    specs = tensors_of(metadata, _N_VOCAB)
    tensors = []
    for name, spec in specs.items():
        if not spec.optional or name == "output.weight":
            is_long = architecture in _UNDIVIDED and "attn_q_norm" in name
            tensors.append(_tensor(name, spec.shape, spec.shape[-1] ** -0.5 if is_long else 1.0))
    gguf.write(path, metadata, tensors)
    return path


def _tensor(
    name: str, shape: tuple[int, ...], factor: float
) -> tuple[str, DType, tuple[int, ...], np.ndarray]:
    x = draw(name, shape, np.random.default_rng(crc32(name.encode())))
    x = 1 + x / 10 if "norm" in name else x * np.float32(shape[-1] ** -0.5)
    x = x * np.float32(factor)
    is_matrix = len(shape) > 1 and shape[-1] % 32 == 0 and name.endswith(".weight")
    if not is_matrix:
        return name, F32, shape, x
    return name, _Q8_0, shape, quantize(x, "Q8_0").view(_Q8_0.numpy)


@cache
def corpus() -> Corpus:
    """The demo's text as numbers of its most frequent characters; its last windows are held out."""
    text = np.frombuffer(demo.TEXT.read_bytes(), np.uint8)
    counts = np.bincount(text, minlength=256)
    ids = np.full(256, _N_VOCAB - 1, np.int32)
    ids[np.argsort(-counts, kind="stable")[: _N_VOCAB - 1]] = np.arange(_N_VOCAB - 1)
    tokens = ids[text][: len(text) // (_CTX + 1) * (_CTX + 1)].reshape(-1, _CTX + 1)
    windows = Dataset(tokens, np.zeros_like(tokens))
    cut = len(tokens) - _N_HELD_OUT
    return Corpus(windows.part(slice(cut)), windows.part(slice(cut, None)))


def train(path: Path, compute: str, n_steps: int, seed: int) -> dict[str, float]:
    """The validation losses before and after, and the milliseconds of a step."""
    adapter = attach(pyggml.load(path, compute=compute), LoraConfig(rank=4, seed=seed))
    config = TrainConfig(
        max_steps=n_steps,
        epochs=100,
        batch=4,
        lr=5e-4,
        val_every=0,
        val_windows=_N_HELD_OUT,
        threads=1,
        seed=seed,
    )
    trainer = Trainer(adapter.model, adapter.parameters, corpus(), config)
    start = time.process_time()
    trainer.run(progress=False)
    first, *_, last = trainer.history.validations
    ms = (time.process_time() - start) / n_steps * 1e3
    return {"before": first.loss, "after": last.loss, "ms": round(ms, 2)}


Runs = dict[tuple[str, int], dict[str, Any]]  # of a model: (compute, seed) -> what it came to


def run_all(names: list[str], n_steps: int, results: Path, n_seeds: int = 8) -> None:
    """Train what the file of results lacks, and add a line of each."""
    made = read_results(results)
    for name in names:
        runs = made.setdefault(name, {})
        with tempfile.TemporaryDirectory() as folder:
            path = write_model(Path(folder) / "model.gguf", name)
            for seed in range(n_seeds):
                if seed and not any(abs(away(runs, c, 0) or 0) > MOST for c in COMPUTES):
                    break
                for compute in COMPUTES:
                    if (compute, seed) not in runs:
                        run = train_or_fault(path, compute, n_steps, seed)
                        runs[compute, seed] = run
                        about = {"model": name, "compute": compute, "steps": n_steps, "seed": seed}
                        with results.open("a") as file:
                            file.write(json.dumps(about | run) + "\n")


def train_or_fault(path: Path, compute: str, n_steps: int, seed: int) -> dict[str, Any]:
    """What `train` gives, or the fault that ended it."""
    try:
        return dict(train(path, compute, n_steps, seed))
    except Exception as e:  # whatever it is, it is a fault of this run
        return {"fault": f"{type(e).__name__}: {e}"}


def read_results(path: Path) -> dict[str, Runs]:
    """The runs of each model."""
    made: dict[str, Runs] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        run = json.loads(line)
        made.setdefault(run["model"], {})[run["compute"], run["seed"]] = run
    return made


def away(runs: Runs, compute: str, seed: int) -> float | None:
    """How far a run ends from float32's of its seed, as a share; None where either has no end."""
    ends = [runs.get((c, seed), {}).get("after") for c in (compute, "f32")]
    return None if None in ends else ends[0] / ends[1] - 1


def mean_away(runs: Runs, compute: str) -> tuple[float, int]:
    """The mean over all seeds, and their number."""
    shares = [x for seed in {s for _, s in runs} if (x := away(runs, compute, seed)) is not None]
    return (mean(shares) if shares else 0.0), len(shares)


def faults(runs: Runs) -> list[str]:
    """What is wrong with a model's runs."""
    wrong = [f"{c}, seed {s}: {run['fault']}" for (c, s), run in runs.items() if "fault" in run]
    for compute in COMPUTES:
        share, n_seeds = mean_away(runs, compute)
        if abs(share) > MOST:
            over = f", the mean of {n_seeds} seeds" if n_seeds > 1 else ""
            wrong.append(f"{compute} ends {100 * share:+.2f} % from float32{over}")
    for (compute, _), run in runs.items():
        if compute == "f32" and "after" in run and run["after"] > 0.95 * run["before"]:
            wrong.append("nothing is learned")
    return wrong


def main() -> int:
    """The exit code: 1 if a path drifts."""
    parser = argparse.ArgumentParser(prog="attacks.drift", description=__doc__.partition("\n")[0])
    names = list(ARCHITECTURES)
    parser.add_argument("architectures", nargs="*", choices=[[], *names], help="none: all")
    parser.add_argument("--steps", type=int, default=2000, help="of each run")
    parser.add_argument("--seeds", type=int, default=8, help="at most, of a sensitive model")
    parser.add_argument("--results", type=Path, default=Path("drift.jsonl"), help="a line of each")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    run_all(given.architectures or names, given.steps, given.results, given.seeds)
    n_faults = 0
    for name, runs in read_results(given.results).items():
        ends = [f"{c} {run['after']:.4f}" for (c, _), run in runs.items() if "after" in run]
        wrong = faults(runs)
        n_faults += len(wrong)
        print(f"{name:15} {', '.join(ends)} {'; '.join(wrong)}", flush=True)
    return bool(n_faults)


if __name__ == "__main__":
    sys.exit(main())
