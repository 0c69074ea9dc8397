"""Several sequences in one batch, over a cache and in chunks, of every name that trains: logits
against llama.cpp, which is fed the same batches.

The models are those that llama.cpp's own test-llama-archs writes, with its weights; of names that
it writes none of, or none that can be compared, those of `llama_models`.
"""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gelu_table import GeluTable
from llama_batch import LlamaBatch
from llama_models import VARIANTS, write

import pyggml
from pyggml import gguf
from pyggml.errors import ModelError
from pyggml.generation import Batch
from pyggml.graph.dtypes import F32
from pyggml.models import ARCHITECTURES
from pyggml.quants import dequantize

from measures import nmse

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore:table leaves")]
# Longer than the windows of test-llama-archs, 32 tokens.
TEXTS = [np.random.default_rng(n).integers(0, 40, n) for n in (44, 17, 39)]
N_CTX = 64
# Prompts together and in chunks, single tokens beside them, one that begins later.
STOPS = ((13, 9, 0), (14, 10, 20), (36, 10, 21), (44, 17, 39))
GELUS = ("bloom", "codeshell", "falcon", "gemma", "gemma2", "gemma3", "gpt2", "gptneox", "grok")
GELUS += ("mpt", "phi2", "spark2_5", "starcoder", "starcoder2")
# What test-llama-archs writes and no published file has: the sentence that refuses it.
REFUSED = {
    "bailingmoe3-moe": "blk.1.attn_q.bias is not used",
    "ernie4_5-moe-moe": "interleave_moe_layer_step is 2, wanted 1",
    "glm4-dense": "rope.dimension_sections begin with 32 and 32",
    "hy_v3-moe": "blk.0.ffn_gate.weight is not used",  # dense matrices beside experts
    "kimi-linear-moe": "blk.1.attn_q.bias is not used",
    "mimo2-moe": "blk.0.ffn_gate.weight is not used",
    "minicpm3-dense": "128 numbers of a key are rotated, wanted fewer than its 128",
    "mpt-dense": "blk.0.attn_k_norm.weight is not used",  # without one of queries
    "qwen3next-moe": "a form that is not read: convert the checkpoint anew",
    "refact-moe": "blk.0.ffn_gate_inp.weight is not used",
}
# llama.cpp has no positions in a Baichuan of two layers.
NOT_COMPARED = ("baichuan",)
# llama.cpp gives a sequence other logits than it has alone where several share a micro-batch.
ALONE = ("arwkv7", "plamo2", "rwkv6qwen2")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What test-llama-archs writes of one architecture: paths of a dense model, a mixture, or both;
    none if it writes none."""
    program = Path(os.environ.get("LLAMA_CPP_LIB_PATH", "."), "test-llama-archs")

    def paths(name):
        folder = tmp_path_factory.mktemp(name)
        if program.exists():
            command = [program, "-a", f"^{name}$", "-s", "7", "-o", folder]
            subprocess.run(command, check=True, capture_output=True)
        return sorted(folder.glob("*.gguf"))

    return paths


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_batches_have_llama_cpp_s_logits(name, written, tmp_path):
    paths = [*models(name, written(name))] or [write(tmp_path / "own.gguf", *VARIANTS[name])]
    for path in paths:
        backends = (GeluTable(),) if name in GELUS else ()
        model = pyggml.load(path, compute="f32", backends=backends)
        whole = np.concatenate([model.logits(text) for text in TEXTS])
        wanted = theirs(path, in_turn() if name in ALONE else steps())
        together = ours(model)
        limit = 2e-9 if name in GELUS else 3e-11
        assert nmse(whole, wanted) < limit
        assert nmse(together, wanted) < limit
        if name in ALONE:
            assert nmse(theirs(path, steps()), wanted) > 1e-3, "llama.cpp has mended it"


def models(name, paths):
    """The files that are compared, exact."""
    for path in paths:
        exact = without_factors(path, path.with_suffix(".f32"))
        if path.stem in REFUSED:
            with pytest.raises(ModelError, match=REFUSED[path.stem]):
                pyggml.load(exact)
        elif name not in NOT_COMPARED:
            yield exact


def without_factors(source, target):
    """The model in F32, without the factors beside matrices that only NVFP4 has: llama.cpp
    multiplies biases by them too, and refuses that of NVFP4."""
    with gguf.open(source) as file:
        tensors = [
            (name, F32, t.shape, dequantize(file.data(name), t.dtype.name))
            for name, t in file.tensors.items()
            if not name.endswith((".scale", ".input_scale"))
        ]
        gguf.write(target, file.metadata, tensors)
    return target


def steps():
    """What is fed together: number of a text -> tokens of it."""
    past = [0] * len(TEXTS)
    for stops in STOPS:
        ends = list(enumerate(zip(past, stops, strict=True)))
        yield {i: TEXTS[i][start:stop] for i, (start, stop) in ends if start < stop}
        past = stops


def in_turn():
    """One text after the other, each in two pieces."""
    for i, text in enumerate(TEXTS):
        yield {i: text[:13]}
        yield {i: text[13:]}


def theirs(path, pieces):
    """llama.cpp's logits of all texts, one after the other."""
    with LlamaBatch(path, len(TEXTS), N_CTX) as llama:
        return joined(map(llama.feed, pieces))


def ours(model):
    """The same of ours, fed together."""
    batch = Batch(model, len(TEXTS), N_CTX)
    slots = [batch.open() for _ in TEXTS]
    fed = (batch.feed({slots[i]: piece for i, piece in one.items()}, slots) for one in steps())
    return joined({slots.index(slot): z for slot, z in one.items()} for one in fed)


def joined(results):
    """Rows of all texts, (T, n_vocab)."""
    rows = [[] for _ in TEXTS]
    for one in results:
        for i, logits in one.items():
            rows[i].append(logits)
    return np.concatenate([z for row in rows for z in row])
