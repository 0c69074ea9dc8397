"""Importance matrices: what the taps see is what the matrices multiply."""

from pathlib import Path

import numpy as np
import pytest
from llama_models import GOLDEN, VARIANTS
from llama_models import write as write_variant
from reference_backend import ReferenceBackend
from tiny_models import TOKENS, VOCABULARY, write_llama

import pyggml
from pyggml.backends.cpu import CPU
from pyggml.errors import ConfigError, DataError
from pyggml.graph import Graph
from pyggml.graph.tensor import leaf
from pyggml.lora.evaluate.importance import Collector
from pyggml.ops import mul, mul_mat
from pyggml.requantize import requantize
from pyggml.requantize.imatrix import read_imatrix
from pyggml.runtime import Devices, bind, schedule

PEERS = Path(__file__).parents[1] / "golden/peers"
NAMES = sorted(p.stem for p in GOLDEN.glob("*.npz") if not p.stem.endswith("-long"))
TEXT = "the path to the other thing\n" * 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_llama(path, len(TOKENS), n_layer=2, seed=1, keys=VOCABULARY)
    return pyggml.load(path, compute="f32")


def collected(model, text=TEXT, n_ctx=16, most=None):
    found = Collector(model, {"text.txt": text}, n_ctx, most)
    (*_, n) = found.run()
    return found.result(n)


def use_numbers_as_tokens(monkeypatch, model):
    """Two chunks of the first tokens, whatever the text is: models that have no vocabulary."""

    def chunks(model, tokens, n_ctx):
        return np.arange(2 * n_ctx, dtype=np.int32).reshape(2, n_ctx) % 60

    class Words:
        add_bos, bos_id = False, None

        def encode(self, text, parse_special):
            return [0]

    monkeypatch.setattr("pyggml.lora.evaluate.importance.chunks_of", chunks)
    monkeypatch.setitem(model.__dict__, "tokenizer", Words())


def test_sums_are_those_of_the_inputs(model):
    """Of the first block's q, k and v: normed rows of the embedding, whatever chunk they are in."""
    made = collected(model)
    ids = np.array(model.tokenizer.encode(TEXT))
    ids = ids[: len(ids) // 16 * 16]
    x = model.parts.weights["token_embd.weight"].data[ids].astype(np.float64)
    norm = model.parts.weights["blk.0.attn_norm.weight"].data
    y = x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * norm
    for name in ("attn_q", "attn_k", "attn_v"):
        sums = made.sums[f"blk.0.{name}.weight"]
        np.testing.assert_allclose(sums.squares, (y**2).sum(0, keepdims=True), rtol=1e-5)
        assert sums.counts.tolist() == [len(ids)]
    assert len(made.sums) == 2 * 7 and "output.weight" not in made.sums
    assert (made.n_chunks, made.n_ctx, made.datasets) == (len(ids) // 16, 16, ("text.txt",))


def test_the_first_chunks_may_do(model):
    few = collected(model, most=2)
    assert few.n_chunks == 2
    assert {s.counts.item() for s in few.sums.values()} == {32.0}
    whole = collected(model)
    assert (
        few.sums["blk.1.ffn_down.weight"].squares < whole.sums["blk.1.ffn_down.weight"].squares
    ).all()


def test_experts_have_sums_of_their_own(monkeypatch):
    """Against the sum over all of them, and each expert's own rows."""
    path = PEERS / "qwen3moe.gguf"
    model = pyggml.load(path, compute="f32")
    use_numbers_as_tokens(monkeypatch, model)
    made = collected(model)
    gate, up, down = (made.sums[f"blk.0.ffn_{x}_exps.weight"] for x in ("gate", "up", "down"))
    assert gate.squares.shape == (6, 32) and down.squares.shape == (6, 24)
    assert gate.counts.sum() == 32 * 3 == down.counts.sum()
    np.testing.assert_array_equal(gate.squares, up.squares)
    np.testing.assert_array_equal(gate.counts, down.counts)
    router = made.sums["blk.0.ffn_gate_inp.weight"]
    assert router.squares.shape == (1, 32)
    np.testing.assert_allclose(gate.squares.sum(0), 3 * router.squares[0], rtol=1e-5)
    assert ((gate.counts > 0) == (gate.squares.sum(1) > 0)).all()


@pytest.mark.parametrize("name", NAMES)
def test_every_matrix_of_a_block_has_sums_that_quantize_takes(monkeypatch, tmp_path, name):
    path = write_variant(tmp_path / "model.gguf", *VARIANTS[name])
    model = pyggml.load(path, compute="f32")
    use_numbers_as_tokens(monkeypatch, model)
    made = collected(model)
    made.save(tmp_path / "i.gguf")
    specs, in_file = model.parts.decoder.tensors().items(), model.parts.weights
    linear = {n for n, s in specs if s.linear and n.startswith("blk.") and n in in_file}
    assert linear <= set(made.sums)
    of_heads = [s for n, s in made.sums.items() if n.endswith(("_k_b.weight", "_v_b.weight"))]
    assert all(len(sums.counts) == 1 for sums in of_heads), "llama.cpp counts heads once"
    read = read_imatrix(tmp_path / "i.gguf")
    requantize(path, tmp_path / "q.gguf", "IQ4_NL", importance=read)


def test_bad_contexts_and_texts_are_refused(model):
    for n_ctx in (15, 65):
        with pytest.raises(ConfigError, match=f"n_ctx is {n_ctx}, wanted 16 to the model's 64"):
            Collector(model, {"t": TEXT}, n_ctx)
    with pytest.raises(DataError, match="wanted at least 32, two contexts of 16"):
        Collector(model, {"t": "short"}, 16)


def test_a_file_is_llama_cpp_s(model, tmp_path):
    made = collected(model)
    made.save(tmp_path / "i.gguf")
    again = read_imatrix(tmp_path / "i.gguf")
    for name, sums in made.sums.items():
        np.testing.assert_array_equal(again.sums[name].means, sums.means)


@pytest.mark.parametrize("devices", [Devices(), Devices([ReferenceBackend(["mul"]), CPU()])])
@pytest.mark.filterwarnings("ignore:reference leaves")
def test_what_is_watched_is_seen_in_every_run_and_takes_no_memory(devices, rng):
    """As soon as it is made, on whatever device: what is done next may write over it."""
    w, x = (leaf(rng.standard_normal((4, 4)).astype(np.float32), n) for n in "wx")
    squares = mul(x, x)
    y = mul_mat(w, squares)
    out = mul(y, y)
    seen = []
    watched = {squares: seen.append, y: seen.append}
    program = bind(schedule(Graph.of(out), devices, watched))
    assert program.schedule.n_bytes == schedule(Graph.of(out), devices).n_bytes
    program()
    program()
    assert len(seen) == 4
    for found, product in (seen[:2], seen[2:]):
        np.testing.assert_array_equal(found, x.data**2)
        np.testing.assert_allclose(product, found @ w.data.T, rtol=1e-5)


def test_inputs_that_are_not_finite_have_no_importance(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_llama(path, len(TOKENS), n_layer=2, seed=1, keys=VOCABULARY)
    broken = pyggml.load(path, compute="f32")
    norm = broken.parts.weights["blk.1.ffn_norm.weight"]
    norm.data = np.full_like(norm.data, np.inf)
    with pytest.raises(DataError, match="the input of blk.1.ffn_.* is not finite, so it has no im"):
        collected(broken)


def test_a_trace_s_changes_are_in_what_matrices_multiply(model):
    plain = collected(model).sums
    with model.trace(scale={"blk.0.out": 2.0}):
        changed = collected(model).sums
    for name, sums in plain.items():
        same = np.array_equal(changed[name].squares, sums.squares)
        assert same == name.startswith("blk.0."), name
