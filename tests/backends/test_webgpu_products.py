"""Every way that WebGPU has to multiply, held to NumPy's float64."""

import numpy as np
import pytest

from pyggml.backends.cpu import CPU
from pyggml.backends.kit.products import Factor
from pyggml.graph import Graph
from pyggml.graph.dtypes import DTYPES
from pyggml.graph.tensor import leaf
from pyggml.ops import OPS
from pyggml.quants import QUANTS, dequantize, quantize
from pyggml.quants.base import NoPack
from pyggml.runtime import Devices, results


def product(gpu, p, a, b, before=None):
    """C of a product, whose factors lie in `a` and `b`, flat."""
    from pyggml.backends.webgpu.ops.products import ShaderOperands, multiply, scratch_bytes
    from pyggml.backends.webgpu.wgsl.shader import BufferRange

    c = np.zeros((p.m, p.n), np.float32) if before is None else before
    scratch = np.full(max(scratch_bytes(p, gpu.shaders), 64) // 4, np.nan, np.float32)
    views = []
    for array in (c, a, b, scratch):
        buffer = gpu.alloc(array.nbytes)
        gpu.device.queue.write_buffer(buffer, 0, array.tobytes())
        kind = "u8" if array.dtype == np.uint8 else "f32"
        views.append(BufferRange(buffer, 0, array.nbytes, kind, is_written=True))
    gpu._run(multiply(p, ShaderOperands(*views), gpu.shaders))
    return np.array(gpu._range(views[0].buffer, 0, c.nbytes)).view(np.float32).reshape(p.m, p.n)


def rows_of(flat, n_rows, k, f):
    """The factor as a matrix (rows, k)."""
    size = flat.itemsize
    return np.lib.stride_tricks.as_strided(flat, (n_rows, k), (size * f.row, size * f.k))


def near(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


ALONG_K, ALONG_ROWS = True, False
SHAPES = [  # (m, n, k): multiples of 4, and none
    (72, 96, 300),  # tiles; the sum over k in parts
    (65, 70, 301),
    (64, 128, 256),  # whole tiles
    (40, 8, 132),  # few rows of B
    (37, 13, 77),
    (8, 100, 52),  # of A
    (3, 33, 21),
]


@pytest.mark.parametrize("b_along_k", [ALONG_K, ALONG_ROWS])
@pytest.mark.parametrize("a_along_k", [ALONG_K, ALONG_ROWS])
@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_factors_in_either_order(size, a_along_k, b_along_k, gpu):
    from pyggml.backends.webgpu.ops.products import ShaderProblem

    (m, n, k), rng = size, np.random.default_rng(1)
    a, b = (rng.normal(size=rows * k).astype(np.float32) for rows in (m, n))
    of_a, of_b = (
        Factor(k, 1) if along_k else Factor(1, rows)
        for along_k, rows in ((a_along_k, m), (b_along_k, n))
    )
    before = rng.normal(size=(m, n)).astype(np.float32)
    wanted = rows_of(a.astype(float), m, k, of_a) @ rows_of(b.astype(float), n, k, of_b).T
    near(product(gpu, ShaderProblem(m, n, k, of_a, of_b), a, b), wanted)
    near(product(gpu, ShaderProblem(m, n, k, of_a, of_b, adds=True), a, b, before), before + wanted)


def test_large_tiles_and_one_part(gpu, monkeypatch):
    from pyggml.backends.webgpu.ops import products

    monkeypatch.setattr(products, "_TILES_OF_LARGE", 1)
    (m, n, k), rng = (140, 100, 68), np.random.default_rng(2)
    a, b = (rng.normal(size=(rows, k)).astype(np.float32) for rows in (m, n))
    p = products.ShaderProblem(m, n, k, Factor(k, 1), Factor(k, 1))
    assert products._tile_of(p, gpu.limit, False) == (products.LARGE, 1)
    near(product(gpu, p, a.reshape(-1), b.reshape(-1)), a.astype(float) @ b.T)


@pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])
@pytest.mark.parametrize("at_once", [64 << 20, 16 << 10], ids=["whole", "in parts"])
@pytest.mark.parametrize("name, size", [("Q8_0", (72, 96, 320)), ("F16", (37, 45, 130))])
def test_weights_are_rounded_to_float16_first(name, size, at_once, back, gpu, monkeypatch):
    from pyggml.backends.webgpu.ops import products

    monkeypatch.setattr(gpu.shaders, "in_f16", True)
    monkeypatch.setattr(gpu.shaders, "has_f16", False)
    monkeypatch.setattr(products, "_UNPACKED_BYTES", at_once)
    x, w, p, raw = rounded_problem(name, size, back, 1e-3)
    y = product(gpu, p, x.reshape(-1), raw)
    near(y, x.astype(float) @ w.astype(np.float16).astype(float))


def rounded_problem(name, size, back, scale):
    """x, the matrix that it is multiplied with, their problem, and the matrix as it is packed."""
    from pyggml.backends.webgpu.ops.products import ShaderProblem

    (m, n, k), rng, dtype = size, np.random.default_rng(6), DTYPES[name]
    w = quantize(rng.normal(size=(n, k)).astype(np.float32) * scale, name)
    x = rng.normal(size=(m, n if back else k)).astype(np.float32)
    step = Factor(1, k, dtype=dtype) if back else Factor(k, 1, dtype=dtype)
    p = ShaderProblem(m, *((k, n) if back else (n, k)), Factor(x.shape[1], 1), step)
    numbers = dequantize(w, name)
    raw = np.ascontiguousarray(w).view(np.uint8).reshape(-1)
    return x, numbers if back else numbers.T, p, raw


@pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])
@pytest.mark.parametrize(
    "name, size", [("Q8_0", (72, 96, 320)), ("F16", (37, 45, 132)), ("Q8_0", (64, 128, 128))]
)
def test_both_factors_are_rounded_where_the_device_can(name, size, back, gpu, monkeypatch):
    """Rows of any size; the first has an infinity, which stays in it."""
    if not gpu.shaders.has_f16:
        # software Vulkan of some drivers has no shader-f16; products then keep the plain path
        pytest.skip("the adapter has no shader-f16, so nothing is rounded")
    monkeypatch.setattr(gpu.shaders, "in_f16", True)
    x, w, p, raw = rounded_problem(name, size, back, 1e-2)
    x *= 10.0 ** np.linspace(-20, 20, len(x), dtype=np.float32)[:, None]
    exact = x.astype(float) @ w
    x[0, 3] = np.inf
    y = product(gpu, p, x.reshape(-1), raw)
    assert not np.isfinite(y[0]).any()
    errors = ((y - exact)[1:] ** 2).sum(1) / (exact[1:] ** 2).sum(1)
    assert 1e-7 < errors.max() < 2e-6


@pytest.mark.parametrize(
    ("name", "rank", "n_groups"),
    [("mul_mat_low_rank", 3, 256), ("out_prod_low_rank_add", 8, 1)],
    ids=["forward, sums in parts", "back, one sum"],
)
def test_thin_factors_are_added_in_float32(name, rank, n_groups, gpu, monkeypatch):
    """What a small weight gives, rounded to float16, is lost in what they give."""
    from pyggml.backends.webgpu.ops import products

    monkeypatch.setattr(gpu.shaders, "in_f16", True)
    monkeypatch.setattr(products, "_MANY_OF_HALVES", n_groups)
    (m, n, k), rng = (70, 96, 320), np.random.default_rng(8)
    forward = name == "mul_mat_low_rank"
    w = quantize(1e-6 * rng.normal(size=(n, k)).astype(np.float32), "Q8_0")
    x = rng.normal(size=(m, k if forward else n)).astype(np.float32)
    t = rng.normal(size=(m, rank)).astype(np.float32)
    u = rng.normal(size=(n, rank) if forward else (rank, k)).astype(np.float32)
    c = rng.normal(size=(m, k)).astype(np.float32)
    thin, packed = (leaf(a) for a in (u, t)), leaf(w, "w", DTYPES["Q8_0"])
    if forward:
        node, wanted = OPS[name](*thin, packed, leaf(x), rounds=False), t.astype(float) @ u.T
    else:
        node, wanted = OPS[name](leaf(c.copy()), *thin, packed, leaf(x)), c + t.astype(float) @ u
    assert gpu.refusal(node) is None
    (found,) = results(Graph.of(node), Devices([gpu, CPU()]))
    w = dequantize(w, "Q8_0").astype(float)
    near(found, wanted + x @ (w.T if forward else w))


def test_weights_too_large_for_a_half_stay_finite(gpu, monkeypatch):
    from pyggml.backends.webgpu.ops.products import ShaderProblem

    monkeypatch.setattr(gpu.shaders, "in_f16", True)
    monkeypatch.setattr(gpu.shaders, "has_f16", False)
    w = np.full((20, 32), 1e6, np.float32)
    raw = np.ascontiguousarray(quantize(w, "BF16")).view(np.uint8).reshape(-1)
    p = ShaderProblem(20, 20, 32, Factor(32, 1), Factor(32, 1, dtype=DTYPES["BF16"]))
    found = product(gpu, p, np.ones(20 * 32, np.float32), raw)
    np.testing.assert_allclose(found, 32 * 65504.0)


FEW = [(name, 1) for name in sorted(QUANTS.keys() - {"F32"})]


@pytest.mark.parametrize(("name", "m"), [*FEW, ("F16", 5), ("Q8_0", 5), ("Q6_K", 5), ("IQ3_S", 5)])
def test_few_rows_are_multiplied_with_packed_weights_at_once(name, m, gpu):
    from pyggml.backends.webgpu.ops.products import ShaderProblem, scratch_bytes

    n, k = 20, 1278 if name == "F16" else 1280
    rng, dtype = np.random.default_rng(4), DTYPES[name]
    if isinstance(QUANTS[name].pack, NoPack):
        w = rng.integers(0, 256, (n, dtype.row_bytes(k)), np.uint8) & 0xBF  # no scale is infinite
    else:
        w = quantize(rng.normal(size=(n, k)).astype(np.float32), name)
    x = rng.normal(size=(m, k)).astype(np.float32)
    p = ShaderProblem(m, n, k, Factor(k, 1), Factor(k, 1, dtype=dtype))
    found = product(gpu, p, x.reshape(-1), np.ascontiguousarray(w).view(np.uint8).reshape(-1))
    near(found, x.astype(float) @ dequantize(w, name).T)
    assert scratch_bytes(p, gpu.shaders) == 0
