"""The orders of rows and columns in which llama.cpp's converter writes the modules of a class.

    PYTHONPATH=LLAMA_CPP:LLAMA_CPP/gguf-py python -m peft_orders     (in tests/support, with torch)

writes tests/golden/adapters/orders.json: for each architecture of CLASSES and
each matrix of a small model, a checksum of the converter's result for a module whose numbers are
their own places. Of transformers' classes, those that came after PEFT's golden folders; stacks of
experts, which checkpoints have apart, are left out.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import numpy as np
import tiny_models

import pyggml
from pyggml.lora.peft.twins import Module, Twins
from pyggml.model import Model

GOLDEN = Path(__file__).parents[1] / "golden/adapters/orders.json"
# Architecture → sizes, where the heads of the example are too alike to tell an order.
SIZES: dict[str, dict[str, Any]] = {
    "baichuan": {"attention.head_count_kv": 4},
    "xverse": {"attention.head_count_kv": 4},
    "rwkv6": {"block_count": 4, "rescale_every_n_layers": 2},
    "refact": {"embedding_length": 48, "feed_forward_length": 256, "attention.head_count_kv": 1},
}
ONLY = {"baichuan": "W_pack"}  # for others the converter calls itself without end
FUSED = ("codeshell", "spark2_5")  # whose q, k and v are one tensor in files


def model_of(architecture: str, folder: Path) -> Model:
    """A small model with every tensor that a file of this class has."""
    sizes = SIZES.get(architecture, {})
    tensors: dict[str, Any] = {}
    for at in (f"blk.{i}.attn_" for i in range(2) if architecture in FUSED):
        tensors |= {f"{at}{x}.weight": None for x in "qkv"} | {f"{at}qkv.weight": (32, 16)}
    path = tiny_models.write(folder / "model.gguf", architecture, sizes, tensors=tensors)
    return pyggml.load(path)


def places(model: Model) -> dict[str, np.ndarray]:
    """Tensor → its numbers, if each number of a module is its place in it; of experts all."""
    found: dict[str, np.ndarray] = {}
    for module in _matrices(Twins(model)):
        for part in module.parts:
            rows, shape = numbered(module), model.parts.decoder.tensors()[part.tensor].shape
            matrix = rows[part.rows][:, part.columns]
            if part.factor is not None:
                matrix = matrix * part.factor[:, None]
            if part.expert is None:
                found[part.tensor] = matrix
            else:
                found.setdefault(part.tensor, np.zeros(shape))[part.expert] = matrix
    return found


def _matrices(twins: Twins) -> list[Module]:
    return [m for m in twins.modules.values() if not m.n_expert and m.parts[0].rows.ndim == 1]


def numbered(module: Module) -> np.ndarray:
    """A matrix whose numbers are their places, and of one expert another than of the next."""
    n_out, n_in = module.shape
    start = (module.parts[0].expert or 0) * n_out * n_in
    return (1.0 + start + np.arange(n_out * n_in)).reshape(n_out, n_in)


def checksums(arrays: dict[str, np.ndarray]) -> dict[str, int]:
    """Tensor → the checksum of its numbers in float64."""
    return {n: crc32(np.ascontiguousarray(a, np.float64).tobytes()) for n, a in arrays.items()}


def converted(model: Model) -> dict[str, np.ndarray]:
    """The same by llama.cpp's converter, of the modules that it can convert."""
    import torch
    from conversion.base import LazyTorchTensor

    converter, found, twins = _converter(model), {}, Twins(model)
    only = ONLY.get(model.config.architecture, "")
    # Those of experts first, those outside of layers last: what Grok's experts wait for.
    for module in sorted(_matrices(twins), key=lambda m: _turn(m, twins)):
        if only in module.name:
            values = torch.from_numpy(numbered(module))
            values = values.float() if values.max() < 1 << 24 else values
            for name, tensor in _writes(converter, module.name, values):
                if tensor.ndim > 1:  # some add norms
                    found[name] = LazyTorchTensor.to_eager(tensor).numpy()
    return found


def _turn(module: Module, twins: Twins) -> tuple[bool, bool]:
    return module.name in twins.layout.outer, module.parts[0].expert is None


def _writes(converter: Any, name: str, values: Any) -> Iterator[tuple[str, Any]]:
    item = type(converter).filter_tensors((f"{name}.weight", lambda: values))
    numbers = [int(word) for word in name.split(".") if word.isdecimal()]
    if item is not None:
        if converter.conv1d and ".c_" in name:
            values = values.T.contiguous()
        yield from converter.modify_tensors(values, item[0], numbers[0] if numbers else None)


# Architecture → the name of its class for the converter. It takes PLaMo's 13B alone, whose matrices
# are too large for a test: they are the same.
CLASSES = {
    "afmoe": "AfmoeForCausalLM",
    "apertus": "ApertusForCausalLM",
    "chatglm": "GlmForCausalLM",
    "cohere2moe": "Cohere2MoeForCausalLM",
    "dbrx": "DbrxForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "exaone-moe": "ExaoneMoeForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "granite_swa": "GraniteMoeSWAForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan-moe": "HunYuanMoEV1ForCausalLM",
    "hunyuan_vl": "HunYuanVLForConditionalGeneration",
    "hy_v3": "HYV3ForCausalLM",
    "jais2": "Jais2ForCausalLM",
    "jamba": "JambaForCausalLM",
    "laguna": "LagunaForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "mellum": "MellumForCausalLM",
    "mimo2": "MiMoV2FlashForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    "mpt": "MPTForCausalLM",
    "muse-glimmer": "MuseGlimmerForConditionalGeneration",
    "nemotron_h": "NemotronHForCausalLM",
    "nemotron_h_moe": "NemotronHForCausalLM",
    "paddleocr": "PaddleOCRVLForConditionalGeneration",
    "phimoe": "PhiMoEForCausalLM",
    "qwen2vl": "Qwen2VLForConditionalGeneration",
    "qwen3vl": "Qwen3VLForConditionalGeneration",
    "step35": "Step3p5ForCausalLM",
    "orion": "OrionForCausalLM",
    "pangu-embedded": "PanguEmbeddedForCausalLM",
    "maincoder": "MaincoderForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "nanbeige": "NanbeigeForCausalLM",
    "xverse": "XverseForCausalLM",
    "deci": "DeciLMForCausalLM",
    "plm": "PLMForCausalLM",
    "deepseek": "DeepseekForCausalLM",
    "maple": "MapleForCausalLM",
    "grovemoe": "GroveMoeForCausalLM",
    "smallthinker": "SmallThinkerForCausalLM",
    "arctic": "ArcticForCausalLM",
    "bailingmoe": "BailingMoeForCausalLM",
    "bailingmoe2": "BailingMoeV2ForCausalLM",
    "grok": "GrokForCausalLM",
    "exaone": "ExaoneForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "baichuan": "BaichuanForCausalLM",
    "codeshell": "CodeShellForCausalLM",
    "jais": "JAISLMHeadModel",
    "qwen": "QWenLMHeadModel",
    "refact": "GPTRefactForCausalLM",
    "openelm": "OpenELMForCausalLM",
    "spark2_5": "Spark2_5ForCausalLM",
    "plamo2": "Plamo2ForCausalLM",
    "plamo3": "Plamo3ForCausalLM",
    "talkie": "TalkieForCausalLM",
    "rwkv6": "Rwkv6ForCausalLM",
    "rwkv6qwen2": "RWKV6Qwen2ForCausalLM",
    "rwkv7": "Rwkv7ForCausalLM",
    "arwkv7": "RwkvHybridForCausalLM",
}

NAMES = tuple(CLASSES)


def _converter(model: Model) -> Any:
    """llama.cpp's converter of the class, without a folder."""
    import gguf
    from conversion import get_model_class

    name = CLASSES[model.config.architecture]
    kind = get_model_class(name)
    converter = kind.__new__(kind)
    architecture = model.config.architecture
    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    settings, layers = _settings(model), range(model.config.n_blocks)
    vars(converter).update(
        hparams=settings,
        hf_arch=name,
        block_count=model.config.n_blocks,
        model_arch=arch,
        tensor_map=gguf.get_tensor_name_map(arch, model.config.n_blocks),
        lazy=False,
        fuse_qkv=False,
        fuse_gate_up_exps=False,
        conv1d=name == "JAISLMHeadModel",
        lerp_weights={},
        embeddings_scale=1.0,
        width_scale=1.0,
        _num_kv_heads=[settings["num_key_value_heads"]] * model.config.n_blocks,
        _num_heads=[settings["num_attention_heads"]] * model.config.n_blocks,
        _ffn_dims=[settings["intermediate_size"]] * model.config.n_blocks,
        _cur_expert="",
        _ssm_layers=[i for i in layers if f"blk.{i}.ssm_in.weight" in model.parts.weights],
        _attn_layers=[i for i in layers if f"blk.{i}.attn_q.weight" in model.parts.weights],
        hparam_prefixes=[],
        is_moe=False,
        _mtp_bid=None,
    )
    kind._n_main_layers = model.config.n_blocks
    return converter


def _settings(model: Model) -> dict[str, Any]:
    """config.json, by all the names that classes have."""

    def key(name: str, default: int = 0) -> int:
        value = model.file.get(f"{model.config.architecture}.{name}", default)
        return int(np.max(value))

    n_embd, n_head, n_expert = (
        key("embedding_length"),
        key("attention.head_count", 1),
        key("expert_count"),
    )
    size = key("attention.key_length", n_embd // max(n_head, 1))
    return {
        "hidden_size": n_embd,
        "n_embd": n_embd,
        "d_model": n_embd,
        "intermediate_size": key("feed_forward_length"),
        "num_attention_heads": n_head,
        "n_head": n_head,
        "num_key_value_heads": key("attention.head_count_kv", n_head),
        "head_dim": size,
        "num_hidden_layers": model.config.n_blocks,
        "num_experts": n_expert,
        "num_local_experts": n_expert,
        "n_routed_experts": n_expert,
        "moe_num_primary_experts": n_expert,
        "rescale_every": key("rescale_every_n_layers"),
        "shared_intermediate_size": key("expert_shared_feed_forward_length"),
        "expert_layer_offset": 0,
        "expert_layer_period": 1,
        "gating": "per-head",
        "qk_scale_factor": 1.0,
        "ffn_config": {"moe_num_experts": n_expert, "ffn_hidden_size": 1},
    }


def main() -> None:
    golden = {}
    for name in NAMES:
        with TemporaryDirectory() as folder:
            golden[name] = checksums(converted(model_of(name, Path(folder))))
        sys.stdout.write(f"{name}: {len(golden[name])} tensors\n")
    GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
