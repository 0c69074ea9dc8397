"""Whole files of every file type: what they hold, how near they stay, and that llama.cpp agrees."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from extras import need
from importances import BY_IMPORTANCE, random_importance

import pyggml
from pyggml import gguf
from pyggml.errors import GGUFError, ModelError, QuantError
from pyggml.graph.dtypes import DTYPES, F32, I32
from pyggml.quants import dequantize
from pyggml.requantize import FILE_TYPES, requantize

# Error of the matrices of a file, as a share of their root mean square.
ERRORS = {
    **{"F32": 0, "F16": 0, "BF16": 2e-3, "Q8_0": 7e-3, "Q6_K": 0.02, "Q5_K_M": 0.04},
    **{"Q5_K_S": 0.04, "Q5_1": 0.05, "Q5_0": 0.05, "Q4_K_M": 0.08, "Q4_K_S": 0.08, "IQ4_NL": 0.08},
    **{"IQ4_XS": 0.08, "Q4_1": 0.09, "Q4_0": 0.09, "MXFP4_MOE": 7e-3, "Q3_K_L": 0.16},
    **{"Q3_K_M": 0.16, "Q3_K_S": 0.16, "Q2_K": 0.3, "Q2_0": 0.75, "TQ2_0": 0.85, "TQ1_0": 0.85},
    **{"Q2_K_S": 0.35, "IQ3_M": 0.18, "IQ3_S": 0.18, "IQ3_XS": 0.23, "IQ3_XXS": 0.3},
    **{"IQ2_M": 0.3, "IQ2_S": 0.4, "IQ2_XS": 0.4, "IQ2_XXS": 0.4, "IQ1_M": 0.55, "IQ1_S": 0.6},
}


@pytest.fixture(scope="module")
def golden():
    """A model in F16 that every clone has."""
    return Path(__file__).parents[1] / "golden/models/qwen3-F16.gguf"


@pytest.fixture(scope="module")
def importance(golden):
    return random_importance(golden)


def values(path):
    with gguf.open(path) as file:
        return {n: dequantize(file.data(n), i.dtype.name) for n, i in file.tensors.items()}


@pytest.mark.parametrize("file_type", list(FILE_TYPES))
def test_a_file_of_every_type(file_type, golden, importance, tmp_path):
    given = importance if file_type in BY_IMPORTANCE else None
    requantize(golden, tmp_path / "out.gguf", file_type, importance=given)
    with gguf.open(tmp_path / "out.gguf") as file:
        assert file.get("general.file_type") == FILE_TYPES[file_type].number
        assert file.tensors["blk.1.attn_q.weight"].dtype.name == FILE_TYPES[file_type].attn_qk
    before, after = values(golden), values(tmp_path / "out.gguf")
    for name, x in before.items():
        error = np.sqrt(np.mean((after[name] - x) ** 2) / np.mean(x**2))
        assert error <= (ERRORS[file_type] if x.ndim > 1 else 0), name
    logits = pyggml.load(tmp_path / "out.gguf").logits(np.arange(8))
    assert np.isfinite(logits).all()


@pytest.mark.quick
def test_numbers_are_kept(golden, tmp_path):
    table = np.arange(512, dtype=np.int32).reshape(2, 256)
    exact = np.linspace(0, 1, 7)
    with gguf.open(golden) as file:
        tensors = [(n, i.dtype, i.shape, file.data(n)) for n, i in file.tensors.items()]
        tensors += [("blk.0.ffn_gate_tid2eid.weight", I32, (2, 256), table)]
        tensors += [("blk.0.exact", DTYPES["F64"], (7,), exact)]
        gguf.write(tmp_path / "in.gguf", file.metadata, tensors)
    requantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_0")
    with gguf.open(tmp_path / "out.gguf") as file:
        np.testing.assert_array_equal(file.data("blk.0.ffn_gate_tid2eid.weight"), table)
        np.testing.assert_array_equal(file.data("blk.0.exact"), exact)
        assert file.tensors["blk.0.attn_norm.weight"].dtype is F32


@pytest.mark.quick
def test_what_is_no_model_is_refused(golden, tmp_path):
    for value, error, words in [
        ("adapter", ModelError, "general.type is 'adapter', wanted a model"),
        (np.zeros(3, np.int32), GGUFError, "general.type.* is array of 3 INT32, wanted str"),
    ]:
        with gguf.open(golden) as file:
            gguf.write(tmp_path / "in.gguf", {**file.metadata, "general.type": value}, [])
        with pytest.raises(error, match=words):
            requantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_0")


KEPT = ["position_embd.weight", "blk.0.time_mix_w1.weight", "blk.0.per_layer_model_proj.weight"]


@pytest.mark.quick
def test_what_is_not_quantised_keeps_its_type(golden, tmp_path):
    bfloats = np.arange(512, dtype=np.uint16).reshape(2, 256)
    vector = np.linspace(0, 1, 256).astype(np.float16)
    with gguf.open(golden) as file:
        tensors = [(name, DTYPES["BF16"], (2, 256), bfloats) for name in KEPT]
        tensors += [("blk.0.attn_norm.weight", DTYPES["F16"], (256,), vector)]
        gguf.write(tmp_path / "in.gguf", file.metadata, tensors)
    for file_type in ("Q4_K_M", "F32"):
        requantize(tmp_path / "in.gguf", tmp_path / "out.gguf", file_type)
        with gguf.open(tmp_path / "out.gguf") as file:
            assert {file.tensors[name].dtype.name for name in KEPT} == {"BF16"}
            np.testing.assert_array_equal(file.data("blk.0.attn_norm.weight"), vector)


def test_what_is_quantised_already_is_packed_anew_only_if_that_is_meant(golden, tmp_path):
    packed, out = tmp_path / "packed.gguf", tmp_path / "out.gguf"
    requantize(golden, packed, "Q4_K_M")
    wanted = (
        "packed.gguf: allow_requantize is off, but .* quantised already .'[a-z_.]+' is Q[46]_K.:"
    )
    for file_type in ("Q8_0", "F16"):
        with pytest.raises(QuantError, match=wanted):
            requantize(packed, out, file_type)
        assert not out.exists()
    requantize(packed, out, "Q8_0", allow_requantize=True)
    with gguf.open(out) as file:
        assert {i.dtype.name for i in file.tensors.values()} == {"Q8_0", "F32"}
    requantize(packed, tmp_path / "exact.gguf", "F32")
    before, after = values(packed), values(tmp_path / "exact.gguf")
    assert all(np.array_equal(before[name], after[name]) for name in before)
    requantize(packed, tmp_path / "same.gguf", "Q4_K_M")  # changes no tensor


def test_numbers_that_cannot_be_packed_name_their_tensor(golden, tmp_path):
    name = "blk.0.attn_q.weight"
    with gguf.open(golden) as file:
        tensors = [(name, F32, (2, 256), np.full((2, 256), np.nan, np.float32))]
        gguf.write(tmp_path / "in.gguf", file.metadata, tensors)
    (tmp_path / "out.gguf").write_text("old")
    with pytest.raises(QuantError, match=rf"in.gguf: tensor '{name}': only finite .* at \(0, 0\)"):
        requantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_0")
    assert (tmp_path / "out.gguf").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.gguf", "out.gguf"]


def test_a_matrix_of_numbers_is_refused(golden, tmp_path):
    with gguf.open(golden) as file:
        numbers = np.zeros((2, 256), np.int8)
        tensors = [("blk.0.attn_q.weight", DTYPES["I8"], (2, 256), numbers)]
        gguf.write(tmp_path / "in.gguf", file.metadata, tensors)
    with pytest.raises(QuantError, match="'blk.0.attn_q.weight' has type I8; known are F32"):
        requantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q4_0")


# -- llama.cpp ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama_cpp():
    """The library, told to be quiet."""
    llama_cpp = need("llama_cpp")
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    yield llama_cpp
    llama_cpp.llama_log_set(llama_cpp.llama_log_callback(), None)


@pytest.mark.interop
@pytest.mark.parametrize("file_type", list(FILE_TYPES))
def test_the_file_is_the_one_that_llama_cpp_makes(
    llama_cpp, file_type, golden, importance, tmp_path
):
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[file_type].number
    given = importance if file_type in BY_IMPORTANCE else None
    if given is not None:
        entry = llama_cpp.llama_model_imatrix_data
        means = {name.encode(): sums.means for name, sums in given.sums.items()}
        floats = ctypes.POINTER(ctypes.c_float)
        entries = [entry(n, m.ctypes.data_as(floats), m.size) for n, m in means.items()]
        params.imatrix = (entry * (len(entries) + 1))(*entries, entry(None, None, 0))
    requantize(golden, ours, file_type, importance=given)
    paths = str(golden).encode(), str(theirs).encode()
    assert not llama_cpp.llama_model_quantize(*paths, params)
    with gguf.open(ours) as a, gguf.open(theirs) as b:
        assert {n: i.dtype for n, i in a.tensors.items()} == {
            n: i.dtype for n, i in b.tensors.items()
        }
        for key in ("general.file_type", "general.quantization_version"):
            assert a.metadata[key] == b.metadata[key]
        for name, info in a.tensors.items():
            block = info.dtype.block_bytes
            pair = (x.data(name).reshape(-1).view(np.uint8).reshape(-1, block) for x in (a, b))
            # A C compiler may fuse a multiplication with an addition where this code must not.
            assert np.not_equal(*pair).any(axis=1).mean() <= 1e-3, name


@pytest.mark.interop
@pytest.mark.parametrize("file_type", list(FILE_TYPES))
def test_llama_cpp_gives_our_logits(llama_cpp, file_type, golden, importance, tmp_path):
    requantize(golden, tmp_path / "out.gguf", file_type, importance=importance)
    tokens = np.random.default_rng(1).integers(0, 400, 24)
    ours = pyggml.load(tmp_path / "out.gguf", compute="f32").logits(tokens)
    llama = llama_cpp.Llama(
        str(tmp_path / "out.gguf"), n_ctx=24, logits_all=True, type_k=0, type_v=0, verbose=False
    )
    llama.eval([int(t) for t in tokens])
    theirs = np.array(llama.scores[:24])
    error = np.mean((theirs - ours) ** 2) / np.var(ours)
    assert error < 2e-3  # it rounds activations to 8 bits before it multiplies
