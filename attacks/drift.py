"""Drift: long training on every path. Each ends as near to its text as float32 does.

python -m attacks.drift                          every architecture, 2,000 steps by each compute
python -m attacks.drift llama mamba --steps 500  some of them

A small model of each architecture, its matrices in Q8_0, learns the characters of the demo's text
with an adapter, by "f32", "bf16" and "int8". The validation losses at the end may differ from
float32's by 0.2 %. A line of each run goes to `--results`; runs that have theirs are not run again.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from functools import cache
from pathlib import Path
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


def write_model(path: Path, architecture: str) -> Path:
    """A small model with numbers as large as in trained ones, its matrices in Q8_0."""
    example = ARCHITECTURES[architecture].example
    sizes = {k: v for k, v in _SIZES.items() if k not in example}
    metadata = small_metadata(ARCHITECTURES[architecture], sizes)
    specs = tensors_of(metadata, _N_VOCAB)
    tensors = []
    for name, spec in specs.items():
        if not spec.optional or name == "output.weight":
            tensors.append(_tensor(name, spec.shape))
    gguf.write(path, metadata, tensors)
    return path


def _tensor(name: str, shape: tuple[int, ...]) -> tuple[str, DType, tuple[int, ...], np.ndarray]:
    x = draw(name, shape, np.random.default_rng(crc32(name.encode())))
    x = 1 + x / 10 if "norm" in name else x * np.float32(shape[-1] ** -0.5)
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
    trainer.run()
    first, *_, last = trainer.history.validations
    ms = (time.process_time() - start) / n_steps * 1e3
    return {"before": first.loss, "after": last.loss, "ms": round(ms, 2)}


def run_all(names: list[str], n_steps: int, results: Path, seed: int = 0) -> None:
    """Train what the file of results lacks, and add a line of each."""
    made = read_results(results)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            path = write_model(Path(folder) / "model.gguf", name)
            for compute in COMPUTES:
                if compute in made.get(name, {}):
                    continue
                try:
                    outcome: dict[str, object] = dict(train(path, compute, n_steps, seed))
                except Exception as e:  # whatever it is, it is a fault of this run
                    outcome = {"fault": f"{type(e).__name__}: {e}"}
                about = {"model": name, "compute": compute, "steps": n_steps, "seed": seed}
                with results.open("a") as file:
                    file.write(json.dumps(about | outcome) + "\n")


def read_results(path: Path) -> dict[str, dict[str, dict[str, object]]]:
    """What each model's run by each compute came to."""
    made: dict[str, dict[str, dict[str, object]]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        run = json.loads(line)
        made.setdefault(run["model"], {})[run["compute"]] = run
    return made


def faults(runs: dict[str, dict[str, object]]) -> list[str]:
    """What is wrong with a model's runs."""
    wrong = [f"{c}: {run['fault']}" for c, run in runs.items() if "fault" in run]
    losses = {c: float(str(run["after"])) for c, run in runs.items() if "after" in run}
    for compute, loss in losses.items():
        away = loss / losses.get("f32", loss) - 1
        if abs(away) > MOST:
            wrong.append(f"{compute} ends {100 * away:+.2f} % from float32")
    if "f32" in losses and losses["f32"] > 0.95 * float(str(runs["f32"]["before"])):
        wrong.append("nothing is learned")
    return wrong


def main() -> int:
    """The exit code: 1 if a path drifts."""
    parser = argparse.ArgumentParser(prog="attacks.drift", description=__doc__.partition("\n")[0])
    names = list(ARCHITECTURES)
    parser.add_argument("architectures", nargs="*", choices=[[], *names], help="none: all")
    parser.add_argument("--steps", type=int, default=2000, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the adapter and the order")
    parser.add_argument("--results", type=Path, default=Path("drift.jsonl"), help="a line of each")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    run_all(given.architectures or names, given.steps, given.results, given.seed)
    n_faults = 0
    for name, runs in read_results(given.results).items():
        losses = ", ".join(f"{c} {runs[c].get('after', 'none')}" for c in COMPUTES if c in runs)
        wrong = faults(runs)
        n_faults += len(wrong)
        print(f"{name:15} {losses} {'; '.join(wrong)}", flush=True)
    return bool(n_faults)


if __name__ == "__main__":
    sys.exit(main())
