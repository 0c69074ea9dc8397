"""Models with random weights, a few layers of 32 numbers wide, for architectures whose weights the
converter computes anew (others are in tests/support/peers): transformers' class gives logits in
float64, llama.cpp's converter gives the file.

    python tests/golden/small/make.py PATH_OF_LLAMA_CPP [NAME ...]

Matrices are exact in F16. Each file has beside it NAME.npy with the logits of TOKENS, float32.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
N_VOCAB = 40
TOKENS = np.random.default_rng(0).integers(0, N_VOCAB, 24)

USUAL = {
    "vocab_size": N_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TIED = {"tie_word_embeddings": True}
MAMBA = {"state_size": 4, "num_hidden_layers": 2, "intermediate_size": 64}
MAMBA2 = MAMBA | {"state_size": 6, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
# name -> (prefix of the class's name, what differs from USUAL)
MODELS = {
    "falcon-mamba": ("FalconMamba", MAMBA | {"layer_norm_epsilon": 1e-5, "mixer_rms_eps": 1e-5}),
    "lfm2": ("Lfm2", TIED | LFM2),
    "mamba": ("Mamba", MAMBA),
    "mamba2": ("Mamba2", MAMBA2),
    "qwen35": ("Qwen3_5", DELTA_NET),
}


def is_zero_centred(kind: str, path: str) -> bool:
    """Whether this is a norm's weight w where the class multiplies by 1 + w."""
    return kind.startswith("Qwen3_") and "linear_attn" not in path and "norm" in path


def model(kind: str, changes: dict) -> torch.nn.Module:
    """The class with random weights; norms differ from 1, biases from 0."""
    name = kind + ("TextConfig" if hasattr(transformers, f"{kind}TextConfig") else "Config")
    made = AutoModelForCausalLM.from_config(getattr(transformers, name)(**USUAL | changes)).double()
    rng = np.random.default_rng(0)
    for path, p in made.named_parameters():
        if p.ndim > 1:
            values = rng.standard_normal(p.shape) * (1.0 if "embed" in path else 1.5 / 32**0.5)
        elif path.endswith("bias"):
            values = 0.3 * rng.standard_normal(p.shape)
        else:
            values = rng.uniform(0.5, 1.5, p.shape) - is_zero_centred(kind, path)
        p.data[:] = torch.from_numpy(values.astype(np.float16).astype(np.float64))
    made.tie_weights()
    return made.eval()


def convert(folder: Path, path: Path) -> None:
    """llama.cpp's converter, without a vocabulary."""
    import gguf
    from conversion import ModelType, get_model_architecture, get_model_class
    from conversion.base import ModelBase

    def no_vocabulary(self) -> None:
        self.gguf_writer.add_tokenizer_model("no_vocab")
        self.gguf_writer.add_vocab_size(N_VOCAB)

    hparams = ModelBase.load_hparams(folder, False)
    found = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    found.set_vocab = no_vocabulary
    found.no_mtp = True  # Qwen's blocks that predict further tokens, which no class makes
    found(folder, gguf.LlamaFileType.MOSTLY_F16, path, eager=True).write()


def main() -> None:
    sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/gguf-py"]
    for name in sys.argv[2:] or MODELS:
        made = model(*MODELS[name])
        with torch.no_grad():
            logits = made(torch.from_numpy(TOKENS)[None]).logits[0].numpy()
        np.save(HERE / f"{name}.npy", logits.astype(np.float32))
        with tempfile.TemporaryDirectory() as folder:
            made.float().save_pretrained(folder)
            words = {"model": {"vocab": {str(i): i for i in range(N_VOCAB)}}, "added_tokens": []}
            Path(folder, "tokenizer.json").write_text(json.dumps(words))
            convert(Path(folder), HERE / f"{name}.gguf")
        print(f"{(HERE / f'{name}.gguf').stat().st_size:>9} {name}")


if __name__ == "__main__":
    main()
