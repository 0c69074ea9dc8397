"""Attention on the card: for few queries by keys, on tensor cores where heads have a size of theirs
and scores no mask or slope, else exactly, by tiles. Where values are of another size or type than
keys, always by tiles. In the order in which they are read:

scores.py         what scores are made of, which keys a query sees, what ends a row of scores
exact.py          float32, by tiles, forward and backward: any head, type of cache, mask and slope
fragments.py      tiles of 16-bit numbers and their products, by a warp or by four together
tensor.py         forward on tensor cores, in training and over caches
tensor_back.py    its gradient
decode.py         few queries, with keys.py, spread.py (sums over a warp), one_token.py (heads that
                  the kernel makes) and joins.py (parts of a result)
"""

from collections.abc import Callable
from dataclasses import dataclass

from pyggml.backends.cuda.attention import decode, exact, tensor, tensor_back
from pyggml.backends.cuda.attention.scores import WIDEST
from pyggml.backends.cuda.runtime.kernel import Compute, CudaKernel
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.tensor import Tensor


@dataclass(frozen=True, slots=True)
class CudaAttentionPath:
    """A way to compute attention, and its gradient, of the nodes that it takes."""

    takes: Callable[[Tensor, Compute], bool]
    forward: CudaKernel
    backward: CudaKernel


_EXACTLY = CudaKernel(exact.bind_back, scratch=exact.scratch_back)
DECODE = CudaAttentionPath(decode.takes, CudaKernel(decode.bind, scratch=decode.scratch), _EXACTLY)
TENSOR = CudaAttentionPath(
    tensor.takes,
    CudaKernel(tensor.bind, scratch=tensor.scratch),
    CudaKernel(tensor_back.bind, scratch=tensor_back.scratch),
)
CACHED = CudaAttentionPath(
    tensor.takes_cache, CudaKernel(tensor.bind_cache, scratch=tensor.scratch_of_cache), _EXACTLY
)
EXACT = CudaAttentionPath(lambda node, compute: True, CudaKernel(exact.bind), _EXACTLY)
PATHS = DECODE, TENSOR, CACHED, EXACT


def path_of(node: Tensor, compute: Compute) -> CudaAttentionPath:
    """The path of an attention or its gradient: the first that takes it."""
    return next(path for path in PATHS if path.takes(node, compute))


def _kernel(node: Tensor, compute: Compute) -> CudaKernel:
    assert node.op is not None
    path = path_of(node, compute)
    return path.forward if node.op.name == "flash_attn_ext" else path.backward


def _lacks(node: Tensor) -> str | None:
    size = max(t.shape[2] for t in node.src[1:3])
    return f"heads of {size} numbers, wanted {WIDEST} at most" if size > WIDEST else None


for _name in ("flash_attn_ext", "flash_attn_back"):
    declare(
        _name,
        lambda site: _kernel(site.node, site.compute).bind(site),
        lacks=_lacks,
        scratch=lambda node, compute: _kernel(node, compute).scratch(node, compute),
    )
