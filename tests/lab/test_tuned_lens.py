"""The tuned lens: what training lowers, its file, and its table beside the logit lens."""

from pathlib import Path

import numpy as np
import pytest
from extras import need

import pyggml
from pyggml import gguf
from pyggml.errors import ConfigError, DataError, GGUFError
from pyggml.graph.arrays import read
from pyggml.graph.dtypes import F16, F32
from pyggml.lab import TunedLens, lens_table, train_tuned_lens
from pyggml.quants import dequantize

DEMO = Path(__file__).parents[2] / "cli/demo"
GOLDEN = Path(__file__).parents[1] / "golden/models/llama-Q8_0.gguf"
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 90, 16 * 9)


@pytest.fixture(scope="module")
def model():
    return pyggml.load(DEMO / "base.gguf", compute="f32")


@pytest.fixture(scope="module")
def text():
    return (DEMO / "shakespeare.txt").read_text(encoding="utf-8")[:20_000]


@pytest.fixture(scope="module")
def training(model, text):
    return train_tuned_lens(model, text, 30, n_window=64, n_held_out=3)


def divergences(model, windows, lens):
    """By hand, in float64, of the logit lens or of a tuned one: (n_blocks − 1,)."""
    found = []
    for ids in windows:
        rows = lens_table(model, ids, lens).lenses["logit" if lens is None else "tuned"]
        found.append(rows.divergence[:-1].mean(axis=1))
    return np.mean(found, axis=0)


def test_training_brings_each_block_nearer_to_the_last_on_windows_held_out(model, text, training):
    assert (training.after < 0.9 * training.before).all()
    windows = np.array(model.tokenizer.encode(text, add_special=False))[: 3 * 64].reshape(3, 64)
    for found, lens in ((training.before, None), (training.after, training.lens)):
        np.testing.assert_allclose(found, divergences(model, windows, lens), rtol=1e-4)
    assert len(training.losses) == 30 and training.losses[:3].mean() > training.losses[-3:].mean()
    for i, (before, after) in enumerate(zip(training.before, training.after, strict=True)):
        assert f"blk.{i}" in str(training)
        assert f"{before:.3f}  {after:10.3f}" in str(training)


def test_a_run_repeats_bit_for_bit(model, text):
    one, other = (train_tuned_lens(model, text, 3, n_window=32, n_held_out=1) for _ in range(2))
    for i, w in one.lens.weights.items():
        np.testing.assert_array_equal(w, other.lens.weights[i])
        assert np.abs(w).max() > 0
    np.testing.assert_array_equal(one.losses, other.losses)


def test_the_table_has_both_lenses_and_the_model_s_own_words_last(model, training):
    ids = np.array(model.tokenizer.encode("To be, or not to <b>"))
    table, logits = lens_table(model, ids, training.lens), model.logits(ids)
    for name, rows in table.lenses.items():
        np.testing.assert_array_equal(rows.top[-1], logits.argmax(-1))
        np.testing.assert_allclose(rows.divergence[-1], 0, atol=1e-6)
        assert name in str(table) and f"<caption>{name} lens" in table.draw()
    lens = pyggml.lens.logit_lens(model, ids)
    np.testing.assert_array_equal(table.lenses["logit"].top, lens.argmax(-1))
    p = np.exp(lens[0] - lens[0].max(-1, keepdims=True))
    np.testing.assert_allclose(table.lenses["logit"].share[0], p.max(-1) / p.sum(-1), rtol=1e-4)
    assert (table.lenses["tuned"].top[0] != table.lenses["logit"].top[0]).any()
    assert "<b>" not in table.draw() and max(map(len, str(table).splitlines())) <= 80


def test_a_trace_is_in_it(model, training):
    ids = np.arange(20, 30)
    plain = lens_table(model, ids).lenses["logit"]
    with model.trace(scale={"blk.0.ffn_out": 0.0}):
        without = lens_table(model, ids).lenses["logit"]
    assert np.abs(plain.share - without.share).max() > 0.01
    np.testing.assert_allclose(without.divergence[-1], 0, atol=1e-6)


def test_a_file_keeps_every_bit(training, tmp_path):
    training.lens.save(tmp_path / "lens.gguf")
    again = TunedLens.read(tmp_path / "lens.gguf")
    assert again.architecture == "qwen3" and [*again.weights] == [*training.lens.weights]
    for i, w in again.weights.items():
        np.testing.assert_array_equal(w, training.lens.weights[i])
        np.testing.assert_array_equal(again.biases[i], training.lens.biases[i])


def tensor(name, shape, dtype=F32, value=0.5):
    return name, dtype, shape, np.full(shape, value, dtype.numpy)


MAP = [tensor("translator.0.weight", (4, 4)), tensor("translator.0.bias", (4,))]


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([], "there are no maps"),
        ([*MAP, tensor("translator.01.bias", (4,))], "'translator.01.bias', wanted"),
        (MAP[:1], "translator.0.weight and no translator.0.bias"),
        (MAP[1:], "translator.0.bias and no translator.0.weight"),
        ([tensor("translator.0.weight", (4, 3)), MAP[1]], r"is F32\[4, 3\], wanted F32\[3, 3\]"),
        ([tensor("translator.0.weight", (4, 4), F16), MAP[1]], r"is F16\[4, 4\]"),
        ([MAP[0], tensor("translator.0.bias", (4,), value=np.nan)], "bias is not finite"),
        ([MAP[0], tensor("translator.0.bias", (5,))], "maps of 2 sizes"),
    ],
)
def test_a_file_that_holds_no_lens_is_refused(tmp_path, tensors, said):
    gguf.write(tmp_path / "lens.gguf", {"general.architecture": "tunedlens"}, tensors)
    with pytest.raises(GGUFError, match=said):
        TunedLens.read(tmp_path / "lens.gguf")


def test_another_kind_of_file_is_refused():
    with pytest.raises(GGUFError, match="architecture is 'llama', wanted 'tunedlens'"):
        TunedLens.read(GOLDEN)


def test_a_lens_of_another_model_is_refused(model):
    for block, n, said in [(7, 4, "a map of block 7 of 3"), (0, 4, "of 4 numbers, wanted")]:
        lens = TunedLens({block: np.zeros((n, n), "f")}, {block: np.zeros(n, "f")})
        with pytest.raises(ConfigError, match=said):
            lens_table(model, [1, 2], lens)


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"n_steps": 0}, ConfigError, "n_steps is 0"),
        ({"lr": 0.0}, ConfigError, "lr 0.0"),
        ({"n_held_out": 9}, DataError, "no window of 16 tokens beside the 9 held out"),
        ({"n_held_out": 99}, DataError, "has 9 windows of 16 tokens, wanted more than the 99"),
    ],
)
def test_what_cannot_be_trained_is_named(settings, error, said):
    golden = pyggml.load(GOLDEN, compute="f32")
    with pytest.raises(error, match=said):
        train_tuned_lens(golden, IDS, **{"n_steps": 2, "n_window": 16, **settings})


@pytest.mark.interop
def test_pytorch_trains_the_same_lens():
    """By its own AdamW, on the same streams and predictions, from weights unpacked to float32."""
    torch = need("torch")
    golden = pyggml.load(GOLDEN, compute="f32")
    c = golden.config
    packed = golden.parts.weights["output.weight"]
    output = torch.tensor(dequantize(read(packed), packed.dtype.name).reshape(c.n_vocab, c.n_embd))
    gain = torch.tensor(read(golden.parts.weights["output_norm.weight"]))
    eps = golden.parts.decoder.norm.eps
    ours = train_tuned_lens(golden, IDS, 8, n_window=16, n_held_out=1, lr=3e-3, weight_decay=0.1)
    for block, w in ours.lens.weights.items():
        maps = [torch.zeros(*s, requires_grad=True) for s in ((c.n_embd, c.n_embd), (c.n_embd,))]
        optimiser = torch.optim.AdamW(maps, lr=3e-3, weight_decay=0.1)
        for step, ids in enumerate(IDS.reshape(9, 16)[1:]):
            with golden.trace(f"blk.{block}.out") as t:
                p = torch.softmax(torch.tensor(golden.logits(ids)), -1)
            h = torch.tensor(t[f"blk.{block}.out"])
            moved = h + h @ maps[0].T + maps[1]
            normed = moved * torch.rsqrt((moved**2).mean(-1, keepdim=True) + eps) * gain
            log_q = torch.log_softmax(normed @ output.T, -1)
            optimiser.param_groups[0]["lr"] = 3e-3 * (1 - step / 8)
            optimiser.zero_grad()
            torch.nn.functional.kl_div(log_q, p, reduction="batchmean").backward()
            optimiser.step()
        np.testing.assert_allclose(w, maps[0].detach(), rtol=0, atol=1e-4)
        np.testing.assert_allclose(ours.lens.biases[block], maps[1].detach(), rtol=0, atol=1e-4)
