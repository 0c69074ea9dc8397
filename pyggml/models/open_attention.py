"""Attention with its pattern as a tensor of the graph, for those who look at it or change it.

The fused op keeps no pattern. This one takes memory for every pair of tokens.
"""

import numpy as np

from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Tensor, leaf
from pyggml.models.net import Net
from pyggml.ops import (
    add,
    cont,
    cpy,
    mul,
    mul_mat,
    narrow,
    permute,
    repeat,
    reshape,
    scale,
    soft_max,
    step,
    sub,
    tanh,
)

_UNSEEN = 1e30  # less of a score than e^x has numbers for


def open_attention(
    net: Net,
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Tensor,
    factor: float,
    *,
    logit_softcap: float = 0.0,
    max_bias: float = 0.0,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What `flash_attn_ext` gives of these (T, n, size_v), of which `name` is the pattern.

    The pattern is (T, n, S) for S keys: row t of a head has the weights of what token t reads. One
    that is changed reads no rows of a cache but those of the token's sequence, up to itself.
    """
    k, v = (x if x.dtype is F32 else cpy(x, F32) for x in (k, v))
    scores = mul_mat(_by_head(k), _by_head(q))  # (n, T, S)
    if logit_softcap:
        scores = scale(tanh(scale(scores, factor / logit_softcap)), logit_softcap)
    biased = bool(max_bias) and mask is None
    bias = net.once(("open", span, biased), lambda: _bias(span, k.shape[0], biased))
    bias = bias if mask is None else add(bias, mask)
    p = soft_max(scores, bias, 1.0 if logit_softcap else factor, max_bias, sinks)
    before = cont(permute(p, (1, 0, 2)))
    p = net.tap(name, before, q.shape[1])
    if net.cache is not None and p is not before:
        own, n_keys = net.inputs.span, k.shape[0]
        bias = net.once(("open", own, False), lambda: _bias(own, n_keys, False))
        p = mul(p, reshape(step(scale(bias, 1.0, 1.0)), (-1, 1, n_keys)))
    values = cont(permute(v, (1, 2, 0)))  # (n_kv, size_v, S)
    return cont(permute(mul_mat(values, _by_head(p)), (1, 0, 2)))


def _by_head(x: Tensor) -> Tensor:
    """(T, n, size) as (n, T, size)."""
    return cont(permute(x, (1, 0, 2)))


def _bias(span: Tensor, n_keys: int, biased: bool) -> Tensor:
    """What is added to scores (T, S): nothing in each token's span and −10³⁰ elsewhere; of ALiBi
    before its slopes, less the distance from the token."""
    limits = cpy(span, F32)
    first, end = (narrow(limits, 1, i, 1) for i in range(2))
    keys = repeat(leaf(np.arange(n_keys, dtype=np.float32)[None]), (span.shape[0], n_keys))
    after = step(scale(sub(keys, cont(first)), 1.0, 0.5))
    ahead = sub(keys, cont(end))  # −1 of the token itself
    seen = mul(after, step(scale(ahead, -1.0, -0.5)))
    bias = scale(seen, _UNSEEN, -_UNSEEN)
    return add(bias, scale(mul(ahead, seen), 1.0, 1.0)) if biased else bias
