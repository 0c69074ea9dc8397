"""gpt2 and starcoder (StarCoder 1). Learned positions; layer norms; q, k and v in one matrix; a
feed-forward without a gate. In starcoder all query heads share one key and value head."""

from pyggml.models.architecture import Architecture
from pyggml.models.basics import read_basics
from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part
from pyggml.ops import gelu


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope=None, layer_norm=("weight", "bias"), fused_qkv=True)

    def block(i: int) -> Part:
        return b.pre_norm(b.attention(i), b.plain(i, gelu))

    return b.decoder(block, n_positions=b.config.n_ctx)


GPT2 = Architecture("gpt2", _decoder, {})
STARCODER = Architecture("starcoder", _decoder, {"attention.head_count_kv": 1})
