"""Small random encoders and rerankers, and llama.cpp's embeddings and scores of them.

    python -m llama_embeddings     (in tests/support; needs llama_cpp)

writes tests/golden/embeddings.npz: of each case the vectors, or the scores, of TEXTS. The models
are not kept: their numbers depend on the names of their tensors only.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tiny_models

GOLDEN = Path(__file__).parents[1] / "golden/embeddings.npz"
N_VOCAB, N = 40, 64
TEXTS = [np.arange(n) * (3 + 2 * i) % N_VOCAB for i, n in enumerate((5, 23, 1, 12))]
SIZES = {
    "embedding_length": N,
    "feed_forward_length": 96,
    "rope.dimension_count": 16,
    "rope.freq_base": 1000.0,
}
TYPES = {"token_types.weight": (2, N)}
HEAD = {"cls.weight": (N, N), "cls.output.weight": (1, N)}
HEAD_BIASES = {"cls.bias": (N,), "cls.output.bias": (1,)}
BIASES = {
    f"blk.{i}.{name}.bias": (N,)
    for i in range(2)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down")
}
MORE_NORMS = {
    f"blk.{i}.{name}.{part}": (N,)
    for i in range(2)
    for name in ("attn_q_norm", "attn_k_norm", "attn_norm_2")
    for part in ("weight", "bias")
}
# By name of a case: architecture, pooling, tensors beside those that it requires.
CASES = {
    "bert": ("bert", "mean", TYPES | BIASES),
    "bert-rank": ("bert", "rank", TYPES | HEAD | HEAD_BIASES),
    "nomic-bert": ("nomic-bert", "mean", TYPES),
    "nomic-bert-moe": ("nomic-bert-moe", "mean", TYPES),
    "jina-bert-v2": ("jina-bert-v2", "mean", TYPES | BIASES),
    "jina-bert-v2-norms": ("jina-bert-v2", "cls", TYPES | BIASES | MORE_NORMS),
    "jina-bert-v3": ("jina-bert-v3", "cls", TYPES),
    "modern-bert": ("modern-bert", "mean", {}),
    "modern-bert-rank": ("modern-bert", "rank", HEAD | {"cls.norm.weight": (N,)}),
    "neo-bert": ("neo-bert", "cls", {}),
    "neo-bert-rank": ("neo-bert", "rank", HEAD),
    "eurobert": ("eurobert", "mean", {}),
    "gemma-embedding": ("gemma-embedding", "mean", {}),
    "gemma-embedding-dense": (
        "gemma-embedding",
        "mean",
        {"dense_2.weight": (96, N), "dense_3.weight": (N, 96)},
    ),
    "qwen3": ("qwen3", "last", {}),
    "qwen3-rank": ("qwen3", "rank", {"cls.output.weight": (2, N)}),
}


def write(path, name):
    """The model of a case; returns its path."""
    architecture, _, tensors = CASES[name]
    keys = {"attention.causal": architecture == "qwen3", "vocab_size": N_VOCAB}
    keys |= {"dense_2_feat_in": N, "dense_2_feat_out": 96, "dense_3_feat_in": 96}
    keys |= {"dense_3_feat_out": N} if "dense_2.weight" in tensors else {}
    keys = {f"{architecture}.{key}": value for key, value in keys.items()}
    keys |= {"tokenizer.ggml.token_type_count": 2} | tiny_models.NO_VOCABULARY
    if tensors.get("cls.output.weight", (1,))[0] == 2:
        keys[f"{architecture}.classifier.output_labels"] = ["yes", "no"]
    return tiny_models.write(path, architecture, SIZES, keys, tensors, N_VOCAB, tiny_models.scaled)


def golden(name, folder):
    """llama.cpp's vectors or scores (texts, n) of a case's model."""
    import llama_cpp as llama

    _, pooling, _ = CASES[name]
    path = write(Path(folder) / f"{name}.gguf", name)
    model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    n = llama.llama_model_n_cls_out(model) if pooling == "rank" else N
    found = [_of_text(llama, model, text, pooling, n) for text in TEXTS]
    llama.llama_model_free(model)
    return np.stack(found)


def _of_text(llama, model, text, pooling, n):
    how = llama.llama_context_default_params()
    how.n_ctx = how.n_batch = how.n_ubatch = 512
    how.embeddings, how.flash_attn_type, how.n_threads = True, 0, 1
    how.type_k = how.type_v = 0  # F32
    how.pooling_type = ("none", "mean", "cls", "last", "rank").index(pooling)
    context = llama.llama_init_from_model(model, how)
    batch = llama.llama_batch_init(len(text), 0, 1)
    batch.n_tokens = len(text)
    for i, token in enumerate(text):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), i, 1, 1
        batch.seq_id[i][0] = 0
    assert llama.llama_decode(context, batch) == 0
    vector = np.array(llama.llama_get_embeddings_seq(context, 0)[:n], np.float32)
    llama.llama_free(context)
    return vector


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        np.savez_compressed(GOLDEN, **{name: golden(name, folder) for name in CASES})
