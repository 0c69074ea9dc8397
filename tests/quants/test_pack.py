"""Packing gives ggml's own bytes."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf import quants as reference

from pyggml.jit import JIT
from pyggml.quants import QUANTS, NoPack, dequantize, quantize

from measures import misplaced_by_ggml

GOLDEN = Path(__file__).parents[1] / "golden/quants/ggml.npz"
FIXTURES = Path(__file__).parents[3] / "shared/fixtures"
PACKED = [n for n, q in QUANTS.items() if not isinstance(q.pack, NoPack)]
ARCHITECTURES = sorted(p.name.removesuffix("-F16.gguf") for p in FIXTURES.glob("*-F16.gguf"))
NOT_IN_GGML: tuple[str, ...] = ()  # types whose bytes nobody else packs


def blocks_that_differ(found: np.ndarray, wanted: np.ndarray, block_bytes: int) -> np.ndarray:
    pair = found.reshape(-1, block_bytes), wanted.reshape(-1, block_bytes)
    return np.flatnonzero((pair[0] != pair[1]).any(axis=1))


@pytest.mark.parametrize("name", [n for n in PACKED if n not in ("F32", *NOT_IN_GGML)])
def test_equals_ggml(name):
    with np.load(GOLDEN) as golden:
        x, wanted = golden["x"], golden[name]
    if not JIT:
        x, wanted = x[::8], wanted[::8]
    fits = np.abs(x).max(axis=1) <= QUANTS[name].limit
    found, wanted = quantize(x[fits], name), wanted[fits]
    assert found.shape == wanted.shape
    differ = blocks_that_differ(found, wanted, QUANTS[name].dtype.block_bytes)
    assert set(differ) <= set(np.flatnonzero(misplaced_by_ggml(name, x[fits])))


def packed_by_the_package(name):
    try:
        reference.quantize(np.zeros((1, 256), np.float32), GGMLQuantizationType[name])
    except (KeyError, NotImplementedError):  # it does not know the type, or only reads it
        return False
    return True


def test_the_package_packs_some_types():
    assert sum(map(packed_by_the_package, PACKED)) >= 11


@pytest.mark.parametrize("name", [name for name in PACKED if packed_by_the_package(name)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_equals_gguf_package(name, scale):
    rng = np.random.default_rng(11)
    x = (rng.standard_t(3, (40 if JIT else 3, 256)) * scale).astype(np.float32)
    x[0], x[1] = 0, 0.37
    x[2] = 1 + np.arange(256) / 512  # ties, for BF16
    np.testing.assert_array_equal(
        quantize(x, name), reference.quantize(x, GGMLQuantizationType[name]).view(np.uint8)
    )


@pytest.mark.skipif(not JIT, reason="takes a minute interpreted")
@pytest.mark.skipif(not ARCHITECTURES, reason="needs ../shared/fixtures, models made by llama.cpp")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_requantising_gives_llama_cpp_files(architecture):
    _requantise(architecture, 16)


@pytest.mark.slow
@pytest.mark.skipif(not ARCHITECTURES, reason="needs ../shared/fixtures, models made by llama.cpp")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_requantising_gives_llama_cpp_files_all_rows(architecture):
    _requantise(architecture, 1 << 40)


def _requantise(architecture: str, n_rows: int) -> None:
    """The first rows of each F16 tensor, packed, are those of the Q8_0 and Q4_K_M files."""
    source = {t.name: t for t in GGUFReader(FIXTURES / f"{architecture}-F16.gguf").tensors}
    for file_type in ("Q8_0", "Q4_K_M"):
        for t in GGUFReader(FIXTURES / f"{architecture}-{file_type}.gguf").tensors:
            name = t.tensor_type.name
            x, wanted = source[t.name].data, t.data
            x, wanted = x.reshape(-1, x.shape[-1]), wanted.reshape(-1, wanted.shape[-1])
            found = quantize(x[:n_rows], name)
            want = np.ascontiguousarray(wanted[:n_rows]).view(np.uint8)
            block_bytes = QUANTS[name].dtype.block_bytes
            assert not len(blocks_that_differ(found, want, block_bytes)), t.name


# Root mean square error for normal data, and the largest error per largest weight of 256: half a
# step; a whole one where the level of the largest weight's opposite is missing (Q4_0, Q5_0), more
# where the fit weighs small errors against few large ones.
ERRORS = [
    *[("F32", 0, 0), ("F16", 3e-4, 2**-11), ("BF16", 2e-3, 2**-8), ("Q8_0", 6e-3, 0.0042)],
    *[("Q6_K", 0.02, 0.03), ("Q5_K", 0.04, 0.05), ("Q5_0", 0.05, 0.064), ("Q4_K", 0.08, 0.1)],
    *[("Q4_0", 0.1, 0.127), ("Q8_1", 6e-3, 0.0042), ("Q5_1", 0.04, 0.034), ("Q4_1", 0.085, 0.067)],
    *[("IQ4_XS", 0.085, 0.1), ("IQ4_NL", 0.08, 0.1), ("MXFP4", 0.12, 0.25), ("NVFP4", 0.1, 0.17)],
    *[("Q3_K", 0.16, 0.2), ("Q2_K", 0.32, 0.36), ("Q2_0", 0.75, 0.5001), ("TQ1_0", 0.85, 0.501)],
    *[("TQ2_0", 0.85, 0.501), ("Q1_0", 0.61, 1.0)],
    *[("IQ3_S", 0.18, 0.35), ("IQ3_XXS", 0.22, 0.43), ("IQ2_S", 0.28, 0.46), ("IQ1_M", 0.6, 1.0)],
]


def test_every_type_has_its_error():
    assert {name for name, _, _ in ERRORS} == set(PACKED)


@pytest.mark.quick
@pytest.mark.parametrize("name, rms, largest", ERRORS)
def test_round_trip_error(name, rms, largest):
    x = np.random.default_rng(2).standard_normal((64 if JIT else 4, 256)).astype(np.float32)
    error = np.abs(dequantize(quantize(x, name), name) - x)
    assert np.sqrt(np.mean(error**2)) <= rms
    assert (error.max(axis=1) <= largest * np.abs(x).max(axis=1)).all()


@pytest.mark.parametrize("name", PACKED)
def test_round_trip_error_scales_with_the_data(name):
    """A factor of a power of two changes nothing but the exponents."""
    x = np.random.default_rng(9).standard_normal((2, 256)).astype(np.float32)
    once = dequantize(quantize(x, name), name)
    eight = dequantize(quantize(x * 8, name), name)
    np.testing.assert_array_equal(eight, once * 8)


def test_weights_behind_zeros_stay_where_they_are():
    """Where ggml's IQ3_S moves them by 32."""
    x = np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32)
    x[:, 32:64] = 0
    with np.load(GOLDEN) as golden:
        theirs = dequantize(golden["IQ3_S"], "IQ3_S").reshape(-1, 256) - golden["x"].reshape(
            -1, 256
        )
        moved = misplaced_by_ggml("IQ3_S", golden["x"])
        assert abs(theirs[moved]).max() > 2
    assert misplaced_by_ggml("IQ3_S", x).all()
    assert abs(dequantize(quantize(x, "IQ3_S"), "IQ3_S") - x).max() < 0.9


@pytest.mark.parametrize("name", PACKED)
def test_zero_stays_zero(name):
    values = dequantize(quantize(np.zeros((2, 256), np.float32), name), name)
    np.testing.assert_array_equal(values, 0)
