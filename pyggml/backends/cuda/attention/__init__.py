"""Attention on the card: the exact kernels, in float32."""

from pyggml.backends.cuda.attention import exact, exact_back
from pyggml.backends.cuda.attention.scores import WIDEST
from pyggml.backends.cuda.kernel import Kernel
from pyggml.backends.cuda.table import declare
from pyggml.tensors import Tensor


def _lacks(node: Tensor) -> str | None:
    size = node.src[0].shape[2]
    return f"heads of {size} numbers, wanted {WIDEST} at most" if size > WIDEST else None


declare("flash_attn_ext", Kernel(exact.bind, lacks=_lacks))
declare("flash_attn_back", Kernel(exact_back.bind, lacks=_lacks, scratch=exact_back.scratch))
