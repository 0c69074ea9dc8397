"""`pyggml warmup`: a tiny random model of every architecture and type takes one step of training
and writes one token, so that every kernel that these need lies compiled on the disk.
"""

import tempfile
from math import prod
from pathlib import Path
from time import perf_counter

import numpy as np

import pyggml.threads
from pyggml import gguf, load
from pyggml.cli.terminal.help import grouped_command
from pyggml.cli.terminal.options import threads_option
from pyggml.cli.terminal.show import progress_lines, say, span
from pyggml.generation import Sampler, Sampling, Session
from pyggml.graph.dtypes import F32
from pyggml.lora import Corpus, Dataset, TrainConfig, Trainer, attach
from pyggml.models import ARCHITECTURES, draw, small_metadata, tensors_of
from pyggml.requantize import FILE_TYPES, requantize
from pyggml.requantize.imatrix import ImportanceMatrix, InputSums

_CTX, _N_VOCAB = 32, 64
_BY_IMPORTANCE = ("IQ1", "IQ2", "IQ3", "Q2_K_S")  # file types that want it of some tensors


@grouped_command("warmup", "pyggml warmup", "pyggml warmup --threads 2", "pyggml warmup --quiet")
@threads_option
def command(threads: int) -> None:
    """Compile all kernels now, so that later commands start at once.

    They are kept in the user's cache folder until Python, Numba or pyggml change.
    """
    pyggml.threads.set(threads)
    began = perf_counter()
    first, *rest = ARCHITECTURES
    work = [(first, t) for t in FILE_TYPES] + [(name, next(iter(FILE_TYPES))) for name in rest]
    with tempfile.TemporaryDirectory(prefix="pyggml-", ignore_cleanup_errors=True) as folder:
        for number, (architecture, file_type) in enumerate(work, 1):
            with progress_lines():
                say(f"{number:2}/{len(work)} {architecture:<8} {file_type:<8} ", end="")
            started = perf_counter()
            plain, packed = Path(folder, f"{architecture}.gguf"), Path(folder, f"{number}.gguf")
            _write(plain, architecture)
            by_importance = file_type.startswith(_BY_IMPORTANCE)
            requantize(
                plain, packed, file_type, importance=_alike(plain) if by_importance else None
            )
            _use(packed, threads)
            with progress_lines():
                say(span(perf_counter() - started))
    say(f"ready after {span(perf_counter() - began)}")


def _write(path: Path, architecture: str) -> None:
    """A model with every tensor that its architecture may have, but the output's bias, which few
    models have and which would keep the fused loss from being compiled."""
    rng = np.random.default_rng(0)
    metadata = small_metadata(ARCHITECTURES[architecture])
    tensors = [
        (name, F32, spec.shape, draw(name, spec.shape, rng))
        for name, spec in tensors_of(metadata, _N_VOCAB).items()
        if name != "output.bias"
    ]
    gguf.write(path, metadata, tensors)


def _alike(path: Path) -> ImportanceMatrix:
    """The importance of columns, all alike, of a model's matrices."""
    with gguf.open(path) as file:
        shapes = {name: t.shape for name, t in file.tensors.items() if len(t.shape) > 1}
    sums = {
        name: InputSums(
            np.ones((prod(s[:-2]), s[-1]), np.float32), np.ones(prod(s[:-2]), np.float32)
        )
        for name, s in shapes.items()
    }
    return ImportanceMatrix(sums, (), 1, _CTX)


def _use(path: Path, threads: int) -> None:
    model = load(path)
    window = np.arange(_CTX + 1, dtype=np.int32)[None]
    windows = Dataset(window, np.zeros_like(window))
    settings = TrainConfig(threads=threads, max_steps=1)
    adapter = attach(model)
    Trainer(adapter.model, adapter.parameters, Corpus(windows, windows), settings).run(
        progress=False
    )
    session = Session(model, _CTX)
    session.feed(window[0, :16])  # enough to fill the tiles of every CPU
    Sampler(Sampling(seed=0))(session.feed([4]))
