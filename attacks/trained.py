"""Mutated models that train: those that load take a step and write a text, or say why not.

python -m attacks.trained --loads 10000        until so many have loaded

A small model of each of some architectures is changed: bytes of its weights, its metadata, or both.
One that loads is given an adapter, trained for a step and asked for tokens. It may refuse by a
sentence. Another exception fails it, and so do a loss, an adapter or a logit that are no numbers,
more than ten seconds and 400 MB. The input under way lies in `failures/under-way.gguf`, also after
a crash.
"""

import argparse
import faulthandler
import random
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

import pyggml
from attacks.mutate import mutate
from attacks.targets.target import GGUF_WORDS, gguf_bytes
from pyggml import gguf
from pyggml.errors import PyggmlError
from pyggml.generation import Sampling, Session
from pyggml.generation.sampler import sample
from pyggml.lora import LoraConfig, TrainConfig, Trainer, attach
from pyggml.lora.data import Corpus, Dataset
from pyggml.model import Model
from pyggml.models import ARCHITECTURES, draw, small_metadata, tensors_of

MODELS = ("llama", "qwen3moe", "gemma3", "mamba2", "gpt2", "falcon-h1", "rwkv7", "deepseek")
MOST_SECONDS, MOST_MORE = 10.0, 400 << 20
_SIZES = {"embedding_length": 32, "feed_forward_length": 32, "block_count": 1}
_N_VOCAB, _CTX = 24, 8


def model_bytes(architecture: str) -> bytes:
    """The file of a small model with numbers as large as in trained ones."""
    example = ARCHITECTURES[architecture].example
    sizes = {k: v for k, v in _SIZES.items() if k not in example}
    if any(isinstance(value, np.ndarray) for value in example.values()):
        del sizes["block_count"]  # arrays of the example hold a number for each block
    metadata = small_metadata(ARCHITECTURES[architecture], sizes)
    rng = np.random.default_rng(0)
    specs = {n: s for n, s in tensors_of(metadata, _N_VOCAB).items() if not s.optional}
    arrays = {n: draw(n, s.shape, rng) * np.float32(s.shape[-1] ** -0.5) for n, s in specs.items()}
    return gguf_bytes(metadata, arrays)


def change(rng: random.Random, whole: bytes, head: int) -> bytes:
    """The file after some changes: of all of it, of its metadata, or of bytes of its weights."""
    kind = rng.randrange(4)
    if kind == 0:
        return mutate(rng, [whole], GGUF_WORDS, 2 * len(whole))
    data = bytearray(whole)
    for _ in range(rng.randint(1, 8)):
        start, end = (24, head) if kind == 1 else (head, len(data))
        at = rng.randrange(start, end)
        if kind == 3:  # a float of a weight: its exponent
            at = head + (at - head) // 4 * 4 + 3
        data[min(at, len(data) - 1)] = rng.choice((0, 1, 0x3F, 0x7F, 0xFF, rng.randrange(256)))
    return bytes(data)


def corpus(n_vocab: int) -> Corpus:
    """Three windows of a text of its first tokens; one is held out."""
    tokens = np.arange(3 * (_CTX + 1), dtype=np.int32).reshape(3, -1) % min(n_vocab, _N_VOCAB)
    windows = Dataset(tokens, np.zeros_like(tokens))
    return Corpus(windows.part(slice(2)), windows.part(slice(2, None)))


def use(model: Model) -> None:
    """Train a step, and take tokens of the base and of the adapter.

    Raises AssertionError for numbers that are none.
    """
    adapter = attach(model, LoraConfig(rank=2))
    config = TrainConfig(max_steps=1, warmup_steps=0, threads=1)
    trainer = Trainer(adapter.model, adapter.parameters, corpus(model.config.n_vocab), config)
    trainer.run(progress=False)
    losses = [*trainer.history.losses, *(v.loss for v in trainer.history.validations)]
    assert np.isfinite(losses).all(), f"the losses are {losses}"
    assert np.isfinite(adapter.parameters.data).all(), "the adapter holds no numbers"
    for one in (model, adapter.model):
        session = Session(one, 6)
        token = sample(session.feed([1, 2]), Sampling(), np.random.default_rng(0))
        tokens = [token, *islice(session.greedy([token]), 2)]
        assert all(0 <= t < one.config.n_vocab for t in tokens), f"the tokens are {tokens}"


@dataclass
class Tally:
    """What became of the inputs: those that did not load, how those that did ended, failures."""

    n_refused: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    failures: dict[str, bytes] = field(default_factory=dict)
    slowest: float = 0.0

    @property
    def n_loaded(self) -> int:
        return self.ends.total()


def check(data: bytes, path: Path, tally: Tally, use: Callable[[Model], None] = use) -> None:
    """Load one input and use it, and count what it did."""
    path.write_bytes(data)
    try:
        model = pyggml.load(path)
    except PyggmlError:
        tally.n_refused += 1
        return
    peak, start = _peak_bytes(), time.process_time()
    try:
        use(model)
        tally.ends["trained"] += 1
    except PyggmlError as error:
        tally.ends["refused to train"] += 1
        if not str(error) or "\n" in str(error).strip():
            tally.failures[f"no sentence: {error}"] = data
    except Exception:  # whatever it is, it is a failure
        tally.ends["failed"] += 1
        tally.failures[traceback.format_exc(limit=-3)] = data
    seconds, more = time.process_time() - start, _peak_bytes() - peak
    tally.slowest = max(tally.slowest, seconds)
    if seconds > MOST_SECONDS or more > MOST_MORE:
        tally.failures[f"took {seconds:.1f} s and {more >> 20} MiB"] = data


def _peak_bytes() -> int:
    n = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return n if sys.platform == "darwin" else n << 10


def attack(names: list[str], n_loads: int, seed: int, folder: Path) -> Tally:
    """Use changed models in turn, until so many have loaded or ten kinds of failures were met."""
    tally, rng, path = Tally(), random.Random(seed), folder / "under-way.gguf"
    wholes = [model_bytes(name) for name in names]
    heads = []
    for whole in wholes:
        check(whole, path, Tally())  # compiles what it needs
        with gguf.open(path) as file:
            heads.append(len(whole) - sum(t.n_bytes for t in file.tensors.values()))
    i = 0
    while tally.n_loaded < n_loads and len(tally.failures) < 10:
        at = i % len(names)
        check(change(rng, wholes[at], heads[at]), path, tally)
        i += 1
        if i % 500 == 0:
            print(f"{i} inputs, {dict(tally.ends)}, {len(tally.failures)} failures", flush=True)
    return tally


def main() -> int:
    """The exit code: 1 if an input failed."""
    parser = argparse.ArgumentParser(prog="attacks.trained", description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], help="none: all")
    parser.add_argument("--loads", type=int, default=10_000, help="models that load")
    parser.add_argument("--seed", type=int, default=0, help="of the changes")
    given = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    folder = Path("failures")
    folder.mkdir(exist_ok=True)
    tally = attack(given.models or list(MODELS), given.loads, given.seed, folder)
    print(
        f"{tally.n_loaded:,} loaded ({dict(tally.ends)}), {tally.n_refused:,} refused, "
        f"{len(tally.failures)} failures, slowest {tally.slowest:.2f} s"
    )
    for i, (what, data) in enumerate(tally.failures.items()):
        path = folder / f"trained-{given.seed}-{i}.gguf"
        path.write_bytes(data)
        print(f"{path}:\n{what}")
    (folder / "under-way.gguf").unlink(missing_ok=True)
    return bool(tally.failures)


if __name__ == "__main__":
    sys.exit(main())
