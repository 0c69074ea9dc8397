"""Kernels of tensor cores without a card: Numba's simulator, with twins of what it lacks."""

import numpy as np
import pytest

from pyggml import ops as matrix_ops
from pyggml.backends.cpu import CPU
from pyggml.backends.cuda import open_cuda
from pyggml.backends.cuda.attention import tensor_back
from pyggml.backends.cuda.gemm import grouped
from pyggml.backends.cuda.ops.experts import products as experts
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.toolkit import SIMULATED
from pyggml.graph import Graph
from pyggml.graph.dtypes import DTYPES
from pyggml.graph.tensor import as_leaf, leaf
from pyggml.ops import OPS
from pyggml.quants import dequantize, quantize
from pyggml.runtime import Devices, results

pytestmark = pytest.mark.skipif(not SIMULATED, reason="a card has tensor cores")


@pytest.fixture
def rounding(monkeypatch):
    """The simulated card, with products in bfloat16."""
    from warps import as_instructions

    as_instructions(monkeypatch)
    return open_cuda(0, "bf16")


def close(found, wanted, allowed=1e-2):
    assert np.linalg.norm(found - wanted) <= allowed * np.linalg.norm(wanted)


@pytest.mark.parametrize("name", ["flash_attn_ext", "flash_attn_back"])
def test_attention(rounding, name):
    rng = np.random.default_rng(2)
    n, n_heads, n_key_heads, size = 18, 2, 1, 64  # whose heads are two parts of dk and dv
    q, k, v, do = (
        rng.standard_normal((n, h, size), np.float32)
        for h in (n_heads, n_key_heads, n_key_heads, n_heads)
    )
    first = np.where(np.arange(n) < 9, 0, 9)  # two documents
    span = np.stack([first, np.arange(n) + 1], axis=1).astype(np.int32)
    params = {"scale": size**-0.5, "cap": 0.0, "max_bias": 0.0, "masked": False, "longest": 0}
    forward = OPS["flash_attn_ext"](*map(as_leaf, (q, k, v, span)), **params)
    if name == "flash_attn_ext":
        nodes = forward, *forward.saved
    else:
        o, lse = results(Graph.of(forward, *forward.saved), Devices([CPU()]))
        node = OPS[name](*map(as_leaf, (q, k, v, span, o, lse, do)), **params)
        nodes = node, *node.saved
    wanted = results(Graph.of(*nodes), Devices([CPU()]))
    found = results(Graph.of(*nodes), Devices([rounding, CPU()]))
    for a, b in zip(found, wanted, strict=True):
        close(a, b)


def test_blocks_begin_with_the_groups_that_have_most_to_do():
    range_of = np.int32([0, 64, 32, 192, 64, 128, 128, 192])  # of 64 keys each
    first = np.arange(200) // 150 * 150  # two documents
    span = np.stack([first, np.arange(200) + 1], axis=1).astype(np.int32)
    orders, lengths = np.zeros(8, np.int32), np.zeros(8, np.int32)
    arrays = [cuda.to_device(a) for a in (orders, lengths, range_of, span.reshape(-1))]
    tensor_back._find_order[2, 4](*arrays, 200, 256)
    assert arrays[0].copy_to_host().tolist() == [1, 0, 2, 3, 2, 1, 0, 3]


@pytest.mark.parametrize(("name", "kind"), [("mul_mat_id", "Q4_K"), ("mul_mat_id_back", "Q8_0")])
def test_products_with_a_weight_per_expert(rounding, monkeypatch, name, kind):
    monkeypatch.setattr(grouped, "LANES", 32)
    monkeypatch.setattr(grouped, "most_shared", lambda: 227 << 10)
    for constant, n in (("_SORTERS", 64), ("_SORTING_WARPS", 2), ("_COUNTS", 3)):
        monkeypatch.setattr(grouped, constant, n)  # threads are what costs time here
    rng, (n_experts, n, k) = np.random.default_rng(3), (2, 64, 256)
    values = rng.standard_normal((n_experts * n, k), np.float32)
    packed = quantize(values, kind)
    w = leaf(packed.view(DTYPES[kind].numpy).reshape(n_experts, n, -1), dtype=DTYPES[kind])
    plain = dequantize(packed, kind).reshape(n_experts, n, k)
    ids = np.where(np.arange(67) % 3 == 0, 1, 0).astype(np.int32)[:, None]
    x = rng.standard_normal((67, 1, k if name == "mul_mat_id" else n), np.float32)
    node = getattr(matrix_ops, name)(w, leaf(x), leaf(ids))
    assert experts._scratch(node, "bf16"), "no tile"
    (product,) = results(Graph.of(node), Devices([rounding, CPU()]))
    formula = "tuk,tunk->tun" if name == "mul_mat_id" else "tun,tunk->tuk"
    close(product, np.einsum(formula, x, plain[ids]))


@pytest.mark.parametrize("n_bytes", [99, 227])
def test_tiles_fit_the_shared_memory_of_a_block(monkeypatch, n_bytes):
    """99 KiB are those of cards for games, where BF16 backward has one place for packed weights."""
    monkeypatch.setattr(grouped, "most_shared", lambda: n_bytes << 10)
    for kind, is_forward in (("Q8_0", True), ("Q6_K", False), ("BF16", False), ("F16", False)):
        tile = grouped.tile_of(kind, is_forward, 65536, 128)
        assert tile is not None and tile.n_bytes(kind) <= n_bytes << 10
