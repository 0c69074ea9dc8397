"""`pyggml combine`: one adapter of several, what it prints, and what it refuses."""

import numpy as np
import pytest

import pyggml as library
from pyggml.lora import LoraConfig, attach


@pytest.fixture(scope="module")
def adapters(tiny, tmp_path_factory):
    folder, paths = tmp_path_factory.mktemp("adapters"), []
    for seed, metadata in enumerate([{}, {"tokenizer.chat_template": "{{ messages }}"}]):
        made = attach(library.load(tiny), LoraConfig(rank=2, alpha=3.0, seed=seed))
        p = made.parameters.data
        p[:] = np.random.default_rng(seed).normal(0, 0.2, p.size)
        paths.append(folder / f"{seed}.gguf")
        made.save(paths[-1], metadata)
    return paths


def test_one_adapter_does_what_two_do(pyggml, tiny, adapters, tmp_path):
    out, (first, second) = tmp_path / "c.gguf", adapters
    given = ("-m", tiny, "--lora", f"{first}:0.5", "--lora", second, "-o", out)
    ended = pyggml("combine", *given)
    assert ended.code == 0, ended.err
    assert " leaves " not in ended.out and f"of {first}:0.5, {second}" in ended.out
    assert f"chats are written as {second.name} was trained" in ended.out
    both = library.load(tiny, [(first, 0.5), second], "f32")
    one = library.load(tiny, [out], "f32")
    np.testing.assert_allclose(one.logits([1, 2, 3]), both.logits([1, 2, 3]), atol=1e-5)
    assert one.adapters[0].chats == both.adapters[1].chats != {}
    on = pyggml("finetune", "-m", tiny, "--init", out, "--dry-run", "-f", __file__, "--ctx", 32)
    assert on.code == 0, on.err


@pytest.mark.parametrize("how", [("--rank", 1), ("--method", "ties"), ("--error", 0.6)])
def test_what_a_rank_leaves_out_is_said(pyggml, tiny, adapters, tmp_path, how):
    each = [word for path in adapters for word in ("--lora", path)]
    ended = pyggml("combine", "-m", tiny, *each, "-o", tmp_path / "c.gguf", *how)
    assert ended.code == 0 and "most " in ended.out
    ranks = {p.rank for p in library.load(tiny, [tmp_path / "c.gguf"]).adapters[0].values()}
    assert "--error" in how or ranks == {1 if "--rank" in how else 2}
    said = " to ".join(str(n) for n in sorted({min(ranks), max(ranks)}))
    assert f"rank       {said} leaves " in ended.out


REFUSED = {
    "a weight of 0": (("--lora", "FIRST:0"), "--lora has the weight 0, wanted another"),
    "a density of a sum": (
        ("--density", 0.4),
        "--density is for ties, dare, dare-ties, prune, and",
    ),
    "a seed of ties": (
        ("--method", "ties", "--seed", 1),
        "--seed is for dare, dare-ties, and ties",
    ),
    "a majority": (
        ("--method", "dare", "--majority", "frequency"),
        "--majority is for ties, dare-t",
    ),
    "a density": (
        ("--method", "ties", "--density", 2),
        "--density is 2.0, wanted above 0, at most",
    ),
    "a rank and an error": (("--rank", 1, "--error", 0.1), "--error is given beside a rank"),
    "a method": (
        ("--method", "mean"),
        "--method is 'mean', wanted one of sum, ties, dare, dare-ties",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_sentence(pyggml, tiny, adapters, tmp_path, name):
    words, said = REFUSED[name]
    words = [str(word).replace("FIRST", str(adapters[0])) for word in words]
    given = ("-m", tiny, "--lora", adapters[1], "-o", tmp_path / "c.gguf")
    ended = pyggml("combine", *given, *words)
    assert ended.code == 2 and said in ended.err and ended.err.count("\n") == 1, ended.err
    assert not (tmp_path / "c.gguf").exists()
