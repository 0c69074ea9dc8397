"""deepseek2: DeepSeek 2 to 3.1, Kimi K2, GLM 4.7 Flash, GigaChat 3, Kanana 2 and Youtu; mistral4:
Mistral Small 4. Latent attention; after the first layers, experts beside a shared one. The text of
deepseek2-ocr has plain attention instead.

Files made before attention had its matrices apart have attn_kv_b instead of attn_k_b and attn_v_b.
"""

from dataclasses import replace
from functools import partial

from pyggml.models.architecture import Architecture
from pyggml.models.basics import Basics, read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.experts import EXAMPLE, SIGMOID, read_dense_first
from pyggml.models.latent import EXAMPLE as LATENT_EXAMPLE
from pyggml.models.latent import LatentAttention, read_latent, scale_of
from pyggml.models.part import Part
from pyggml.models.rope import Rope, Temperature


def _decoder(r: Reader, mistral: bool) -> Decoder:
    b = read_basics(r, rope="normal", own_values=True)
    attention = _attention(r, b, mistral)
    feed_forward = read_dense_first(r, b, default=SIGMOID if _is_glm(b) else 1)
    return b.decoder(lambda i: b.pre_norm(attention, feed_forward[i]), adapts_output=False)


def _ocr(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    assert b.rope is not None
    heads, base = b.heads[0], r.number("rope.freq_base", 1e4, 1e4, 1e4)
    for key, there, wanted in (
        ("head_count_kv", heads.n_kv, heads.n),
        ("key_length", heads.size, b.config.n_embd // max(heads.n, 1)),
    ):
        if there != wanted:
            r.faults.append(f"deepseek2-ocr.attention.{key} is {there}, wanted {wanted}")
    rope = Rope(mode="neox", n_dims=heads.size // 2 * 2, freq_base=base)
    scale = scale_of(b.rope, heads.size)
    feed_forward = read_dense_first(r, b, default=1)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, rope=rope, scale=scale), feed_forward[i])

    return b.decoder(block, adapts_output=False)


def _attention(r: Reader, b: Basics, mistral: bool) -> LatentAttention:
    assert b.rope is not None
    lite = b.config.n_layer in (26, 27) or (b.config.n_layer, b.config.n_vocab) == (48, 128256)
    q_rank = 0 if lite else r.count("attention.q_lora_rank", least=0, most=1 << 14)
    # The file has a tenth of it. DeepSeek's own magnitude cancels all but a factor of 1.
    multiplier = 10 * r.number("rope.scaling.yarn_log_multiplier", 0.0, 0.0, 1e3)
    rope = b.rope.divided_by_yarn(multiplier if mistral else float(multiplier > 0))
    attention = read_latent(r, b, q_rank=q_rank, rope=rope)
    strength = r.number("attention.temperature_scale", 0.0, 0.0, 1e3)
    every = r.count("attention.temperature_length", 0, least=1, most=1 << 24) if strength else 0
    return replace(
        attention,
        scale=scale_of(rope, attention.size, multiplier),
        temperature=Temperature(strength, every) if strength else None,
    )


def _is_glm(b: Basics) -> bool:
    """Files of GLM 4.7 Flash without the key of the router's function."""
    return b.config.n_layer in (47, 48) and b.config.n_vocab == 154880


DEEPSEEK2_OCR = Architecture("deepseek2-ocr", _ocr, EXAMPLE | {"attention.head_count_kv": 4})
DEEPSEEK2 = Architecture("deepseek2", partial(_decoder, mistral=False), EXAMPLE | LATENT_EXAMPLE)
MISTRAL4 = Architecture("mistral4", partial(_decoder, mistral=True), EXAMPLE | LATENT_EXAMPLE)
