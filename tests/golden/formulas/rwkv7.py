"""rwkv7.gguf, a small random model, and rwkv7.npy, its logits of TOKENS by the paper's formulas
(arXiv:2503.14456, section 4) in float64, token by token.

    python tests/golden/formulas/rwkv7.py
"""

from pathlib import Path

import gguf
import numpy as np

HERE = Path(__file__).parent
# llama.cpp takes heads of a multiple of 64 only, unchecked: its vectors are so long.
N_VOCAB, N, N_FF, SIZE, N_LAYER = 40, 128, 48, 64, 2
RANKS = {"w": 5, "a": 4, "v": 3, "g": 6}
TOKENS = np.random.default_rng(0).integers(0, N_VOCAB, 24)
KEYS = {
    "context_length": 64,
    "embedding_length": N,
    "block_count": N_LAYER,
    "feed_forward_length": N_FF,
    "attention.head_count": 0,
    "wkv.head_size": SIZE,
    "attention.decay_lora_rank": RANKS["w"],
    "attention.iclr_lora_rank": RANKS["a"],
    "attention.value_residual_mix_lora_rank": RANKS["v"],
    "attention.gate_lora_rank": RANKS["g"],
    "vocab_size": N_VOCAB,
}


def shapes() -> dict[str, tuple[int, ...]]:
    found = {"token_embd.weight": (N_VOCAB, N), "output.weight": (N_VOCAB, N)}
    for norm in ("token_embd_norm", "output_norm"):
        found |= {f"{norm}.weight": (N,), f"{norm}.bias": (N,)}
    for i in range(N_LAYER):
        block = {"time_mix_lerp_fused.weight": (6, 1, 1, N), "channel_mix_lerp_k.weight": (N,)}
        for norm in ("attn_norm", "attn_norm_2", "time_mix_ln"):
            block |= {f"{norm}.weight": (N,), f"{norm}.bias": (N,)}
        for x, rank in RANKS.items():
            rank = RANKS["a"] if x == "v" and i == 0 else rank
            block |= {f"time_mix_{x}1.weight": (rank, N), f"time_mix_{x}2.weight": (N, rank)}
            block |= {f"time_mix_{x}0.weight": (N,)} if x != "g" else {}
        block |= {f"time_mix_{x}.weight": (N,) for x in ("k_k", "k_a", "r_k")}
        for x in ("receptance", "key", "value", "output"):
            block[f"time_mix_{x}.weight"] = (N, N)
        block |= {"channel_mix_key.weight": (N_FF, N), "channel_mix_value.weight": (N, N_FF)}
        found |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    return found


def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Matrices exact in float16, lerps and norms from 0.1 to 1.5, other vectors around 0."""
    arrays = {}
    for name, shape in shapes().items():
        x = rng.standard_normal(shape) * (1.0 if "embd" in name else 1.5 / N**0.5)
        if "norm.weight" in name or "norm_2.weight" in name or "_k" in name or "lerp" in name:
            x = rng.uniform(0.1, 1.5, shape)
        arrays[name] = x.astype(np.float16).astype(np.float32)
    return arrays


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def norm(x: np.ndarray, eps: float) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def layer_norm(x: np.ndarray, w: dict, name: str) -> np.ndarray:
    return norm(x, 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def before(x: np.ndarray) -> np.ndarray:
    """Each token's predecessor, zeros before the first."""
    return np.concatenate([np.zeros((1, N)), x[:-1]])


def time_mix(x: np.ndarray, w: dict, first: list) -> np.ndarray:
    def low_rank(letter: str, x: np.ndarray, inner=lambda x: x) -> np.ndarray:
        y = inner(x @ w[f"{letter}1.weight"].T) @ w[f"{letter}2.weight"].T
        return y + w.get(f"{letter}0.weight", 0)

    shift = before(x) - x
    xr, xw, xk, xv, xa, xg = (x + shift * lerp for lerp in w["lerp_fused.weight"].reshape(6, N))
    r, k, v = (y @ w[f"{m}.weight"].T for y, m in ((xr, "receptance"), (xk, "key"), (xv, "value")))
    if first:
        v = v + (first[0] - v) * sigmoid(low_rank("v", xv))
    else:
        first.append(v)
    decay = np.exp(-0.606531 * sigmoid(low_rank("w", xw, np.tanh)))
    a, gate = sigmoid(low_rank("a", xa)), low_rank("g", xg, sigmoid)
    heads = (len(x), N // SIZE, SIZE)
    removed = (k * w["k_k.weight"]).reshape(heads)
    removed = removed / np.linalg.norm(removed, axis=-1, keepdims=True)
    k = k * (1 + (a - 1) * w["k_a.weight"])
    r, k, v, a, decay = (y.reshape(heads) for y in (r, k, v, a, decay))
    state, out = np.zeros((N // SIZE, SIZE, SIZE)), np.empty(heads)
    for t in range(len(x)):
        old = np.einsum("hij,hj->hi", state, removed[t])
        state = state * decay[t, :, None] - old[:, :, None] * (removed[t] * a[t])[:, None]
        state += v[t, :, :, None] * k[t, :, None]
        out[t] = np.einsum("hij,hj->hi", state, r[t])
    y = norm(out, 64e-5).reshape(len(x), N) * w["ln.weight"] + w["ln.bias"]
    bonus = (r * k * w["r_k.weight"].reshape(heads[1:])).sum(-1, keepdims=True) * v
    return ((y + bonus.reshape(len(x), N)) * gate) @ w["output.weight"].T


def logits(arrays: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    w = {name: a.astype(np.float64) for name, a in arrays.items()}
    x, first = layer_norm(w["token_embd.weight"][tokens], w, "token_embd_norm"), []
    for i in range(N_LAYER):
        at = f"blk.{i}."
        own = {n.removeprefix(f"{at}time_mix_"): a for n, a in w.items() if n.startswith(at)}
        x = x + time_mix(layer_norm(x, w, f"{at}attn_norm"), own, first)
        y = layer_norm(x, w, f"{at}attn_norm_2")
        y = y + (before(y) - y) * w[f"{at}channel_mix_lerp_k.weight"]
        y = np.maximum(y @ w[f"{at}channel_mix_key.weight"].T, 0) ** 2
        x = x + y @ w[f"{at}channel_mix_value.weight"].T
    return layer_norm(x, w, "output_norm") @ w["output.weight"].T


def main() -> None:
    arrays = draw(np.random.default_rng(0))
    writer = gguf.GGUFWriter(HERE / "rwkv7.gguf", "rwkv7")
    for key, value in KEYS.items():
        writer.add_uint32(f"rwkv7.{key}", value)
    writer.add_float32("rwkv7.attention.layer_norm_epsilon", 1e-5)
    writer.add_tokenizer_model("no_vocab")
    for name, array in arrays.items():
        writer.add_tensor(name, array.astype(np.float16) if array.ndim == 2 else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.save(HERE / "rwkv7.npy", logits(arrays, TOKENS).astype(np.float32))


if __name__ == "__main__":
    main()
