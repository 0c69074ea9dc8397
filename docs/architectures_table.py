"""Writes docs/architectures.md: every architecture, its devices, and what it was compared with.

python docs/architectures_table.py
"""

import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from pyggml import gguf
from pyggml.graph import Graph
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import zeros
from pyggml.models import (
    ARCHITECTURES,
    Inputs,
    Parts,
    build,
    compose,
    small_metadata,
    tensors_of,
)

DOCS = Path(__file__).parent
GOLDEN = DOCS.parent / "tests/golden"
N_VOCAB = 64
# Ops that no shader of the WebGPU backend computes: the CPU does.
NOT_ON_WEBGPU = {"ssm_scan", "gated_delta_net", "rwkv_wkv6", "rwkv_wkv7"}
SOURCES = {
    "peers": "transformers",
    "models": "transformers",
    "formulas": "formulas in float64",
}
N_NAMES = 153  # in llama.cpp's list
# Of these, no causal decoders of text: clip, the 12 of BERT, T5 and embeddings, wavtokenizer-dec;
# dream, llada, llada-moe and rnd1, which denoise; eagle3, dflash and gemma4-assistant, which draft;
# pockettts and qwen3tts, which speak; gptj, a name without a graph.
N_OTHERS = 24


def text() -> str:
    """The page."""
    compared = comparisons()
    rows = [
        f"| `{name}` | CPU, CUDA{webgpu(name)} | {', '.join(compared[name])} |"
        for name in sorted(ARCHITECTURES)
    ]
    return "\n".join([_HEAD.format(n=len(rows), n_names=N_NAMES, n_others=N_OTHERS), *rows, ""])


def comparisons() -> Mapping[str, list[str]]:
    """Architecture -> whose logits the tests hold it to."""
    sources: dict[str, list[str]] = defaultdict(list)
    for folder, source in SOURCES.items():
        for path in sorted((GOLDEN / folder).glob("*.gguf")):
            with gguf.open(path) as file:
                name = file.get("general.architecture")
            if source not in sources[name]:
                sources[name].append(source)
    for path in sorted((GOLDEN / "llama_cpp").glob("*.npz")):
        sources[path.stem].append("llama.cpp")
    return sources


def webgpu(name: str) -> str:
    """Whether its graph has ops that stay on the CPU there."""
    metadata = small_metadata(ARCHITECTURES[name])
    specs = tensors_of(metadata, N_VOCAB)
    decoder = compose(metadata.get, {n: s.shape for n, s in specs.items()}, name)
    parts = Parts(decoder, {n: zeros(s.shape, F32, n) for n, s in specs.items()})
    ops = {t.op.name for t in Graph.of(build(parts, Inputs.empty(3))).nodes if t.op}
    return ", WebGPU in part" if ops & NOT_ON_WEBGPU else ", WebGPU"


_HEAD = """# Architectures

Written by `docs/architectures_table.py`; `tests/test_architectures_table.py` fails if it is out of
date.

{n} names of `general.architecture` load and train: their gradients are slopes of the whole model in
float64, and adapters update every matrix. llama.cpp knows {n_names} names, of which {n_others} are
encoders, diffusion models, parts of other models or speech.

The last column says whose logits, without and with an adapter, over a cache and in chunks, the
tests hold an architecture to. Where it is llama.cpp's, the error is below 5e-11 (NMSE, float32),
but for the table of GELUs in halves that llama.cpp has: up to 2e-7. Those of transformers are
compared with llama.cpp as well, which reads the adapters. It passes over updates of latent matrices
(DeepSeek 2, Kimi, Ling 3): those are compared once they are merged into the model.

| `general.architecture` | devices | compared with |
|---|---|---|"""


if __name__ == "__main__":
    (DOCS / "architectures.md").write_text(text(), "utf-8")
    sys.exit()
