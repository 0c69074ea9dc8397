"""Encoders against PyTorch's, in transformers: vectors, and gradients of all weights.

`pytest -m interop`; the models are the random ones of llama_embeddings.
"""

from itertools import pairwise

import numpy as np
import pytest
from extras import need
from llama_embeddings import CASES, N_VOCAB, TEXTS, N, write

import pyggml
from pyggml import gguf
from pyggml.graph.tensor import leaf
from pyggml.look.check import CheckedOutput
from pyggml.models import Inputs, Net, Parts
from pyggml.models.build import build_vectors
from pyggml.models.pooling import Pool
from pyggml.models.texts import fill

from measures import nmse

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]  # theirs
SIZE = {"vocab_size": N_VOCAB, "hidden_size": N, "num_attention_heads": 4, "intermediate_size": 96}
NORMS = {"attn_output_norm": "post_attention_layernorm", "layer_output_norm": "post_mlp_layernorm"}
OF_BERT = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
BLOCK = {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {"attn_output": "self_attn.o_proj"}
BLOCK |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
OF_GEMMA = BLOCK | {
    "token_embd": "embed_tokens",
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "output_norm": "norm",
}
NAMES = {  # of tensors, in GGUF and in transformers
    "bert": OF_BERT
    | {f"attn_{x[0]}": f"attention.self.{x}" for x in ("query", "key", "value")}
    | {"attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm"}
    | {"ffn_up": "intermediate.dense", "ffn_down": "output.dense"}
    | {"layer_output_norm": "output.LayerNorm"},
    "nomic-bert": OF_BERT | BLOCK | NORMS,
    "modern-bert": {
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "attn_norm": "attn_norm",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.Wo",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.Wi",
        "ffn_down": "mlp.Wo",
        "output_norm": "final_norm",
    },
    "gemma-embedding": OF_GEMMA,
    "qwen3": OF_GEMMA | {"ffn_norm": "post_attention_layernorm"},
}


def twin(name, key):
    """The model of transformers, without its numbers; key: reads the file's."""
    library = need("transformers")
    eps, rms = (key(f"attention.layer_norm_{x}") for x in ("epsilon", "rms_epsilon"))
    n, window = key("block_count"), key("attention.sliding_window")
    size, rope = SIZE | {"num_hidden_layers": n, "pad_token_id": 0}, {"rope_type": "default"}
    own = rope | {"rope_theta": key("rope.freq_base")}
    both = {"full_attention": own, "sliding_attention": rope | {"rope_theta": 10000.0}}
    if name == "bert":
        size |= {"hidden_act": "gelu_new", "max_position_embeddings": 64}
        return library.BertModel(library.BertConfig(**size, layer_norm_eps=eps))
    if name == "nomic-bert":
        config = library.NomicBertConfig(**size, layer_norm_eps=eps, rope_parameters=own)
        return library.NomicBertModel(config)
    if name == "modern-bert":
        size |= {f"{x}_token_id": 0 for x in ("eos", "bos", "cls", "sep")}
        size |= {"hidden_activation": "gelu_pytorch_tanh", "norm_eps": eps}
        size |= {"local_attention": window, "rope_parameters": both}
        return library.ModernBertModel(library.ModernBertConfig(**size))
    size |= {"num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": rms}
    if name == "qwen3":
        return library.Qwen3Model(library.Qwen3Config(**size, rope_parameters=own))
    full = key("attention.sliding_window_pattern")
    kinds = ["sliding_attention" if (i + 1) % full else "full_attention" for i in range(n)]
    size |= {"layer_types": kinds, "sliding_window": window, "query_pre_attn_scalar": 16}
    size |= {"use_bidirectional_attention": True, "rope_parameters": both}
    return library.Gemma3TextModel(library.Gemma3TextConfig(**size))


def their_name(name, tensor):
    *block, part, kind = tensor.split(".")
    blocks = "encoder.layer" if name == "bert" else "layers"
    return ".".join([*([blocks, block[1]] if block else []), NAMES[name][part], kind])


def theirs(name, path, weights):
    """PyTorch's vectors of TEXTS, and the gradients of Σ weights · vectors by GGUF's names."""
    torch, file = need("torch"), gguf.open(path)
    model = twin(name, lambda key: file.get(f"{name}.{key}")).eval()
    for module in model.modules():
        module.padding_idx = None  # token 0 is in the texts, and learns
    names = {
        tensor: their_name(name, tensor) for tensor in file.tensors if tensor != "output.weight"
    }
    one = {t: 1.0 if name == "gemma-embedding" and "norm" in t else 0.0 for t in names}
    own = {key: torch.zeros_like(value) for key, value in model.state_dict().items()}
    own |= {names[t]: torch.tensor(file.data(t) - np.float32(one[t])) for t in names}
    model.load_state_dict(own)
    rows = [model(input_ids=torch.tensor(text)[None]).last_hidden_state[0] for text in TEXTS]
    vectors = torch.stack([r[-1] if CASES[name][1] == "last" else r.mean(0) for r in rows])
    (vectors * torch.tensor(weights)).sum().backward()
    of_names = dict(model.named_parameters())
    gradients = {t: of_names[names[t]].grad for t in names}
    return vectors.detach().numpy(), {t: g.numpy() for t, g in gradients.items() if g is not None}


def ours(path, pooling, weights):
    model = pyggml.load(path, compute="f32")
    data = {t: model.file.data(t) for t in model.file.tensors if t != "output.weight"}
    leaves = {t: leaf(np.array(a, np.float32)).named(t) for t, a in data.items()}
    n = sum(map(len, TEXTS))
    inputs, pool = Inputs.empty(n, causal=pooling == "last"), Pool.empty(pooling, len(TEXTS), n)
    fill(inputs, *TEXTS)
    pool.fill([*pairwise(np.cumsum([0, *map(len, TEXTS)]))])
    net = Net(leaves, inputs)
    out = build_vectors(Parts(model.parts.decoder, leaves), net, pool)
    gradients = CheckedOutput.of(out, [*leaves.values()], kernels=True).gradients(weights)
    return model.embed(TEXTS, pooling, False), dict(zip(leaves, gradients, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_vectors_and_gradients_are_pytorch_s(name, tmp_path, rng):
    weights = rng.standard_normal((len(TEXTS), N)).astype(np.float32)
    path = write(tmp_path / "model.gguf", name)
    (vectors, slopes), (wanted, gradients) = (
        ours(path, CASES[name][1], weights),
        theirs(name, path, weights),
    )
    assert nmse(vectors, wanted) < 1e-11
    assert len(gradients) == len(slopes)
    for tensor, gradient in gradients.items():
        if not tensor.endswith("attn_k.bias"):  # a shift of all keys changes no softmax
            assert nmse(slopes[tensor], gradient) < 1e-9, tensor
