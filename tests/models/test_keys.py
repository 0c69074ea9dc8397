"""Keys and tensors that files carry and no golden model has, against llama.cpp."""

import numpy as np
import pytest
import tiny_models
from gelu_table import GeluTable
from tiny_models import NO_VOCABULARY, scaled

import pyggml
from pyggml.models import ARCHITECTURES

from measures import nmse
from peers.trial import llama_cpp_logits

pytestmark = pytest.mark.interop
N_VOCAB, N_EMBD = 40, 64
TOKENS = np.random.default_rng(0).integers(0, N_VOCAB, 48)
FREQS = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
LONG = {
    f"rope_factors_{kind}.weight": np.linspace(1, last, 8, dtype=np.float32)
    for kind, last in (("short", 3), ("long", 16))
}


def scaling(kind, factor, **more):
    return {"rope.scaling.type": kind, "rope.scaling.factor": factor} | {
        f"rope.scaling.{key}": value for key, value in more.items()
    }


YARN = scaling("yarn", 4.0, original_context_length=16)
LONG_KEYS = {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 16}
EXT_FACTOR = {"rope.scaling.yarn_ext_factor": -1.0}
SWA_BASE = {"rope.freq_base_swa": 500.0}
TIED = {"output.weight": None}

FILES = {
    "frequency factors": ("llama", {}, FREQS),
    "frequency factors, halves apart": ("exaone", {}, FREQS),
    "linear": ("llama", scaling("linear", 4.0), {}),
    "linear, old key": ("llama", {"rope.scale_linear": 4.0}, {}),
    "none has no factor": ("llama", scaling("none", 4.0), {}),
    "linear, windows": ("gemma3", scaling("linear", 8.0), {}),
    "linear, windows that are plain": ("olmo2", scaling("linear", 4.0), {}),
    "linear, part of a head": ("nemotron", scaling("linear", 2.0), {}),
    "yarn": ("qwen2", YARN, {}),
    "yarn that shortens": ("llama", YARN | scaling("yarn", 0.5), {}),
    "yarn with a factor of its own": ("qwen3", YARN | {"rope.scaling.attn_factor": 1.3}, {}),
    "yarn, windows": ("gemma2", YARN, TIED),
    "yarn, some layers": ("smollm3", YARN, {}),
    "yarn, part of a head": ("glm4", YARN | {"rope.dimension_count": 8}, {}),
    "yarn without its multiplier": ("mistral3", YARN, {}),
    "long": ("llama", LONG_KEYS, LONG),
    "long, scaled": ("granite", LONG_KEYS, LONG),
    "long, with a factor": ("phi3", LONG_KEYS | {"rope.scaling.attn_factor": 1.2}, LONG),
    "no rotation": ("granite", {"rope.scaling.finetuned": False}, {}),
    "scales that are 0": ("granite", dict.fromkeys(["attention.scale", "residual_scale"], 0.0), {}),
    "base of windows": ("gemma2", SWA_BASE, TIED),
    "base of windows, by array": (
        "gemma3",
        SWA_BASE | {"attention.sliding_window_pattern": np.array([False, True])},
        {},
    ),
    "base of windows that is not used": ("cohere2", SWA_BASE, TIED),
    "windows without a pattern": ("lfm2", {"attention.sliding_window": 7}, {}),
    "no windows, a cap": (
        "gemma3",
        {"attention.sliding_window": 0, "final_logit_softcapping": 5.0},
        {},
    ),
    "leading layers that count for nothing": ("bailingmoe", {"leading_dense_block_count": 1}, {}),
    "yarn whose factor is not set": ("grok", YARN | EXT_FACTOR, {}),
    "yarn that is off, with a magnitude": (
        "grok",
        YARN | {"rope.scaling.yarn_ext_factor": 0.0, "rope.scaling.yarn_attn_factor": 1.2},
        {},
    ),
    "frequency factors that are passed over": ("refact", {}, FREQS),
    "the matrix of a classifier": ("qwen3", {}, {"cls.output.weight": (1, N_EMBD)}),
    "base of chunks": ("llama4", SWA_BASE | {"attention.sliding_window_pattern": 2}, {}),
    "all layers dense": ("llama4", {"interleave_moe_layer_step": 0}, {}),
    "no norms of q and k": ("llama4", {"expert_count": 128}, {}),
    "rotary positions everywhere, no experts": (
        "granite_swa",
        {"attention.rope_pattern": None, "expert_count": 0, "expert_used_count": 0},
        {},
    ),
    "scaling that windows lack": ("muse-glimmer", SWA_BASE | scaling("linear", 4.0), {}),
    **{
        f"windows that turn more of a head, {name}": (
            name,
            {"rope.dimension_count": 8, "rope.dimension_count_swa": 16} | more,
            {},
        )
        for name, more in (
            ("laguna", YARN | SWA_BASE),
            ("maple", {}),
            ("spark2_5", SWA_BASE),
            ("step35", SWA_BASE),
        )
    },
    "layers that tensors make dense": (
        "hy_v3",
        {"leading_dense_block_count": None, "expert_gating_func": 1},
        {},
    ),
    "another gating": ("lfm2moe", {"expert_gating_func": 1}, {}),
    "no lengths of experts": (
        "qwen2moe",
        dict.fromkeys(["expert_feed_forward_length", "expert_shared_feed_forward_length"]),
        {},
    ),
    "recurrent by interval": (
        "qwen3next",
        {"attention.recurrent_layers": None, "full_attention_interval": 2},
        {},
    ),
}


# Errors of architectures with GELUs, which llama.cpp has by a table.
OF_GELUS = dict.fromkeys(["gemma2", "gemma3", "grok"], 1e-9) | {"spark2_5": 5e-9}


def write(path, architecture, keys, tensors):
    """A small model with these keys and tensors; None leaves one out."""
    example = ARCHITECTURES[architecture].example
    sizes = {"embedding_length": N_EMBD, "feed_forward_length": 64, "vocab_size": N_VOCAB}
    sizes |= {"rope.dimension_count": 16} if "rope.dimension_count" in example else {}
    sizes |= {"attention.key_length": 16, "attention.value_length": 16} | keys
    return tiny_models.write(
        path, architecture, sizes, NO_VOCABULARY, tensors, N_VOCAB, numbers=scaled
    )


@pytest.mark.filterwarnings("ignore:table leaves")
@pytest.mark.parametrize("what", FILES)
def test_llama_cpp_reads_them_alike(what, tmp_path):
    """GELUs by llama.cpp's table, where a rounding more takes some to the next half."""
    path = write(tmp_path / "model.gguf", *FILES[what])
    gelus = FILES[what][0] in OF_GELUS
    model = pyggml.load(path, compute="f32", backends=(GeluTable(),) if gelus else ())
    found = nmse(llama_cpp_logits(path, TOKENS), model.logits(TOKENS))
    assert found < OF_GELUS.get(FILES[what][0], 1e-10)
