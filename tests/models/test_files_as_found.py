"""Files as converters and downloads leave them: NVFP4's scales, flags as whole numbers, special
tokens out of range, fused matrices of old forms, matrices of zeros."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import tiny_models

import pyggml
from pyggml import gguf
from pyggml.errors import ModelError
from pyggml.graph.dtypes import DTYPES, F32
from pyggml.lora import LoraConfig, attach, loss_and_grads, merge
from pyggml.models import weights
from pyggml.quants import dequantize, quantize
from pyggml.tokenizer import from_gguf

from measures import nmse

GOLDEN = Path(__file__).parents[1] / "golden"
PEERS, MODEL = GOLDEN / "peers", GOLDEN / "models/qwen3-F16.gguf"
IDS = np.arange(1, 9)


def rewritten(source, path, keys=None, tensors=None):
    """A copy of a model with other keys, and with tensors changed: (dtype, array), None to drop."""
    with gguf.open(source) as file:
        every = {n: (i.dtype, i.shape, file.data(n)) for n, i in file.tensors.items()}
        for name, new in (tensors or {}).items():
            if new is None:
                every.pop(name)
            else:
                dtype, array = new
                shape = every[name][1] if dtype.quantised else array.shape
                every[name] = (dtype, shape, array)
        rows = [(n, d, s, x) for n, (d, s, x) in every.items()]
        gguf.write(path, {**file.metadata, **(keys or {})}, rows)
    return path


# -- NVFP4 ----------------------------------------------------------------------------------------


def scaled(source, path, name, factor, with_input=True):
    """The model with a matrix as NVFP4 and its factor beside it, and the same matrix times the
    factor in F32."""
    with gguf.open(source) as file:
        w = dequantize(file.data(name), file.tensors[name].dtype.name)
        w = w.reshape(file.tensors[name].shape)
    raw, base = quantize(w, "NVFP4"), name.removesuffix(".weight")
    beside = {f"{base}.scale": (F32, factor)}
    if with_input:
        beside[f"{base}.input_scale"] = (F32, np.full(factor.shape, 0.02, np.float32))
    packed = rewritten(source, path, tensors={name: (DTYPES["NVFP4"], raw), **beside})
    whole = dequantize(raw, "NVFP4").reshape(w.shape)
    whole *= factor.reshape(-1, 1, 1) if w.ndim == 3 else factor
    return packed, rewritten(source, path.with_suffix(".f32.gguf"), tensors={name: (F32, whole)})


NAMES = ["blk.0.ffn_up.weight", "blk.1.attn_q.weight", "blk.0.attn_output.weight"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_input", [True, False])
def test_a_product_of_nvfp4_is_scaled(tmp_path, name, with_input):
    factor = np.array([0.37], np.float32)
    packed, whole = scaled(MODEL, tmp_path / "m.gguf", name, factor, with_input)
    ours, wanted, plain = (
        pyggml.load(p, compute="f32").logits(IDS) for p in (packed, whole, MODEL)
    )
    assert nmse(ours, wanted) < 1e-10 < 1e-5 < nmse(plain, wanted)


def test_experts_have_a_scale_each(tmp_path):
    sizes = {"embedding_length": 64, "expert_feed_forward_length": 128}
    source = tiny_models.write(tmp_path / "moe.gguf", "qwen3moe", sizes, numbers=tiny_models.scaled)
    name = "blk.0.ffn_up_exps.weight"
    with gguf.open(source) as file:
        n = file.tensors[name].shape[0]
    factor = np.linspace(0.3, 2, n).astype(np.float32)
    packed, whole = scaled(source, tmp_path / "m.gguf", name, factor)
    ours, wanted = (pyggml.load(p, compute="f32").logits(IDS) for p in (packed, whole))
    assert nmse(ours, wanted) < 1e-10


def test_an_adapter_of_a_scaled_matrix_trains_and_is_merged(tmp_path):
    """Its update counts as it is: y = scale · W x + B A x, also in the merged file."""
    name = NAMES[0]
    packed, whole = scaled(MODEL, tmp_path / "m.gguf", name, np.array([0.37], np.float32))
    found = []
    for path in (packed, whole):
        made = attach(pyggml.load(path, compute="f32"), LoraConfig(rank=2, modules=("ffn_up",)))
        data = made.parameters.data
        data[:] = np.random.default_rng(0).normal(0, 0.05, data.size)
        loss, grads = loss_and_grads(made.model, IDS)
        found.append((made.model.logits(IDS), loss, grads))
        merge(made.model, tmp_path / "merged.gguf", "F32")
        merged = pyggml.load(tmp_path / "merged.gguf", compute="f32").logits(IDS)
        assert nmse(merged, found[-1][0]) < 1e-9
    (ours, loss, grads), (wanted, their_loss, theirs) = found
    assert nmse(ours, wanted) < 1e-10 and loss == pytest.approx(their_loss, rel=1e-5)
    assert all(nmse(grads[n], theirs[n]) < 1e-8 for n in theirs)
    with pytest.raises(Exception, match="dora is on, but blk.0.ffn_up.weight has a scale"):
        attach(pyggml.load(packed), LoraConfig(rank=2, modules=("ffn_up",), dora=True))


def test_a_scale_of_another_shape_is_refused(tmp_path):
    name = NAMES[0]
    path = rewritten(MODEL, tmp_path / "m.gguf", tensors={
        name.replace("weight", "scale"): (F32, np.ones(3, np.float32))
    })  # fmt: skip
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.scale is not used"):
        pyggml.load(path)


# -- keys -----------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("kind", [np.uint32, np.int32, np.uint8])
def test_flags_may_be_whole_numbers(tmp_path, kind):
    key, source = "qwen35.attention.recurrent_layers", PEERS / "qwen35.gguf"
    with gguf.open(source) as file:
        flags = np.asarray(file.get(key))
    path = rewritten(source, tmp_path / "m.gguf", {key: flags.astype(kind)})
    ours, wanted = (pyggml.load(p, compute="f32").logits([1, 2]) for p in (path, source))
    np.testing.assert_array_equal(ours, wanted)
    other = rewritten(source, tmp_path / "n.gguf", {key: 2 * flags.astype(kind)})
    with pytest.raises(ModelError, match="_layers is an array of 2, wanted 2 truth values"):
        pyggml.load(other)


@pytest.mark.quick
@pytest.mark.parametrize("role", ["bos", "eos", "eot"])
def test_a_special_token_past_the_vocabulary_is_noted(tmp_path, role):
    """llama.cpp's default, token 11, is a letter here: no token ends or begins a text."""
    key = f"tokenizer.ggml.{role}_token_id"
    with gguf.open(MODEL) as file:
        n = len(file.get("tokenizer.ggml.tokens"))
    for id in (n, 0xFFFFFFFF):
        path = rewritten(MODEL, tmp_path / "m.gguf", {key: np.uint32(id)})
        with gguf.open(path) as file, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tokenizer = from_gguf(file)
        (note,) = [str(w.message) for w in caught]
        assert note == f"{key} is {id}, wanted 0 to {n - 1}: none is taken instead"
        assert tokenizer.encode("ab")


# -- tensors --------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_fused_form_says_what_to_convert(tmp_path):
    fused = {"blk.0.ssm_in.weight": (F32, np.zeros((8, 8), np.float32))}
    path = rewritten(PEERS / "qwen3next.gguf", tmp_path / "m.gguf", tensors=fused)
    wanted = "ssm_in.weight holds attn_qkv and attn_gate in one, a form that is not read: convert"
    with pytest.raises(ModelError, match=wanted):
        pyggml.load(path)


@pytest.mark.quick
def test_matrices_of_zeros_are_noted(tmp_path, capsys):
    name = "blk.0.ffn_down.weight"
    with gguf.open(MODEL) as file:
        zeros = np.zeros_like(file.data(name))
    path = rewritten(MODEL, tmp_path / "m.gguf", tensors={name: (DTYPES["F16"], zeros)})
    with pytest.warns(RuntimeWarning, match=f"m.gguf: all of {name} is 0, as where a download"):
        pyggml.load(path)
    from pyggml.cli.__main__ import main

    assert main(["inspect", str(path)]) == 0
    assert f"all of {name} is 0" in " ".join(capsys.readouterr().out.split())


@pytest.mark.quick
def test_loading_copies_no_matrix(monkeypatch):
    """A copy would read the whole file: 5 GB of an 8B model before its first token."""
    looked_at = []
    monkeypatch.setattr(weights, "is_zero", lambda a: looked_at.append(a) or False)
    model = pyggml.load(MODEL)
    assert looked_at
    for a in looked_at:
        assert any(np.shares_memory(a, w.data) for w in model.parts.weights.values())
