"""A frozen base of every weight type: logits and LoRA gradients are those of its float32 values."""

import numpy as np
import pytest

import pyggml
from pyggml import gguf
from pyggml.graph.dtypes import DTYPES, F32
from pyggml.lora import LoraConfig, attach, loss_and_grads
from pyggml.quants import NUMBERS, QUANTS, dequantize

TOKENS = np.arange(5, 25)


@pytest.fixture
def two_models(golden_file, some_weight, tmp_path):
    """two_models(type): paths of a model with all matrices of a type, and of its float32 self."""

    def make(kind):
        rng, packed, plain = np.random.default_rng(3), [], []
        with gguf.open(golden_file("qwen3-F16.gguf")) as file:
            metadata = dict(file.metadata)
            for name, info in file.tensors.items():
                if len(info.shape) == 1:
                    same = (name, F32, info.shape, np.array(file.data(name)))
                    packed.append(same)
                    plain.append(same)
                    continue
                raw = some_weight(rng, info.shape, kind)
                native = raw.view(DTYPES[kind].numpy)
                packed.append((name, DTYPES[kind], info.shape, native))
                plain.append((name, F32, info.shape, dequantize(raw, kind)))
        for name, tensors in (("packed.gguf", packed), ("plain.gguf", plain)):
            gguf.write(tmp_path / name, metadata, tensors)
        return tmp_path / "packed.gguf", tmp_path / "plain.gguf"

    return make


@pytest.mark.parametrize("kind", [n for n in QUANTS if n != "F32"])
def test_a_base_of_this_type_is_its_float32_values(kind, two_models):
    found = []
    for path in two_models(kind):
        model = pyggml.load(path, compute="f32")
        adapter = attach(model, LoraConfig(rank=2))
        rng = np.random.default_rng(4)
        for p in adapter.parameters.tensors.values():
            p.data[...] = rng.standard_normal(p.shape) / 10
        model = adapter.model
        loss, grads = loss_and_grads(model, TOKENS)
        assert np.isfinite(loss)
        assert all(np.any(g) for g in grads.values())
        found.append((model.logits(TOKENS), loss, grads))
    (logits, loss, grads), wanted = found
    np.testing.assert_array_equal(logits, wanted[0])
    assert loss == wanted[1]
    for name, g in grads.items():
        np.testing.assert_array_equal(g, wanted[2][name])


@pytest.mark.parametrize("dtype", [*NUMBERS, DTYPES["Q8_K"]], ids=str)
def test_a_matrix_of_numbers_is_refused_by_name(dtype, golden_file, tmp_path):
    path, spoilt = tmp_path / "numbers.gguf", "blk.0.attn_q.weight"
    with gguf.open(golden_file("qwen3-F16.gguf")) as file:
        tensors = []
        for name, info in file.tensors.items():
            kind = dtype if name == spoilt else info.dtype
            shape = gguf.TensorInfo(name, info.shape, kind, 0, 0).stored_shape
            data = np.zeros(shape, dtype.numpy) if name == spoilt else file.data(name)
            tensors.append((name, kind, info.shape, data))
        gguf.write(path, file.metadata, tensors)
    with pytest.raises(pyggml.errors.ModelError, match=f"{spoilt} has type {dtype}, known are F32"):
        pyggml.load(path)
