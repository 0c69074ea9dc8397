"""gemma, gemma2, gemma3 and gemma-embedding. Embeddings are scaled by √n_embd; gates are GELUs. A
norm weight in a file is the published one plus 1."""

from dataclasses import replace

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import WINDOWS, Basics, read_basics, read_windows
from pyggml.models.classifier import read_dense
from pyggml.models.rope import read_local_rope
from pyggml.ops import geglu


def _gemma(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i), b.gated_mlp(i, geglu))

    return b.decoder(block, embedding_scale=b.config.n_embd**0.5)


def _gemma2(r: Reader) -> Decoder:
    """Scores and logits are capped; every other layer has a window."""
    b = read_basics(r, rope="neox")
    local = replace(
        b.rotary, freq_base=r.number("rope.freq_base_swa", b.rotary.freq_base, 1.0, 1e12)
    )
    windows = read_windows(r, b, 2, window=4096, rope=local)
    usual = {
        "scale": _score_scale(b, n_layer_largest=46),
        "softcap": r.number("attn_logit_softcapping", 50.0, 1e-3, 1e6),
    }

    def block(i: int) -> Part:
        attention = b.attention(i, **usual, **windows[i])
        return b.sandwich_norms(attention, b.gated_mlp(i, geglu))

    cap = r.number("final_logit_softcapping", 30.0, 1e-3, 1e6)
    return b.decoder(block, embedding_scale=b.config.n_embd**0.5, logit_softcap=cap)


def _gemma3(r: Reader) -> Decoder:
    """Heads of q and k are normalised; layers with a window have a rotary base of their own."""
    b = read_basics(r, rope="neox")
    base = r.number("rope.freq_base_swa", 10000.0, 1.0, 1e12)
    local = replace(b.rotary, freq_base=base, freq_scale=1.0)
    windows = read_windows(r, b, 6, window=0, rope=local)
    scale = _score_scale(b, n_layer_largest=62)

    def block(i: int) -> Part:
        attention = b.attention(i, scale=scale, **b.head_norms(i), **windows[i])
        return b.sandwich_norms(attention, b.gated_mlp(i, geglu))

    cap = r.number("final_logit_softcapping", 0.0, 0.0, 1e6)
    return b.decoder(block, embedding_scale=b.config.n_embd**0.5, logit_softcap=cap)


def _gemma_embedding(r: Reader) -> Decoder:
    """As gemma3, but it sees both ways, and half of a window's tokens on either side."""
    b = read_basics(r, rope="neox", causal=False)
    local = read_local_rope(r, b.rotary, b.heads[0].size)
    windows = read_windows(r, b, 6, rope=local)

    def block(i: int) -> Part:
        attention = b.attention(i, **b.head_norms(i), **windows[i], symmetric=True)
        return b.sandwich_norms(attention, b.gated_mlp(i, geglu))

    more = {"has_output": False, "dense": read_dense(r, b.config), "unread": ("output.weight",)}
    return b.decoder(block, embedding_scale=b.config.n_embd**0.5, **more)


def _score_scale(b: Basics, n_layer_largest: int) -> float:
    """1/√(length of a head); in the largest model, recognised by its layers, 1/√(n_embd/n_head)."""
    largest = b.config.n_layer == n_layer_largest
    length = b.config.n_embd // b.heads[0].n if largest else b.heads[0].size
    return float(max(length, 1) ** -0.5)


GEMMA = Architecture("gemma", _gemma, {})
GEMMA2 = Architecture("gemma2", _gemma2, {"attention.sliding_window": 8})
GEMMA3 = Architecture("gemma3", _gemma3, WINDOWS)
GEMMA_EMBEDDING = Architecture("gemma-embedding", _gemma_embedding, WINDOWS, embeds=True)
