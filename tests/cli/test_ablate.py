"""`pyggml ablate`: the adapter does what a trace does, and bad input is one sentence."""

import numpy as np
import pytest

import pyggml as library
from pyggml import At


@pytest.mark.quick
def test_the_adapter_takes_heads_and_neurons_away(pyggml, tiny, tmp_path):
    out = tmp_path / "less.gguf"
    ended = pyggml("ablate", "-m", tiny, "--heads", "1.0,0.1", "--neurons", "1.3,1.5", "-o", out)
    assert ended.code == 0 and "blk.1.ffn_down 2" in ended.row("ranks"), ended.err
    model, less = library.load(tiny, compute="f32"), library.load(tiny, out, "f32")
    scale = {f"blk.{i}.attention": At(0, heads=[1 - i]) for i in (0, 1)}
    with model.trace(scale=scale | {"blk.1.ffn_neurons": At(0, neurons=[3, 5])}):
        wanted = model.logits([1, 2, 3, 4])
    np.testing.assert_allclose(less.logits([1, 2, 3, 4]), wanted, atol=1e-5)
    assert np.abs(wanted - model.logits([1, 2, 3, 4])).max() > 1e-3
    assert pyggml("inspect", out).code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "wanted --heads or --neurons"),
        (("--heads", "4"), "--heads has '4', wanted a block and a number"),
        (("--neurons", "1.x"), "--neurons has '1.x', wanted"),
        (("--heads", "0.99"), "block 0 has no head 99 among"),
        (("--neurons", "7.0"), "there is no block 7"),
    ],
)
def test_bad_input_is_one_sentence(pyggml, tiny, tmp_path, words, said):
    ended = pyggml("ablate", "-m", tiny, "-o", tmp_path / "a.gguf", *words)
    assert ended.code == 2 and said in ended.err and ended.err.count("\n") == 1, ended.err
    assert not (tmp_path / "a.gguf").exists()
