"""deepseek2-ocr: the text of DeepSeek OCR. Plain attention; after the first layers, experts beside
a shared one."""

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics
from pyggml.models.experts import EXAMPLE, read_dense_first
from pyggml.models.latent import scale_of
from pyggml.models.rope import Rope


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    heads, base = b.heads[0], r.number("rope.freq_base", 1e4, 1e4, 1e4)
    for key, there, value in (
        ("head_count_kv", heads.n_kv, heads.n),
        ("key_length", heads.size, b.config.n_embd // max(heads.n, 1)),
    ):
        if there != value:
            r.faults.append(f"deepseek2-ocr.attention.{key} is {there}, wanted {value}")
    rope = Rope(mode="neox", n_dims=heads.size // 2 * 2, freq_base=base)
    scale = scale_of(b.rotary, heads.size)
    feed_forward = read_dense_first(r, b, default=1)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i, rope=rope, scale=scale), feed_forward[i])

    return b.decoder(block, adapts_output=False)


DEEPSEEK2_OCR = Architecture("deepseek2-ocr", _decoder, EXAMPLE | {"attention.head_count_kv": 4})
