"""Kinds of adapters: slopes of the loss, files, merges, dropout, and runs that go on."""

import numpy as np
import pytest
from tiny_models import NO_VOCABULARY, write_llama

import pyggml
from pyggml import gguf
from pyggml.errors import AdapterError, NotFiniteError
from pyggml.graph.tensor import leaf
from pyggml.lora import (
    LoraConfig,
    Parameters,
    attach,
    loss_and_grads,
    merge,
    train_tensors,
    unfreeze,
)
from pyggml.lora.adapter.starts import pissa
from pyggml.lora.adapter.targets import targets
from pyggml.models import LoraPair

from measures import nmse
from peers.trial import llama_cpp_logits
from runs import state, steps

TOKENS = np.arange(30) * 11 % 48
LENGTHS = [30, 12, 7, 25, 9, 18, 22, 14]  # of documents; the last one is held out
PATTERNS = {"rank_pattern": {"ffn_*": 5, "blk.0.*": 2}, "alpha_pattern": {"attn_q": 3.3}}
KINDS = {
    "rslora": {"rslora": True},
    "patterns": {"rslora": True, **PATTERNS},
    "pissa": {"init": "pissa", **PATTERNS},
    "dora": {"dora": True, **PATTERNS},
}


def made(path, **settings):
    """An adapter of rank 3 and alpha 5 whose numbers are all random, exactly computed."""
    model = pyggml.load(path, compute="f32")
    adapter = attach(model, LoraConfig(**{"rank": 3, "alpha": 5.0, **settings}))
    for name, t in adapter.parameters.tensors.items():
        rng = np.random.default_rng(list(name.encode()))
        t.data[:] += rng.normal(0, 0.1, t.shape)
    return adapter


# -- gradients ----------------------------------------------------------------------------------


def is_slope(t, gradient, loss):
    """Whether <gradient, v> is the loss's slope along a random v, which t is moved along."""
    along = np.random.default_rng(3).standard_normal(t.shape)
    along /= np.linalg.norm(along)
    start, ends = t.data.copy(), []
    for side in (1, -1):
        t.data[:] = start + side * 0.02 * along
        ends.append(loss())
    t.data[:] = start
    slope = (ends[0] - ends[1]) / 0.04
    return abs(np.sum(gradient * along) - slope) < 3e-3 * np.linalg.norm(gradient)


def test_gradients_of_a_model_s_own_tensors_are_slopes(tiny):
    names = ("output_norm", "blk.*.attn_norm", "blk.1.ffn_up", "output")
    trained = train_tensors(pyggml.load(tiny, compute="f32"), names)
    parameters = trained.parameters.tensors
    assert len(parameters) == 6

    def loss():
        return loss_and_grads(trained.model, TOKENS, parameters=parameters)[0]

    _, grads = loss_and_grads(trained.model, TOKENS, parameters=parameters)
    for name, t in parameters.items():
        assert is_slope(t, grads[name], loss), name


def test_a_drop_s_gradient_is_the_slope_of_that_draw(trainer_of):
    """With the numbers of one draw the loss of training is a function like any other."""
    trainer = trainer_of(lora={"dropout": 0.4}, clip=0.0, load={"compute": "f32"})
    p, passes = trainer.parameters, trainer.passes
    p.data[:] = np.random.default_rng(0).normal(0, 0.1, p.data.shape)
    batch = next(trainer.corpus.train.batches([0], 1))
    number = 3

    def loss():
        passes.draw(7, number)
        return passes.train(batch)

    plain, value = passes.evaluate(batch), loss()
    assert abs(plain - value) > 1e-3, "nothing is dropped"
    assert loss() == value
    p.gradient[:] = 0
    loss()
    grads = {n: g.data.copy() for n, g in p.gradients.items()}
    for name in ("blk.0.attn_q.weight.lora_a", "blk.1.ffn_down.weight.lora_b"):
        assert is_slope(p.tensors[name], grads[name], loss), name
    number = 4
    assert loss() != value
    assert passes.evaluate(batch) == plain


# -- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rslora", "patterns", "pissa"])
def test_a_file_holds_what_was_trained_and_is_trained_on(tiny, tmp_path, kind):
    """By llama.cpp's rule, and with the split into what is trained and what is not."""
    adapter = made(tiny, **KINDS[kind])
    adapter.save(tmp_path / "a.gguf")
    wanted = adapter.model.logits(TOKENS)
    assert nmse(by_llama_cpp_s_rule(tiny, tmp_path / "a.gguf").logits(TOKENS), wanted) < 1e-10
    again = unfreeze(pyggml.load(tiny, adapter=tmp_path / "a.gguf", compute="f32"))
    assert nmse(again.model.logits(TOKENS), wanted) < 1e-10
    assert again.pairs.keys() == adapter.pairs.keys()
    for name, pair in again.pairs.items():
        was = adapter.pairs[name]
        assert pair.scale == pytest.approx(was.scale, rel=1e-7)
        np.testing.assert_array_equal(pair.a.data, was.a.data)
        np.testing.assert_allclose(pair.b.data, was.b.data, rtol=3e-7)  # folded and unfolded
    assert (again.config.init, again.fixed.keys()) == (adapter.config.init, adapter.fixed.keys())
    again.save(tmp_path / "b.gguf")
    assert nmse(by_llama_cpp_s_rule(tiny, tmp_path / "b.gguf").logits(TOKENS), wanted) < 1e-10


def by_llama_cpp_s_rule(model, path):
    """One alpha for all over the rank of the tensors, no key of ours."""
    pairs, base = {}, pyggml.load(model, compute="f32")
    with gguf.open(path) as file:
        alpha = file.get("adapter.lora.alpha")
        for name in {n[:-7] for n in file.tensors}:
            a, b = (leaf(np.array(file.data(f"{name}.lora_{x}"))) for x in "ab")
            pairs[name] = LoraPair(a, b, alpha / a.shape[0])
    return base.with_adapters(pairs)


def test_rslora_s_alpha_is_alpha_times_the_root_of_the_rank(tiny, tmp_path):
    attach(pyggml.load(tiny), LoraConfig(rank=4, alpha=7.0, rslora=True)).save(tmp_path / "a.gguf")
    with gguf.open(tmp_path / "a.gguf") as file:
        assert file.get("adapter.lora.alpha") == 14.0
        assert [key for key in file.metadata if key.startswith("pyggml")] == ["pyggml.lora.base"]


HOSTILE = [
    ("pyggml.lora.alphas", np.ones(2), "is an array of 2, wanted an array of 21 float64"),
    ("pyggml.lora.alphas", np.full(21, np.nan), "is not finite and above 0"),
    ("pyggml.lora.alphas", "all", "is 'all', wanted an array"),
    ("pyggml.lora.fixed_ranks", np.full(21, 3, np.int32), "is 3 for blk.0.attn_q.weight, wanted"),
    ("pyggml.lora.fixed_ranks", np.full(21, -1, np.int32), "is -1 for blk.0.attn_q.weight"),
]


@pytest.mark.parametrize("key, value, message", HOSTILE)
def test_our_keys_are_checked(tiny, tmp_path, key, value, message):
    made(tiny).save(tmp_path / "a.gguf")
    with gguf.open(tmp_path / "a.gguf") as file:
        tensors = [(n, t.dtype, t.shape, file.data(n)) for n, t in file.tensors.items()]
        gguf.write(tmp_path / "b.gguf", dict(file.metadata) | {key: value}, tensors)
    with pytest.raises(AdapterError, match=f"{key} {message}"):
        pyggml.load(tiny, adapter=tmp_path / "b.gguf")


@pytest.mark.parametrize("kind", [*KINDS, "plain"])
def test_a_merged_model_gives_the_adapter_s_logits(tiny, tmp_path, kind):
    adapter = made(tiny, **KINDS.get(kind, {}))
    merge(adapter.model, tmp_path / "m.gguf")
    merged = pyggml.load(tmp_path / "m.gguf", compute="f32")
    assert nmse(merged.logits(TOKENS), adapter.model.logits(TOKENS)) < 1e-10
    assert nmse(merged.logits(TOKENS), pyggml.load(tiny).logits(TOKENS)) > 1e-3
    assert merged.file.get("general.name") == "tiny"


def test_a_dora_is_no_adapter_file_and_stands_on_no_other(tiny, tmp_path):
    adapter = made(tiny, dora=True)
    with pytest.raises(AdapterError, match="cannot hold DoRA's magnitudes: merge"):
        adapter.save(tmp_path / "a.gguf")
    plain = made(tiny)
    with pytest.raises(AdapterError, match="dora is on, wanted a model without other adapters"):
        attach(plain.model, LoraConfig(dora=True), on_top=True)


# -- starts, ranks, several -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_start_changes_nothing(tiny, kind):
    plain = pyggml.load(tiny, compute="f32")
    adapter = attach(plain, LoraConfig(rank=3, alpha=5.0, **KINDS[kind]))
    found, wanted = adapter.model.logits(TOKENS), plain.logits(TOKENS)
    np.testing.assert_allclose(found, wanted, atol=2e-5 if kind == "pissa" else 0)


def test_large_matrices_give_pissa_their_main_directions():
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.standard_normal((n, 300)))[0] for n in (400, 500))
    w = ((u / np.arange(1, 301)) @ v.T).astype(np.float32)
    a, b = pissa(w, 8, 2.5, 0, "w")
    want = (u[:, :8] / np.arange(1, 9)) @ v[:, :8].T
    assert np.linalg.norm(2.5 * b @ a - want) < 1e-4 * np.linalg.norm(want)


def test_the_last_pattern_that_fits_counts(tiny):
    patterns = {"ffn_*": 16, "blk.0.*": 4, "blk.0.ffn_up.weight": 5}
    found = targets(pyggml.load(tiny).parts, LoraConfig(rank=8, rank_pattern=patterns))
    ranks = {name.removesuffix(".weight"): t.rank for name, t in found.items()}
    assert (ranks["blk.1.ffn_up"], ranks["blk.0.ffn_down"], ranks["blk.0.ffn_up"]) == (16, 4, 5)
    assert (ranks["blk.2.attn_q"], ranks["blk.0.attn_q"]) == (8, 4)
    assert found["blk.1.ffn_up.weight"].scale == 1.0


def test_several_adapters_add_up_by_weight(tiny, tmp_path):
    files = []
    for i, kind in enumerate(("rslora", "pissa")):
        adapter = made(tiny, seed=i, **KINDS[kind])
        adapter.save(tmp_path / f"{kind}.gguf")
        files.append(tmp_path / f"{kind}.gguf")
    model = pyggml.load(tiny, [(files[0], 0.5), files[1]], compute="f32")
    assert len(model.adapters) == 2
    merge(model, tmp_path / "m.gguf")
    merged = pyggml.load(tmp_path / "m.gguf", compute="f32").logits(TOKENS)
    assert nmse(model.logits(TOKENS), merged) < 1e-10
    whole = pyggml.load(tiny, files, compute="f32").logits(TOKENS)
    assert nmse(whole, merged) > 1e-4
    on_top = attach(model, LoraConfig(rank=2), on_top=True)
    np.testing.assert_array_equal(on_top.model.logits(TOKENS), model.logits(TOKENS))
    assert len(on_top.model.adapters) == 3 and len(unfreeze(model).model.adapters) == 3


# -- runs -----------------------------------------------------------------------------------------


RUNS = [
    {"dropout": 0.3, "plus_ratio": 8.0, **KINDS["patterns"]},
    {"dropout": 0.2, **KINDS["pissa"]},
    {"dropout": 0.2, **KINDS["dora"]},
]


@pytest.mark.parametrize("lora", RUNS, ids=["patterns", "pissa", "dora"])
def test_a_resumed_run_is_the_same_run(trainer_of, tmp_path, lora):
    """Also with other threads, with layers computed again, and with noise on the embeddings."""
    settings = {"lora": lora, "batch": 2, "grad_accum": 2, "max_steps": 4, "weight_decay": 0.1}
    settings["neftune_alpha"] = 5.0
    whole, events = trainer_of(**settings), []
    whole.run(events.append)
    first = trainer_of(**settings, checkpoint_dir=str(tmp_path), grad_checkpointing=True, threads=1)
    first.run(lambda event: first.stop() if getattr(event, "lr", 0) and event.step == 2 else None)
    assert first.progress.step == 2
    second = trainer_of(**settings, checkpoint_dir=str(tmp_path))
    second.parameters.data[:] = 7
    second.parameters.constant_data[:] = 7
    second.resume(tmp_path / "step-00000002.gguf")
    second.run()
    assert state(second) == state(whole)
    assert len({e.loss for e in steps(events)}) == 4
    constants = [t.parameters.constant_data.tobytes() for t in (second, whole)]
    assert constants[0] == constants[1] and bool(constants[0]) == ("init" in lora)


def test_rates_are_parts_of_the_buffers():
    shapes = {"a": (3, 5), "b": (40,), "c": (17,)}
    p = Parameters(shapes, rates={"b": 8.0})
    assert p.groups == ((0, 48, 1.0), (48, 48, 8.0))
    assert list(p.tensors) == list(shapes)
    p.tensors["b"].data[:] = 1
    assert p.data[48:88].all() and not p.data[:48].any()
    assert Parameters(shapes).groups == ((0, 96, 1.0),)


def test_an_adapter_that_is_not_finite_is_not_written(tiny, tmp_path):
    adapter = made(tiny)
    path = tmp_path / "a.gguf"
    adapter.save(path)
    before = path.read_bytes()
    adapter.parameters.tensors["blk.0.attn_q.weight.lora_b"].data[1, 1] = np.nan
    with pytest.raises(NotFiniteError, match=r"^blk.0.attn_q.weight.lora_b: not all"):
        adapter.save(path)
    assert path.read_bytes() == before


def test_tensors_that_cannot_be_trained_are_named(shared):
    model = pyggml.load(shared / "fixtures/llama-Q8_0.gguf")
    with pytest.raises(AdapterError) as caught:
        train_tensors(model, ["blk.0.attn_q", "nothing", "output_norm", "router", "last:4"])
    said = str(caught.value)
    assert "; the model has no router; 'last:4' fits no tensor" in said
    assert "did you mean 'last-4'?" in said and "'router'?" not in said
    assert "'nothing' fits no tensor" in said and "blk.0.attn_q.weight is Q8_0, wanted F32" in said


@pytest.mark.interop
@pytest.mark.parametrize("kind", ["rslora", "patterns", "pissa"])
def test_llama_cpp_gives_our_logits(tmp_path, kind):
    told = NO_VOCABULARY | {"llama.vocab_size": 48}  # llama.cpp wants both
    base = write_llama(tmp_path / "base.gguf", n_vocab=48, n_layer=3, seed=1, keys=told)
    adapter = made(base, **KINDS[kind])
    adapter.save(tmp_path / "a.gguf")
    ours, alone = adapter.model.logits(TOKENS), pyggml.load(base, compute="f32").logits(TOKENS)
    assert nmse(ours, alone) > 1e-3, "the adapter does next to nothing"
    assert nmse(llama_cpp_logits(base, TOKENS, tmp_path / "a.gguf"), ours) < 1e-5


@pytest.mark.interop
def test_llama_cpp_adds_up_adapters_as_we_do(tmp_path):
    """A merged model of two adapters, one at half its strength, gives the sum's logits."""
    told = NO_VOCABULARY | {"llama.vocab_size": 48}
    base = write_llama(tmp_path / "base.gguf", n_vocab=48, n_layer=3, seed=1, keys=told)
    files = []
    for seed in (1, 2):
        made(base, seed=seed, **KINDS["rslora"]).save(tmp_path / f"{seed}.gguf")
        files.append((tmp_path / f"{seed}.gguf", 1.0 / seed))
    both = pyggml.load(base, files, "f32")
    merge(both, tmp_path / "merged.gguf")
    theirs = llama_cpp_logits(tmp_path / "merged.gguf", TOKENS, None)
    assert nmse(theirs, both.logits(TOKENS)) < 1e-5
