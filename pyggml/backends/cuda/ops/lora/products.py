"""Products of a wide matrix: W is unpacked beside the thin factors, and cuBLAS multiplies.

Forward has B to the right of W, backward A below it, in rows equally far apart. So one matrix
serves both, where W stays unpacked: a run then places the thin factors alone. Matrices whose
gradients are one product lie below each other.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from pyggml.backends.cuda.gemm.cublas import multiply
from pyggml.backends.cuda.ops.lora.wide import columns, places_beside
from pyggml.backends.cuda.ops.products import adding
from pyggml.backends.cuda.runtime.kernel import Compute, CudaKernel, CudaSite, is_of
from pyggml.backends.cuda.runtime.launches import in_turn
from pyggml.backends.cuda.weights.unpack import Thin, place_thin, unpacked_beside
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16
from pyggml.graph.tensor import Tensor

Each = TypeVar("Each")


def split_sources(src: Sequence[Each]) -> tuple[Sequence[Each], Each, Sequence[Each]]:
    """The sources of a product as (each W, its wide left factor, each thin factor), but for what it
    is added to."""
    n = (len(src) - 1) // 2
    return src[-2 * n - 1 : -n - 1], src[-n - 1], src[-n:]


def lasting_bytes(node: Tensor) -> tuple[tuple[int, ...], int]:
    """(Bytes that each W takes where it stays unpacked, with the further columns of all products of
    its x; bytes of the further rows of their factors, which lie below all W)."""
    weights, x, factors = split_sources(node.src)
    is_forward = "first" in node.params
    row = BF16.block_bytes * int(x.shape[1] if is_forward else node.params["step"])
    ranks = (factor.shape[1 if is_forward else 0] for factor in factors)
    return tuple(row * w.shape[0] for w in weights), row * sum(map(columns, ranks))


def _lasting(node: Tensor) -> Iterator[tuple[int, int]]:
    for i, place in enumerate(node.params["unpacked"], _first(node)):
        yield i, place.share


def _first(node: Tensor) -> int:
    """The index of the first W."""
    return int(is_of(node, "wide_back_add"))


def _memory(site: CudaSite, n_bytes: int) -> tuple[Any, list[bool | None]]:
    """(Memory of all W in bfloat16; whether each has to be unpacked now, None if in every run)."""
    places = site.node.params["unpacked"]
    if not places:
        return site.scratch[:n_bytes].view(np.uint16), [None] * len(split_sources(site.src)[0])
    every = [site.lasting(i, p.n_bytes, p) for i, p in enumerate(places, _first(site.node))]
    (memory, _), *_ = every
    if "first" not in site.node.params:  # backward all of it is read
        memory = places[0].piece.array
    return memory.view(np.uint16), [is_new for _, is_new in every]


def _fill(
    site: CudaSite, i: int, is_new: bool | None, right: Any, step: int, thin: Any, place: Thin
) -> Call:
    """A call that unpacks W, the i-th, to where `right` begins, in rows `step` apart, and a thin
    factor to its place; or where W lasts, the factor alone."""
    at = _first(site.node) + i
    w, packed = site.node.src[at], site.src[at].view(np.uint8)
    (_, k), stream = w.shape, site.stream
    whole = unpacked_beside(right, packed, w.dtype, stream, k, step - k, thin, place)
    if is_new is None:
        return whole
    if is_new:
        site.once(whole)
    return place_thin(right, thin, place, stream)


def _forward_bytes(node: Tensor) -> int:
    (n_bytes,), _ = lasting_bytes(node)
    return n_bytes


def _forward(site: CudaSite) -> Call:
    """y = X·[W | 0 … B … 0]ᵀ."""
    w, x, b = site.node.src
    (n, k), (m, step), rank = w.shape, x.shape, b.shape[1]
    first, n_columns = site.node.params["first"], site.node.params["columns"]
    place = Thin(n, rank, k, step, n, n_columns, first)
    right, (is_new,) = _memory(site, _forward_bytes(site.node))
    call = _fill(site, 0, is_new, right, step, site.src[2], place)
    sizes, form = (m, n, k + n_columns), (True, step)
    product = multiply(site.stream, sizes, site.src[1], form, right, form, site.out, n, False)
    return in_turn(call, product)


def _back_bytes(node: Tensor) -> int:
    sizes, below = lasting_bytes(node)
    return sum(sizes) + below


def _back_product(site: CudaSite, accumulate: bool) -> Call:
    """dx (+)= D·[W ; A], each W below the others, and below them each A."""
    weights, d, factors = split_sources(site.node.src)
    (m, d_step), k, step = d.shape, weights[0].shape[1], site.node.params["step"]
    _, left, thin = split_sources(site.src)
    ranks = [a.shape[0] for a in factors]
    begins, furthers = places_beside([w.shape[0] for w in weights], ranks)
    right, are_new = _memory(site, _back_bytes(site.node))
    calls = []
    for i, (rank, is_new) in enumerate(zip(ranks, are_new, strict=True)):
        below = (furthers[i] - begins[i]) * step
        place = Thin(rank, k, below, step, columns(rank), k)
        calls.append(_fill(site, i, is_new, right[begins[i] * step :], step, thin[i], place))
    sizes = m, k, furthers[-1] + columns(ranks[-1])
    of_d, of_w = (True, d_step), (False, step)
    product = multiply(site.stream, sizes, left, of_d, right, of_w, site.out, k, accumulate)
    return in_turn(*calls, product)


def _back(site: CudaSite) -> Call:
    return _back_product(site, accumulate=False)


def _back_added(site: CudaSite) -> Call:
    return adding(site, _back_product(site, accumulate=True))


def _forward_scratch(node: Tensor, compute: Compute) -> int:
    return 0 if node.params["unpacked"] else _forward_bytes(node)


def _back_scratch(node: Tensor, compute: Compute) -> int:
    return 0 if node.params["unpacked"] else _back_bytes(node)


FORWARD = CudaKernel(_forward, scratch=_forward_scratch, lasting=_lasting)
BACK = CudaKernel(_back, scratch=_back_scratch, lasting=_lasting)
BACK_ADD = CudaKernel(_back_added, scratch=_back_scratch, lasting=_lasting)
