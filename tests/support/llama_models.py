"""Small random models of every architecture, and llama.cpp's logits of them.

    python -m llama_models [NAME…]     (in tests/support; needs llama_cpp)

writes tests/golden/llama_cpp/NAME.npz: llama.cpp's logits of a model, without and with an adapter.
The model is not kept: its numbers depend on the names of its tensors only.
"""

import re
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import numpy as np
from tiny_models import NO_VOCABULARY, scaled
from tiny_models import write as write_tiny

import pyggml
from pyggml.lora import LoraConfig, attach, merge
from pyggml.models import ARCHITECTURES, compose, small_metadata, tensors_of

from peers.trial import llama_cpp_logits, wide_modules

GOLDEN = Path(__file__).parents[1] / "golden/llama_cpp"
N_VOCAB, N_EMBD, RANK = 40, 64, 4
N_TOKENS = 24  # whose logits are kept, a text's last
BIASES = r"blk\..*\.bias"
DECI = {
    "attention.head_count": np.array([4, 0, 4, 0], np.int32),
    "attention.head_count_kv": np.array([2, 0, 0, 0], np.int32),
    "feed_forward_length": np.array([64, 0, 32, 64], np.int32),
}
SSM = {"ssm.inner_size": 128, "ssm.time_step_rank": 4}
JAMBA = {"ssm.inner_size": 128, "ssm.time_step_rank": 8}
LONG = {"context_length": 16384, "rope.freq_base": 1e11}  # angles that floats can hold
WHOLE_HEADS = {"wkv.head_size": 64, "embedding_length": 128}  # llama.cpp takes no shorter ones
STEP35 = {"rope.dimension_count": 16, "attention.head_count": np.array([8, 4], np.int32)}
LATENT = {
    "attention.kv_lora_rank": 24,
    "attention.key_length": 32,
    "attention.value_length": 24,
    "attention.key_length_mla": 20,
    "attention.value_length_mla": 14,
    "attention.q_lora_rank": 18,
    "rope.dimension_count": 8,
}
# Without the lengths of absorbed heads: files that have attn_kv_b.
WHOLE = LATENT | {
    "attention.key_length": 20,
    "attention.value_length": 14,
    "attention.key_length_mla": 0,
    "attention.value_length_mla": 0,
    "attention.head_count_kv": 4,
}
GROUPS = {"expert_count": 8, "expert_group_count": 4, "expert_group_used_count": 2}
GROUPS |= {"expert_gating_func": 2, "block_count": 3}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
}
CUT_HEADS = {name: n for name, n in WHOLE.items() if not name.endswith("_mla")}
KIMI = LATENT | {
    "block_count": 4,
    "attention.head_count_kv": np.array([0, 0, 1, 0], np.int32),
    "kda.head_dim": 16,
}
CLIPPED = {
    "swiglu_clamp_exp": np.array([0, 0.5, 0, 0.3], np.float32),
    "swiglu_clamp_shexp": np.array([0.4, 0, 0.5, 0.3], np.float32),
}
SECTIONS = {"rope.dimension_sections": np.array([2, 1, 1, 0], np.int32)}
MULTIPLIED = {"rope.scaling.yarn_log_multiplier": 0.0707}
DENSE = {"expert_count": 0, "expert_used_count": 0, "leading_dense_block_count": 2}
LITE = {"block_count": 26, "leading_dense_block_count": 25}  # else a router is undecided
TEMPERED = {"attention.temperature_scale": 0.5, "attention.temperature_length": 4}
LAST = np.array([0, 0, 64], np.int32)
# By name of a model: its architecture, keys beside the example's, and its optional tensors.
VARIANTS: dict[str, tuple[str, dict[str, Any], str]] = {
    name: (name, {}, "output.weight") for name in ARCHITECTURES
}
VARIANTS |= {
    name: (name, keys, optional)
    for name, keys, optional in (
        ("pangu-embedded", {}, r"blk.*attn_\w+\.bias"),
        ("glm4moe", {}, r".*exp_probs_b\.bias|.*attn_q\.bias|output.weight"),
        ("openelm", {}, ""),
        ("granitehybrid", SSM, "output.weight"),
        ("nemotron_h", SSM | {"feed_forward_length": LAST}, "output.weight"),
        ("nemotron_h_moe", SSM | {"feed_forward_length": LAST}, "output.weight"),
        ("jamba", JAMBA, "output.weight"),
        ("falcon-h1", SSM, "output.weight"),
        ("deci", {"block_count": 4} | DECI, "output.weight"),
        ("maple", {"swiglu_clamp_exp": 0.5}, "output.weight"),
        ("qwen2vl", {"attention.layer_norm_rms_epsilon": 0.0}, "output.weight"),
        ("bitnet", {}, ""),
        ("plm", {}, ""),
        ("jais", {}, f"{BIASES}|output.weight"),
        ("jais2", {}, BIASES),
        ("codeshell", {}, r"blk.*(attn_output|ffn_\w+)\.bias|output.weight"),
        ("qwen", {}, r".*attn_qkv\.bias|output.weight"),
        ("hy_v3", {}, r".*exp_probs_b|output.weight"),
        ("baichuan", {"block_count": 32}, "output.weight"),  # of other numbers it has no positions
        ("rwkv7", WHOLE_HEADS, r".*time_mix_v\d\.weight"),
        ("arwkv7", WHOLE_HEADS, r".*time_mix_v\d\.weight|output.weight"),
        ("plamo2", SSM | {"ssm.group_count": 0}, "output.weight"),
        ("step35", STEP35, "rope_freqs.weight|output.weight"),
        ("mimo2", {"attention.value_length": 12}, r".*exp_probs_b\.bias|output.weight"),
        ("phimoe", {}, r".*attn_output\.bias|output\..*"),
    )
    if name in ARCHITECTURES
}
SLIDING = np.arange(23) % 5 != 4
SLIDING[18:20] = True, False
GEMMA = r"rope_freqs.weight|.*\.scale|.*layer_output_scale.weight"
VARIANTS |= {
    "gemma4": ("gemma4", {}, f"output.weight|{GEMMA}"),
    "gemma3n": (
        "gemma3n",
        {"block_count": 12, "attention.sliding_window_pattern": SLIDING[:12]},
        "output.weight",
    ),
    "gemma3n-shared": (
        "gemma3n",
        {"block_count": 23, "attention.sliding_window_pattern": SLIDING},
        "",
    ),
    "gemma4-dense": (
        "gemma4",
        {
            "block_count": 3,
            "attention.sliding_window_pattern": np.array([True, True, False]),
            "attention.head_count_kv": np.array([2, 2, 1], np.int32),
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
            "expert_count": 0,
            "expert_used_count": 0,
            "rope.dimension_count_swa": 16,
            "rope.freq_base_swa": 500.0,
            "final_logit_softcapping": None,
        },
        rf"{GEMMA}|blk.[01].attn_v\.weight",
    ),
}
STEEP = re.compile(r".*\.(ffn_gate|ffn_gate_exps|inp_gate)\.weight")
SMALL = re.compile(r".*\.(attn_q_norm|post_\w*norm|laurel_post_norm)\.weight")
OF_LATENT = (
    ("deepseek2", "deepseek2", LATENT | GROUPS, r".*exp_probs_b\.bias|output.weight"),
    ("deepseek2-lite", "deepseek2", LATENT | LITE, ""),
    ("deepseek2-whole", "deepseek2", WHOLE | YARN | MULTIPLIED, "output.weight"),
    ("deepseek2-yarn", "deepseek2", LATENT | YARN | TEMPERED, "output.weight"),
    ("deepseek2-dense", "deepseek2", LATENT | DENSE, "output.weight"),
    ("deepseek2-ocr", "deepseek2-ocr", {"attention.head_count_kv": 4}, "output.weight"),
    ("minicpm3", "minicpm3", CUT_HEADS, "output.weight|rope_factors.*"),
    ("plm", "plm", CUT_HEADS, ""),
    ("kimi-linear", "kimi-linear", KIMI, "output.weight"),
    ("bailingmoe3", "bailingmoe3", KIMI | CLIPPED, "output.weight"),
    ("bailingmoe3-vl", "bailingmoe3", KIMI | SECTIONS, ""),
    ("mistral4", "mistral4", LATENT | YARN | MULTIPLIED | TEMPERED, "output.weight"),
)
VARIANTS |= {name: more for name, *more in OF_LATENT}
LOOPS = {"num_loops": 3, "skip_loop_final_norm": True}
VARIANTS["nanbeige-bare"] = ("nanbeige", LOOPS, "rope_freqs.weight|output.weight")
# Past 8192 tokens, where llama4 has a second chunk and another factor of queries.
VARIANTS["llama4-long"] = ("llama4", LONG, "output.weight")
# What llama.cpp's table of GELUs in halves leaves, and nothing else: see gelu_table.
GELUS = {"codeshell": 3e-8, "grok": 3e-9, "mpt": 1e-7, "spark2_5": 3e-7}
LIMITS = {name: GELUS.get(name, 1e-11) for name in VARIANTS}
LIMITS |= {"llama4-long": 1e-9, "grovemoe": 1e-10}
LIMITS |= {"deepseek2-lite": 1e-9}  # of 26 layers
# Of large scores; of a first token whose delta rule gives little, which a norm enlarges.
LIMITS |= {"deepseek2-whole": 5e-11, "bailingmoe3": 5e-11, "bailingmoe3-vl": 5e-11}


def tokens_of(name: str) -> np.ndarray:
    """The text that a variant reads."""
    n = 8192 + 14 if name.endswith("-long") else N_TOKENS
    return np.random.default_rng(0).integers(0, N_VOCAB, n)


def write(path: Path, architecture: str, keys: dict[str, Any], optional: str) -> Path:
    """A small model with these keys, and of its optional tensors those whose names match."""
    example = ARCHITECTURES[architecture].example
    sizes = {"embedding_length": N_EMBD, "feed_forward_length": 64, "vocab_size": N_VOCAB}
    sizes |= {"rope.dimension_count": 16} if "rope.dimension_count" in example else {}
    sizes |= {"attention.key_length": 16, "attention.value_length": 16} | keys
    metadata = small_metadata(ARCHITECTURES[architecture], sizes)
    specs = tensors_of(metadata, N_VOCAB).items()
    tensors = {
        name: spec.shape if re.fullmatch(optional, name) else None
        for name, spec in specs
        if spec.optional
    }
    if architecture == "gemma3n":  # llama.cpp wants the keys that it passes over
        unread = compose(metadata.get, {"token_embd.weight": (N_VOCAB, 0)}, "").unread
        first = {name.split(".", 2)[-1]: spec.shape for name, spec in specs if "blk.0." in name}
        tensors |= {name: first[name.split(".", 2)[-1]] for name in unread}
    numbers = steep if architecture.startswith("gemma") else scaled
    return write_tiny(path, architecture, sizes, NO_VOCABULARY, tensors, N_VOCAB, numbers=numbers)


def steep(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Gates so large that llama.cpp's table of GELUs in halves has next to none of them. Norms
    follow, so that nothing else grows. What layers add is small, lest 23 of them make much of a
    rounding. Divisors of frequencies are at least 1, some without end."""
    if name == "rope_freqs.weight":
        return np.where(np.arange(*shape) % 3 == 2, 1e30, 1.5).astype(np.float32)
    factor = 4096 if STEEP.fullmatch(name) else 0.25 if SMALL.fullmatch(name) else 1
    factor = 0.5 if name.endswith("_coef.weight") else factor
    return scaled(name, shape) * np.float32(factor)


def with_adapter(model: Any, rank: int = RANK, applied: bool = True) -> Any:
    """The model with an adapter on every matrix of its blocks, whose numbers go by names alone.
    applied: on those alone whose updates llama.cpp applies."""
    modules = wide_modules(model, rank, applied)
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        made = attach(model, LoraConfig(rank=rank, alpha=2.0 * rank, modules=modules))
    specs = model.parts.decoder.tensors()
    for name, pair in made.pairs.items():
        for t in (pair.a, pair.b):
            rng = np.random.default_rng(crc32(t.name.encode()))
            t.data[:] = rng.standard_normal(t.shape) * 0.5 * t.shape[-1] ** -0.5
        if applied and not specs[name].applied:  # of a module that it applies in other layers
            pair.b.data[:] = 0
    return made


def passes_over(model: Any) -> bool:
    """Whether llama.cpp passes over updates of some of the model's matrices."""
    specs = model.parts.decoder.tensors().items()
    return any(name.startswith("blk.") and not spec.applied for name, spec in specs)


def golden(name: str, folder: Path) -> dict[str, np.ndarray]:
    """llama.cpp's logits of a variant, without and with the adapter; where it passes over updates
    of some matrices, also those of the model with an adapter of all merged into it."""
    path = write(folder / f"{name}.gguf", *VARIANTS[name])
    model, adapter = pyggml.load(path, compute="f32"), folder / "adapter.gguf"
    with_adapter(model).save(adapter)
    values = {
        "logits": llama_cpp_logits(path, tokens_of(name))[-N_TOKENS:],
        "lora_logits": llama_cpp_logits(path, tokens_of(name), adapter)[-N_TOKENS:],
    }
    if passes_over(model):
        merge(with_adapter(model, applied=False).model, folder / "merged.gguf")
        values["merged_logits"] = llama_cpp_logits(folder / "merged.gguf", tokens_of(name))
    return values


if __name__ == "__main__":
    for name in sys.argv[1:] or VARIANTS:
        with TemporaryDirectory() as folder:
            np.savez_compressed(GOLDEN / f"{name}.npz", **golden(name, Path(folder)))
