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
    ENCODERS,
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
NOT_ON_WEBGPU = {
    "ssm_scan",
    "gated_delta_net",
    "gated_linear_attn",
    "rwkv_wkv6",
    "rwkv_wkv7",
}
SOURCES = {
    "peers": "transformers",
    "models": "transformers",
    "formulas": "formulas in float64",
}
# What small models of transformers' classes become, in tests/models/test_transformers.py.
_CLASSES = """
afmoe apertus bailingmoe bailingmoe2 bailingmoe3 bitnet chatglm cohere2moe dbrx deci deepseek
deepseek2 deepseek2-ocr dots1 ernie4_5-moe exaone-moe exaone4 falcon-h1 gemma3n gemma4 glm4moe
granite_swa granitehybrid hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 jais2 jamba kimi-linear laguna
llama4 mellum mimo2 minicpm minicpm3 minimax-m2 mistral4 mpt muse-glimmer nemotron_h nemotron_h_moe
orion paddleocr pangu-embedded phimoe qwen qwen2vl qwen3vl qwen3vlmoe step35 xverse
"""
CLASSES = _CLASSES.split()
# Why a name is compared with no class of transformers.
WITHOUT_CLASS = {
    "a class comes with the model, as code of its authors": """arctic arwkv7 codeshell
        grok grovemoe jais maincoder maple nanbeige openelm plamo plamo2 plamo3 plm refact
        rwkv6 rwkv6qwen2 rwkv7 smallthinker spark2_5 talkie""",
}
# LLM_ARCH_NAMES of llama.cpp's src/llama-arch.cpp, in its order.
_LIST = """
clip llama llama4 deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bert
modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert bloom stablelm
qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3next qwen3vl qwen3vlmoe qwen35 qwen35moe
qwen4exp phi2 phi3 phimoe plamo plamo2 plamo3 codeshell orion internlm2 minicpm minicpm3 gemma
gemma2 gemma3 gemma3n gemma4 gemma4-assistant gemma-embedding starcoder2 mamba mamba2 maple
jamba falcon-h1 xverse command-r cohere2 cohere2moe dbrx olmo olmo2 olmoe muse-glimmer openelm
arctic deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4 chatglm glm4 glm4moe glm-dsa bitnet
t5 t5encoder jais jais2 nemotron nemotron_h nemotron_h_moe exaone exaone4 exaone-moe rwkv6
rwkv6qwen2 rwkv7 arwkv7 granite granitemoe granitehybrid graniteswitch granite_swa chameleon
wavtokenizer-dec plm bailingmoe bailingmoe2 bailingmoe3 dots1 dots3note arcee afmoe laguna
ernie4_5 ernie4_5-moe hunyuan-moe hunyuan-dense hunyuan_vl hy_v3 hy_v4 smollm3 gpt-oss lfm2
lfm2moe dream smallthinker llada llada-moe seed_oss grovemoe apertus minimax-01 hrm_text
minimax-m2 minimax-m3 cogvlm rnd1 pangu-embedded mistral3 eagle3 dflash mistral4 paddleocr mimo2
step35 spark2_5 llama-embed maincoder kimi-linear kimi-k3 glm5-next talkie mellum nanbeige
qwen3tts pockettts
"""
NAMES = _LIST.split()
# Names that do not load: why, and which.
OTHERS = {
    "no text comes out of it: embeddings of images, encoders with a learned bias of distances, and "
    "a name without files of its own": "clip t5 t5encoder llama-embed",
    "sound comes out of it": "wavtokenizer-dec pockettts qwen3tts",
    "it denoises whole texts instead of going on with them": "dream llada llada-moe rnd1",
    "it drafts for another model, from that model's activations": "eagle3 dflash gemma4-assistant",
    "llama.cpp knows the name and has no graph for it": "gptj",
}
LEFT_OUT = {
    "keys are chosen by the op `lightning_indexer`, which is in ggml alone, without a gradient": (
        "deepseek32 deepseek4 glm-dsa glm5-next hy_v4 dots3note"
    ),
    "residual streams are mixed by ops that are in ggml alone, `dsv4_hc_*`": "kimi-k3 qwen4exp",
    "blocks of keys are chosen for each query, which no span of keys describes": "minimax-m3",
    "attention with a decay that is fixed for each head, without an op in ggml": "minimax-01",
    "two stacks of layers run by turns from a learned state": "hrm_text",
    "the logits of image tokens are written over within the graph": "chameleon",
    "a file has a second set of all matrices, for images": "cogvlm",
    "adapters are within the model, chosen by tokens": "graniteswitch",
}


def text() -> str:
    """The page."""
    compared = comparisons()
    rows = [
        f"| `{name}` | CPU, CUDA{webgpu(name)} | {', '.join(compared[name])} |"
        for name in sorted(ARCHITECTURES)
    ]
    n_others = sum(len(names.split()) for names in OTHERS.values())
    head = _HEAD.format(n=len(rows), n_names=len(NAMES), n_others=n_others)
    without = [line for why, some in WITHOUT_CLASS.items() for line in _missing(why, some.split())]
    missing = [_TAIL, *(line for why, some in _reasons() for line in _missing(why, some))]
    encoders = _ENCODERS.format(names=", ".join(f"`{name}`" for name in sorted(ENCODERS)))
    return "\n".join([head, *rows, encoders, _WITHOUT, *without, *missing, ""])


def _reasons() -> list[tuple[str, list[str]]]:
    """Reasons, and the names of each that do not load."""
    reasons = {**LEFT_OUT, **OTHERS}.items()
    loads = {*ARCHITECTURES, *ENCODERS}
    return [(why, [n for n in some.split() if n not in loads]) for why, some in reasons]


def _missing(why: str, names: list[str]) -> list[str]:
    return [f"- {', '.join(f'`{name}`' for name in names)}: {why}"] if names else []


def names_without_reason() -> list[str]:
    """Names of llama.cpp that neither load nor have a reason."""
    explained = {name for _, names in _reasons() for name in names}
    loads = {*ARCHITECTURES, *ENCODERS, *explained}
    return [name for name in NAMES if name not in loads]


def names_without_class() -> list[str]:
    """Architectures that are compared with no class of transformers, without a reason."""
    explained = {name for some in WITHOUT_CLASS.values() for name in some.split()}
    compared = comparisons()
    return [n for n in ARCHITECTURES if ("transformers" in compared[n]) == (n in explained)]


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
    for name in CLASSES:
        sources[name].append("transformers")
    return sources


def webgpu(name: str) -> str:
    """Whether its graph has ops that stay on the CPU there."""
    metadata = small_metadata(ARCHITECTURES[name])
    specs = tensors_of(metadata, N_VOCAB)
    decoder = compose(metadata.get, {n: s.shape for n, s in specs.items()}, name)
    parts = Parts(decoder, {n: zeros(s.shape, F32, n) for n, s in specs.items()})
    ops = {t.op.name for t in Graph.of(build(parts, Inputs.empty(3))).nodes if t.op}
    return ", WebGPU in part" if ops & NOT_ON_WEBGPU else ", WebGPU"


_ENCODERS = """
## Encoders

{names} embed texts (`pyggml embed`, `/v1/embeddings`) and predict no token. Their vectors, and
the scores of those with a classifier, are llama.cpp's (NMSE below 1e-11, behind its table of GELUs
below 3e-7). Vectors of `bert`, `nomic-bert`, `modern-bert`, `gemma-embedding` and `qwen3`, and
gradients of all their weights, are PyTorch's (transformers; below 1e-11 and 1e-9); every other
encoder's gradients are slopes in float64. They may be trained like others.
"""
_HEAD = """# Architectures

Written by `docs/architectures_table.py`; `tests/test_architectures_table.py` fails if it is out of
date.

{n} names of `general.architecture` load and train: their gradients are slopes of the whole model in
float64, and adapters update every matrix. llama.cpp knows {n_names} names, of which {n_others} are
encoders, diffusion models, parts of other models or speech. What does not load is
[below](#left-out), each with the reason.

The last column says whose logits, without and with an adapter, over a cache and in chunks, the
tests hold an architecture to. Where it is llama.cpp's, the error is below 5e-11 (NMSE, float32).
ggml's CPU looks GELUs up by their argument in float16, as a number in float16: behind that table
the error is 8e-10 (grok), 1.1e-8 (codeshell), 5e-8 (mpt) and 1.4e-7 (spark2_5). With the same
rounding of GELUs here it is 1e-12, 4e-12, 1.2e-10 and 6e-12 (`tests/support/gelu_table.py`). Those
of transformers are compared with llama.cpp as well, which reads the adapters. It passes over
updates of latent matrices (DeepSeek 2, Kimi, Ling 3): those are compared once they are merged.
Where transformers has the class, gradients of A and B of every matrix are its too: within 3e-5,
and 5e-2 in the 22 layers of gemma3n, where transformers' own rounding is 1e-2. Where llama.cpp
differs from a class, the class takes its part: GELUs are the tanh form, bitnet has SiLU, and phimoe
RMS norms with biases and a router whose weights add up to 1. Where the class comes with the model,
as its authors' code, one of transformers that computes the same stands for it: Llama for xverse,
pangu-embedded and deci with attention in all layers, StableLM for orion, Granite for minicpm,
DeepSeek OCR for deepseek and bailingmoe, Qwen 2 for qwen.

`tests/models/test_llama_cpp_batch.py` feeds three sequences in batches of prompts, chunks and
single tokens to llama.cpp and here, for every name: the error is below 3e-11, and 2e-9 with GELUs
by the table. llama.cpp gives sequences of arwkv7, plamo2 and rwkv6qwen2 other logits together than
alone; here they have those of each alone.

| `general.architecture` | devices | compared with |
|---|---|---|"""
_WITHOUT = """
## Without a class in transformers

Their gradients are held to slopes of the whole model in float64 alone.
"""
_TAIL = """
## Left out

A file of one of these is refused by name.
"""


if __name__ == "__main__":
    (DOCS / "architectures.md").write_text(text(), "utf-8")
    sys.exit()
