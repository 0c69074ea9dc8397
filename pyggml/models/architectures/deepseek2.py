"""deepseek2: DeepSeek 2 to 3.1, Kimi K2, GLM 4.7 Flash, GigaChat 3, Kanana 2 and Youtu; mistral4:
Mistral Small 4. Latent attention; after the first layers, experts beside a shared one.

Files made before attention had its matrices apart have attn_kv_b instead of attn_k_b and attn_v_b.
"""

from dataclasses import replace
from functools import partial

from pyggml.models.architecture import Architecture, Decoder, Reader
from pyggml.models.basics import Basics, read_basics
from pyggml.models.experts import EXAMPLE, SIGMOID, read_dense_first
from pyggml.models.latent import EXAMPLE as LATENT_EXAMPLE
from pyggml.models.latent import LatentAttention, read_latent, scale_of
from pyggml.models.rope import read_temperature


def _decoder(r: Reader, mistral: bool) -> Decoder:
    b = read_basics(r, rope="normal", own_values=True)
    attention = _attention(r, b, mistral)
    feed_forward = read_dense_first(r, b, default=SIGMOID if _is_glm(b) else 1)
    return b.decoder(lambda i: b.pre_norm(attention, feed_forward[i]), adapts_output=False)


def _attention(r: Reader, b: Basics, mistral: bool) -> LatentAttention:
    lite = b.config.n_layer in (26, 27) or (b.config.n_layer, b.config.n_vocab) == (48, 128256)
    q_rank = 0 if lite else r.count("attention.q_lora_rank", least=0, most=1 << 14)
    # The file has a tenth of it. DeepSeek's own magnitude cancels all but a factor of 1.
    multiplier = 10 * r.number("rope.scaling.yarn_log_multiplier", 0.0, 0.0, 1e3)
    rope = b.rotary.divided_by_yarn(multiplier if mistral else float(multiplier > 0))
    attention = read_latent(r, b, q_rank=q_rank, rope=rope)
    scale = scale_of(rope, attention.size, multiplier)
    return replace(attention, scale=scale, temperature=read_temperature(r))


def _is_glm(b: Basics) -> bool:
    """Files of GLM 4.7 Flash without the key of the router's function."""
    return b.config.n_layer in (47, 48) and b.config.n_vocab == 154880


DEEPSEEK2 = Architecture("deepseek2", partial(_decoder, mistral=False), EXAMPLE | LATENT_EXAMPLE)
MISTRAL4 = Architecture("mistral4", partial(_decoder, mistral=True), EXAMPLE | LATENT_EXAMPLE)
