"""Packing by importance gives ggml's own bytes, and a smaller error where it counts."""

from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml import gguf
from pyggml.errors import GGUFError, QuantError
from pyggml.jit import JIT
from pyggml.quants import QUANTS, NoFit, Quant, dequantize, quantize
from pyggml.requantize import requantize
from pyggml.requantize.imatrix import ImportanceMatrix, InputSums, read_imatrix

from measures import misplaced_by_ggml

GOLDEN = Path(__file__).parents[1] / "golden"
WEIGHTED = [name for name, q in QUANTS.items() if not isinstance(q.fit, NoFit)]


@pytest.mark.parametrize("name", WEIGHTED)
def test_equals_ggml(name):
    with np.load(GOLDEN / "quants/weighted.npz") as golden:
        x, importance, wanted = golden["x"], golden["importance"], golden[name]
    x, wanted = (x, wanted) if JIT else (x[::4], wanted[::4])
    found, block = quantize(x, name, importance), QUANTS[name].dtype.block_bytes
    differ = (found.reshape(-1, block) != wanted.reshape(-1, block)).any(axis=1)
    assert not (differ & ~misplaced_by_ggml(name, x)).any()
    assert (found != quantize(x, name, importance[::-1])).any()


@pytest.mark.parametrize("name", WEIGHTED)
def test_columns_that_count_are_nearer(rng, name):
    x = rng.standard_normal((16, 512)).astype(np.float32)
    importance = np.exp(2 * rng.standard_normal(512)).astype(np.float32)

    def error(*given):
        found = dequantize(quantize(x, name, *given), name)
        return float(((found - x) ** 2 @ importance).sum())

    assert error(importance) < 0.93 * error(np.ones(512, np.float32))


@pytest.mark.parametrize("name", WEIGHTED)
def test_columns_without_importance(name):
    x = np.random.default_rng(4).standard_normal((2, 256)).astype(np.float32)
    importance = np.zeros(256, np.float32)
    assert np.isfinite(dequantize(quantize(x, name, importance), name)).all()
    for wrong in (np.nan, np.inf, -1):
        importance[9] = wrong
        with pytest.raises(QuantError, match="importance must be finite and 0 or more"):
            quantize(x, name, importance)


# No point of these grids has equal numbers.
UNEVEN = {"IQ3_S": 0.45, "IQ3_XXS": 0.45, "IQ2_XXS": 0.8, "IQ1_M": 0.5, "IQ1_S": 0.6}


@pytest.mark.parametrize("name", WEIGHTED)
def test_rows_that_are_constant(name):
    importance = np.random.default_rng(5).chisquare(1, 256).astype(np.float32)
    zero = dequantize(quantize(np.zeros((2, 256), np.float32), name, importance), name)
    np.testing.assert_array_equal(zero, 0)
    for value in (0.37, -3.0):
        x = np.full((2, 256), value, np.float32)
        found = dequantize(quantize(x, name, importance), name)
        np.testing.assert_allclose(found, x, rtol=UNEVEN.get(name, 0.1))


def test_each_of_several_matrices_has_its_own(rng):
    """Also where threads share the rows, and with rows of several pieces."""
    x = rng.standard_normal((3, 40, 256)).astype(np.float32)
    importance = rng.chisquare(1, (3, 256)).astype(np.float32)
    for name in ("Q4_0", "Q4_K", "IQ4_XS"):
        apart = [quantize(m, name, i) for m, i in zip(x, importance, strict=True)]
        np.testing.assert_array_equal(quantize(x, name, importance), np.stack(apart))
    with pytest.raises(QuantError, match="importance of 3 matrices does not divide 40 rows"):
        quantize(x[0], "Q4_K", importance)


def test_types_without_fits_ignore_it(rng):
    x = rng.standard_normal((4, 256)).astype(np.float32)
    for name in QUANTS.keys() - WEIGHTED:
        np.testing.assert_array_equal(quantize(x, name, np.arange(256.0)), quantize(x, name))


def test_a_new_type_says_what_importance_does(rng, monkeypatch):
    """Its packer by importance serves because it is declared; one that declares none is no type."""
    x, importance = rng.standard_normal((4, 256)).astype(np.float32), np.arange(256.0)

    def fit(dst, src, importance, means):
        assert importance.shape == src.shape and means.shape == (len(src),)
        QUANTS["Q8_0"].pack(dst, src * importance)

    plain = QUANTS["Q8_0"]
    monkeypatch.setitem(QUANTS, "Q8_0", replace(plain, fit=fit))
    found = quantize(x, "Q8_0", importance)
    np.testing.assert_array_equal(found, quantize(x * importance, "Q8_0"))
    fields = {f.name: getattr(plain, f.name) for f in fields_of(Quant) if f.name != "fit"}
    with pytest.raises(TypeError, match="fit"):
        Quant(**fields)


# -- files ----------------------------------------------------------------------------------------

MODEL = GOLDEN / "models/qwen3-F16.gguf"


@pytest.fixture
def importance(rng):
    """Of the matrices of one block."""
    with gguf.open(MODEL) as file:
        shapes = {n: t.shape for n, t in file.tensors.items() if n.startswith("blk.0.")}
    return ImportanceMatrix(
        {
            n: InputSums(rng.chisquare(1, (1, s[-1])).astype(np.float32) * 96, np.float32([96]))
            for n, s in shapes.items()
            if len(s) == 2
        },
        ("some.txt",),
        n_chunks=3,
        n_ctx=32,
    )


def test_a_file_comes_back(importance, tmp_path):
    importance.save(tmp_path / "i.gguf")
    found = read_imatrix(tmp_path / "i.gguf")
    assert (found.datasets, found.n_chunks, found.n_ctx) == (("some.txt",), 3, 32)
    assert found.sums.keys() == importance.sums.keys()
    for name, sums in importance.sums.items():
        np.testing.assert_array_equal(found.sums[name].means, sums.squares / np.float32(96))
    with gguf.open(tmp_path / "i.gguf") as file:  # as llama.cpp writes them: no axes of 1
        assert file.tensors["blk.0.attn_q.weight.in_sum2"].shape == (256,)
        assert file.tensors["blk.0.attn_q.weight.counts"].shape == (1,)


def test_experts_that_no_token_asked_count_alike(tmp_path):
    sums = InputSums(np.float32([[2, 4], [0, 0]]), np.float32([2, 0]))
    ImportanceMatrix({"e": sums}, (), 1, 2).save(tmp_path / "i.gguf")
    np.testing.assert_array_equal(
        read_imatrix(tmp_path / "i.gguf").sums["e"].means, [[1, 2], [1, 1]]
    )


def dat(entries, tail=b""):
    """The older file."""
    raw = np.int32(len(entries)).tobytes()
    for name, n_calls, values in entries:
        numbers = np.array([n_calls, len(values)], np.int32).tobytes()
        raw += np.int32(len(name)).tobytes() + name + numbers + np.float32(values).tobytes()
    return raw + tail


def test_the_older_file_is_read(tmp_path):
    path = tmp_path / "i.dat"
    path.write_bytes(dat([(b"a.weight", 4, [8, 2])], np.int32([7, 5]).tobytes() + b"x.txt"))
    found = read_imatrix(path)
    np.testing.assert_array_equal(found.sums["a.weight"].means, [[2, 0.5]])
    assert (found.n_chunks, found.datasets) == (7, ("x.txt",))
    path.write_bytes(dat([(b"a.weight", 4, [8, 2])]))
    assert read_imatrix(path).n_chunks == 0


def test_damaged_files_are_refused(tmp_path, importance):
    path = tmp_path / "i.dat"
    whole = dat([(b"a.weight", 4, [8, 2])])
    for raw, said in [
        (b"", "is no importance matrix"),
        (whole[:-3], "'a.weight' claims 2 values"),
        (np.int32([1, 1 << 30]).tobytes(), "a name claims 1073741824 bytes"),
        (np.int32([-5]).tobytes(), "it claims -5 entries"),
        (dat([(b"a", 1, [np.nan])]), "'a' has sums that are not finite and 0 or more"),
        (dat([(b"a", 1, [-1])]), "'a' has sums that are not finite and 0 or more"),
    ]:
        path.write_bytes(raw)
        with pytest.raises(GGUFError, match=said):
            read_imatrix(path)
    with pytest.raises(GGUFError, match="general.type is not 'imatrix'"):
        read_imatrix(MODEL)
    importance.save(tmp_path / "i.gguf")
    with gguf.open(tmp_path / "i.gguf") as file:
        tensors = [(n, t.dtype, t.shape, file.data(n)) for n, t in file.tensors.items()]
        gguf.write(tmp_path / "j.gguf", file.metadata, tensors[1:])
    with pytest.raises(GGUFError, match="is no sum with a count, or lacks one"):
        read_imatrix(tmp_path / "j.gguf")


def test_a_model_is_packed_by_importance(importance, tmp_path):
    importance.save(tmp_path / "i.gguf")
    found = read_imatrix(tmp_path / "i.gguf")
    requantize(MODEL, tmp_path / "with.gguf", "Q4_K_M", importance=found)
    requantize(MODEL, tmp_path / "without.gguf", "Q4_K_M")
    with gguf.open(MODEL) as f16, gguf.open(tmp_path / "with.gguf") as a:
        name = "blk.0.ffn_up.weight"
        x = dequantize(f16.data(name), "F16")
        np.testing.assert_array_equal(a.data(name), quantize(x, "Q4_K", found.sums[name].means))
        with gguf.open(tmp_path / "without.gguf") as b:
            other = name.replace("0", "1")
            np.testing.assert_array_equal(a.data(other), b.data(other))
        keys = {k: a.get(f"quantize.imatrix.{k}") for k in ("file", "dataset", "chunks_count")}
        assert keys == {"file": str(tmp_path / "i.gguf"), "dataset": "some.txt", "chunks_count": 3}
        assert a.get("quantize.imatrix.entries_count") == len(importance.sums)
    assert np.isfinite(pyggml.load(tmp_path / "with.gguf").logits([1, 2])).all()


def test_another_model_s_importance_is_refused(tmp_path):
    for name, n, said in [
        ("blk.9.attn_q.weight", 256, "has none of the tensors that the importance matrix names"),
        ("blk.0.attn_q.weight", 128, "shape .256, 256. has the importance of 128 columns"),
    ]:
        sums = InputSums(np.ones((1, n), np.float32), np.float32([1]))
        with pytest.raises(QuantError, match=said):
            wrong = ImportanceMatrix({name: sums}, (), 1, 1)
            requantize(MODEL, tmp_path / "o.gguf", "Q4_K_M", importance=wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_type_that_wants_an_importance_matrix_says_so(importance, tmp_path):
    out, only = tmp_path / "o.gguf", "is packed by an importance matrix alone, and"
    for file_type, given, said in [
        ("IQ2_XS", None, f"IQ2_XS {only} none is given .* for 'blk.0.attn_k.weight' and 11 others"),
        ("Q2_K_S", None, f"Q2_K {only} none is given .* for 'blk.0.attn_k.weight' and 13 others"),
        ("IQ3_XXS", importance, f"{only} the given one does not name 'blk.1.attn_k.weight' and"),
    ]:
        with pytest.raises(QuantError, match=said):
            requantize(MODEL, out, file_type, importance=given)
    assert list(tmp_path.iterdir()) == []
    requantize(MODEL, out, "IQ3_S")  # does without


def test_knowing_the_importance_changes_the_types_of_some(tmp_path):
    """llama.cpp's rules for ffn_down in the first eighth of the layers."""
    from pyggml.requantize import ModelFacts, mix

    facts = {"architecture": "llama", "n_layer": 16, "n_head": 8, "n_head_kv": 8, "n_expert": 0}
    tensors = [(f"blk.{i}.ffn_down.weight", (256, 256)) for i in range(16)]
    for file_type, without, known in [
        ("Q4_0", "Q4_0", "Q4_1"),
        ("Q5_0", "Q5_0", "Q5_1"),
        ("IQ4_XS", "Q5_K", "IQ4_XS"),
        ("Q4_K_S", "Q5_K", "Q5_K"),
    ]:
        for wanted, has in ((without, False), (known, True)):
            found = mix(file_type, tensors, ModelFacts(**facts, has_importance=has))
            assert found["blk.1.ffn_down.weight"].name == wanted
            assert found["blk.2.ffn_down.weight"].name == file_type.removesuffix("_S")
