"""Products of every path against NumPy, at sizes that fill no tile."""

import numpy as np
import pytest

from pyggml.backends.cuda.gemm import PATHS, CudaOperands, CudaProblem, Factor, path_of
from pyggml.backends.cuda.gemm.cublas import CUBLAS, has_cublas
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.launches import in_turn
from pyggml.backends.cuda.runtime.toolkit import SIMULATED
from pyggml.graph.dtypes import BF16, DTYPES
from pyggml.quants import QUANTS, dequantize, quantize

# Largest error, relative to the largest number: of float32, of bfloat16, and of numbers in digits.
ALLOWED = {"f32": 2e-6, "bf16": 8e-3, "digits": 1e-4}


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16"])
@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.name)
@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_a_path_agrees_with_numpy(path, kind, is_back, compute):
    rng, dtype = np.random.default_rng(3), DTYPES[kind]
    m = {"few rows": 3, "dots of few": 2, "dots": 5}.get(path.name, 11)
    rows, row = 16, max(dtype.block, 64)
    accumulate = is_back
    w = quantize(rng.standard_normal((rows, row), np.float32), kind)
    plain = dequantize(w, kind)
    n, k = (row, rows) if is_back else (rows, row)
    steps = Factor(1, row, dtype=dtype) if is_back else Factor(row, 1, dtype=dtype)
    problem = CudaProblem(m, n, k, Factor(k, 1), steps, compute=compute)
    if not path.takes(problem):
        pytest.skip(f"{path.name} does not take such a product: another path serves it")
    x, before = rng.standard_normal((m, k), np.float32), rng.standard_normal((m, n), np.float32)
    arrays = (cuda.to_device(a.reshape(-1)) for a in (before, x, w.view(dtype.numpy)))
    y, *factors = arrays
    scratch = cuda.to_device(np.full(path.scratch(problem) + 1, 0xA5, np.uint8))[:-1]
    operands = CudaOperands(y, *factors, scratch, accumulate, cuda.default_stream())
    in_turn(path.bind(problem, operands))()
    wanted = x.astype(np.float64) @ (plain if is_back else plain.T) + accumulate * before
    found = y.copy_to_host().reshape(m, n)
    rounds = "digits" if path.name == "few rows" else "bf16"
    rounded = path.shares or path.name in ("few rows", "packed tiles")
    allowed = ALLOWED[rounds if problem.rounds and rounded else "f32"]
    assert np.abs(found - wanted).max() <= allowed * np.abs(wanted).max()


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_the_gradient_of_a_matrix(kind, monkeypatch):
    """dyᵀ·x, which both lie as they came: neither along the sum."""
    if SIMULATED:
        from warps import with_cublas

        with_cublas(monkeypatch)
    elif not has_cublas():
        pytest.skip("cuBLAS is not installed")
    rng, (m, n, k) = np.random.default_rng(3), (11, 16, 24)
    dy, x = (rng.standard_normal((k, size)).astype(np.float32) for size in (m, n))
    factors = Factor(1, m, dtype=DTYPES[kind]), Factor(1, n, dtype=BF16)
    problem = CudaProblem(m, n, k, *factors, compute="bf16")
    assert path_of(problem) is CUBLAS
    arrays = [
        quantize(a, t).view(DTYPES[t].numpy).reshape(-1) for a, t in ((dy, kind), (x, "BF16"))
    ]
    y, before = cuda.device_array(m * n, np.float32), rng.standard_normal(m * n, np.float32)
    y.copy_to_device(before)
    scratch = cuda.to_device(np.zeros(CUBLAS.scratch(problem) + 1, np.uint8))
    operands = CudaOperands(y, *map(cuda.to_device, arrays), scratch, True, cuda.default_stream())
    in_turn(CUBLAS.bind(problem, operands))()
    wanted = dy.astype(np.float64).T @ x + before.reshape(m, n)
    assert (
        np.abs(y.copy_to_host().reshape(m, n) - wanted).max()
        <= ALLOWED["bf16"] * np.abs(wanted).max()
    )


@pytest.mark.skipif(SIMULATED or not has_cublas(), reason="the simulator has no cuBLAS")
@pytest.mark.parametrize("number", [np.float32, np.uint16])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("near_k", [False, True])
def test_a_product_in_one_wave_of_tiles(number, accumulate, near_k):
    """Of rows with gaps between them; where the card has other multiprocessors, by cuBLAS."""
    from pyggml.backends.cuda.gemm.cublas import multiply

    rng, m, n, k, gap = np.random.default_rng(3), 125, 2048, 520, 56
    b = rng.standard_normal((n, k) if near_k else (k, n), np.float32)
    a, before = rng.standard_normal((m, k), np.float32), rng.standard_normal((m, n), np.float32)
    wide = [quantize(np.pad(x, [(0, 0), (0, gap)]), "BF16").view("u2") for x in (a, b)]
    of_a, of_b = (cuda.to_device(x.reshape(-1)) for x in wide)
    y = before if number is np.float32 else quantize(before, "BF16").view("u2").reshape(m, n)
    out, stream = cuda.to_device(y.reshape(-1)), cuda.stream()
    of = (True, k + gap), of_b, (near_k, b.shape[1] + gap)
    multiply(stream, (m, n, k), of_a, *of, out, n, accumulate)()
    stream.synchronize()
    c = out.copy_to_host()
    c = c if number is np.float32 else dequantize(c.view("u1"), "BF16")
    exact = a.astype(float) @ (b.T if near_k else b) + accumulate * before
    assert np.abs(c.reshape(m, n) - exact).max() <= ALLOWED["bf16"] * np.abs(exact).max()


@pytest.mark.parametrize("m", [1] if SIMULATED else [1, 3, 5])
@pytest.mark.parametrize("kind", [name for name, q in QUANTS.items() if q.dtype.quantised])
def test_every_weight_type_is_multiplied_with_few_rows(kind, m):
    dtype, n, k = DTYPES[kind], 3 if SIMULATED else 70, 256
    raw = np.random.default_rng(3).integers(0, 256, n * dtype.row_bytes(k), np.uint8)
    raw &= 0xBF  # no half and no E8M0 is infinite or NaN
    x = np.random.default_rng(4).standard_normal((m, k), np.float32)
    problem = CudaProblem(m, n, k, Factor(k, 1), Factor(k, 1, dtype=dtype), compute="bf16")
    path, y = path_of(problem), cuda.to_device(np.full(m * n, np.nan, np.float32))
    w, scratch = cuda.to_device(raw), cuda.to_device(np.zeros(path.scratch(problem) + 1, np.uint8))
    factors = cuda.to_device(x.reshape(-1)), w.view(dtype.numpy)
    in_turn(path.bind(problem, CudaOperands(y, *factors, scratch, False, cuda.default_stream())))()
    wanted = x.astype(float) @ dequantize(raw, kind).reshape(n, k).T
    allowed = ALLOWED["digits" if m <= 4 else "bf16"]
    assert np.abs(y.copy_to_host().reshape(m, n) - wanted).max() <= allowed * np.abs(wanted).max()


@pytest.mark.skipif(SIMULATED, reason="the simulator has no tensor cores")
@pytest.mark.parametrize(("kind", "m"), [("Q8_0", 5), ("Q4_K", 16), ("Q6_K", 17), ("IQ3_S", 32)])
def test_packed_weights_are_multiplied_on_tensor_cores(kind, m):
    from pyggml.backends.cuda.gemm.packed_tiles import PACKED_TILES

    rng, dtype, n, k = np.random.default_rng(3), DTYPES[kind], 70, 3072
    w, x = quantize(rng.standard_normal((n, k), np.float32), kind), rng.standard_normal((m, k))
    problem = CudaProblem(m, n, k, Factor(k, 1), Factor(k, 1, dtype=dtype), compute="bf16")
    assert path_of(problem) is PACKED_TILES
    y = cuda.to_device(np.full(m * n, np.nan, np.float32))
    factors = cuda.to_device(x.astype("f4").reshape(-1)), cuda.to_device(w.view(dtype.numpy))
    operands = CudaOperands(y, *factors, None, False, cuda.default_stream())
    PACKED_TILES.bind(problem, operands)()
    exact = x @ dequantize(w, kind).reshape(n, k).T
    product = y.copy_to_host().reshape(m, n)
    assert np.abs(product - exact).max() <= ALLOWED["bf16"] * np.abs(exact).max()


@pytest.mark.skipif(SIMULATED, reason="the simulator has no tensor cores")
@pytest.mark.parametrize("is_gated", [False, True])
def test_products_after_a_norm_are_multiplied_on_tensor_cores(is_gated):
    """Of two types of weights, or gated, where the norm's result is read too."""
    from pyggml.backends.cuda.gemm.few_rows import FewRowsProduct, FusedNorm
    from pyggml.backends.cuda.gemm.packed_tiles import products

    rng, m, n, k, kinds = np.random.default_rng(5), 9, 70, 2048, ("Q4_K", "Q6_K")
    a, norm = (rng.standard_normal(shape, np.float32) for shape in ((m, k), k))
    both = [(kind, quantize(rng.standard_normal((n, k), np.float32), kind)) for kind in kinds]
    first, second = (cuda.to_device(w.view(np.uint8).reshape(-1)) for _, w in both)
    outs = [cuda.to_device(np.full(m * n, np.nan, np.float32)) for _ in both]
    types = [DTYPES[kind] for kind in kinds]
    parts = [FewRowsProduct(outs[0], first, types[0], n, up=first if is_gated else None)]
    parts += [] if is_gated else [FewRowsProduct(outs[1], second, types[1], n)]
    normed = cuda.to_device(np.full(m * k, np.nan, np.float32))
    fused = FusedNorm(cuda.to_device(norm), np.float32(1e-6), normed, True)
    products(parts, cuda.to_device(a.reshape(-1)), m, k, cuda.default_stream(), fused)()
    x = a / np.sqrt((a.astype(float) ** 2).mean(1, keepdims=True) + 1e-6) * norm
    exact = [x @ dequantize(each, kind).reshape(n, k).T for kind, each in both]
    if is_gated:
        exact = [exact[0] / (1 + np.exp(-exact[0])) * exact[0]]
    np.testing.assert_allclose(normed.copy_to_host().reshape(m, k), x, rtol=1e-5)
    for y, of in zip(outs, exact, strict=False):
        product = y.copy_to_host().reshape(m, n)
        assert np.abs(product - of).max() <= 2 * ALLOWED["bf16"] * np.abs(of).max()


@pytest.mark.parametrize("m, n, k", [(21, 5, 40), (70, 3, 19), (7, 50, 30), (19, 16, 9)])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(
    "path", [p for p in PATHS if p.name in ("cublas", "simt")], ids=lambda p: p.name
)
def test_a_path_agrees_with_numpy_in_float32(path, is_transposed, m, n, k):
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((n, k), np.float32)
    of_a, of_b = (Factor(1, m), Factor(1, n)) if is_transposed else (Factor(k, 1), Factor(k, 1))
    problem = CudaProblem(m, n, k, of_a, of_b)
    if not path.takes(problem):
        pytest.skip(f"{path.name} does not take such a product: another path serves it")
    flat = (np.ascontiguousarray(x.T if is_transposed else x).reshape(-1) for x in (a, b))
    before = rng.standard_normal((m, n), np.float32)
    y, *factors = (cuda.to_device(x) for x in (before.reshape(-1), *flat))
    scratch = cuda.to_device(np.full(path.scratch(problem) + 1, 0xA5, np.uint8))[:-1]
    path.bind(problem, CudaOperands(y, *factors, scratch, True, cuda.default_stream()))()
    wanted = a.astype(np.float64) @ b.T + before
    found = y.copy_to_host().reshape(m, n)
    assert np.abs(found - wanted).max() <= 3e-6 * np.abs(wanted).max()
