"""Attention on the card: for few queries by keys, on tensor cores where scores have no extras,
else exactly, by tiles."""

from __future__ import annotations

from pyggml.backends.cuda.attention import decode, exact, exact_back, tensor, tensor_back
from pyggml.backends.cuda.attention.scores import WIDEST
from pyggml.backends.cuda.runtime.kernel import Compute, Kernel, Site
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor


def _lacks(node: Tensor) -> str | None:
    size = node.src[0].shape[2]
    return f"heads of {size} numbers, wanted {WIDEST} at most" if size > WIDEST else None


def _forward(site: Site) -> Call:
    if decode.takes(site.node):
        return decode.bind(site)
    takes = tensor.takes(site.node, site.compute)
    return tensor.bind(site) if takes else exact.bind(site)


def _forward_scratch(node: Tensor, compute: Compute) -> int:
    if decode.takes(node):
        return decode.scratch(node)
    return tensor.scratch(node) if tensor.takes(node, compute) else 0


def _backward(site: Site) -> Call:
    takes = tensor.takes(site.node, site.compute)
    return tensor_back.bind(site) if takes else exact_back.bind(site)


def _backward_scratch(node: Tensor, compute: Compute) -> int:
    takes = tensor.takes(node, compute)
    return tensor_back.scratch(node) if takes else exact_back.scratch(node, compute)


declare("flash_attn_ext", Kernel(_forward, lacks=_lacks, scratch=_forward_scratch))
declare("flash_attn_back", Kernel(_backward, lacks=_lacks, scratch=_backward_scratch))
