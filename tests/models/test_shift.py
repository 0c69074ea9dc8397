"""A full context drops some tokens and goes on; those that stay are where they would have been."""

import numpy as np
import pytest
from extras import need

import pyggml
from pyggml.errors import ConfigError
from pyggml.generation import Batch, Finish, Session, complete

from measures import nmse
from peers.trial import in_f32

TEXT = np.arange(24) * 7 % 11
YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 8,
}
HEADS = {"embedding_length": 64, "attention.head_count": 2, "attention.head_count_kv": 1}
CASES = [(name, {}) for name in ("llama", "qwen3", "gemma2", "cohere2", "bloom", "phi3", "gptneox")]
CASES += [(name, {}) for name in ("deepseek2", "minicpm3")]


@pytest.mark.parametrize(("architecture", "keys"), [*CASES, ("llama", YARN)])
def test_in_one_layer_it_is_as_if_the_rest_had_been_fed_alone(architecture, keys, tiny):
    """There no key or value has taken anything from another token. Interleaved and split rotations,
    parts of a head, YaRN, a window, none at all, ALiBi, latent keys."""
    model = pyggml.load(tiny(architecture, keys, sizes={"block_count": 1}), compute="f32")
    batch = Batch(model, 2, 24)
    other, slot = batch.open(), batch.open()
    batch.feed({slot: TEXT, other: TEXT[:9]})
    assert slot.shift(3) == 10
    left = [*TEXT[:3], *TEXT[13:]]
    assert slot.tokens == left
    found = batch.feed({slot: [2, 5], other: [2, 5]})
    for text, logits in (([*left, 2, 5], found[slot]), ([*TEXT[:9], 2, 5], found[other])):
        wanted = Session(model, 24).feed(text)
        assert np.abs(logits - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_it_goes_on_for_long(tiny):
    """Shift upon shift, by halves and by bytes; one program serves all."""
    for kind, most in (("f16", 1e-3), ("q8_0", 0.05)):
        model = pyggml.load(tiny(sizes=HEADS), compute="auto")
        session, text = Session(model, 24, kind), []
        for token in np.arange(100) * 3 % 11:
            if session.n_past == 24:
                n = session.shift(4)
                del text[4 : 4 + n]
            text.append(int(token))
            logits = session.feed([token])
        wanted = Session(model, 24, kind).feed(text)
        assert ((logits - wanted) ** 2).sum() < most * (wanted**2).sum()


@pytest.mark.parametrize("architecture", ["mamba", "lfm2", "gpt2"])
def test_what_belongs_to_all_tokens_cannot_shift(architecture, tiny):
    session = Session(pyggml.load(tiny(architecture)), 8)
    session.feed([1, 2, 3, 4])
    with pytest.raises(ConfigError, match=f"the context of {architecture} cannot shift"):
        session.shift()
    assert session.n_past == 4


def test_an_answer_goes_on_beyond_its_context(golden_file):
    model, prompt = pyggml.load(golden_file("qwen3-F16.gguf")), [5, 77, 301, 9]
    ends = [piece.finish for piece in complete(model, prompt, 30, n_ctx=16)]
    goes = [piece.finish for piece in complete(model, prompt, 30, n_ctx=16, n_keep=2)]
    assert (len(ends), ends[-1]) == (12, Finish.CONTEXT)
    assert (len(goes), goes[-1]) == (30, Finish.LENGTH)
    with pytest.raises(ConfigError, match="keep is 15, wanted 0 to 14"):
        next(complete(model, prompt, 30, n_ctx=16, n_keep=15))


def test_a_shifted_sequence_is_no_prompt_of_another(tiny):
    """Its keys tell of tokens that are gone; those that were kept do not."""
    model = pyggml.load(tiny())
    batch = Batch(model, 2, 8)
    slot = batch.open()
    batch.feed({slot: [1, 2, 3, 4, 5, 6, 7]})
    slot.shift(2)
    tokens = [*slot.tokens]
    assert batch.open([*tokens, 9]).n_past == 2
    slot.truncate(2)
    batch.feed({slot: tokens[2:]})
    slot.close()
    assert batch.open([*tokens, 9]).n_past == len(tokens)


def test_there_is_something_to_drop(tiny):
    session = Session(pyggml.load(tiny()), 8)
    session.feed([1, 2, 3])
    for n_keep in (-1, 2, 3):
        with pytest.raises(ConfigError, match=f"keep is {n_keep}, wanted 0 to 1 of 3 tokens"):
            session.shift(n_keep)


@pytest.mark.interop
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_as_llama_cpp_shifts(architecture, golden_file, golden, tmp_path):
    """All layers, by the logits of the tokens that follow."""
    llama_cpp = need("llama_cpp")
    path = in_f32(golden_file(f"{architecture}-F16.gguf"), tmp_path / "f32.gguf")
    tokens = golden(architecture)["tokens"][:40]
    model = pyggml.load(path, compute="f32")
    session = Session(model, 40)
    unshifted = session.feed(tokens[:33])
    n = session.shift(5)
    assert n == 14
    theirs = llama_cpp.Llama(
        str(path), n_ctx=64, type_k=0, type_v=0, flash_attn=False, logits_all=True, verbose=False
    )
    theirs.eval(tokens[:33].tolist())
    memory = llama_cpp.llama_get_memory(theirs.ctx)
    assert llama_cpp.llama_memory_seq_rm(memory, 0, 5, 5 + n)
    llama_cpp.llama_memory_seq_add(memory, 0, 5 + n, 33, -n)
    theirs.n_tokens = 33 - n
    theirs.eval(tokens[33:].tolist())
    found, wanted = session.feed(tokens[33:]), theirs.scores[33 - n + 6]
    assert nmse(found, wanted) < 1e-6
    assert nmse(found, model.logits(tokens)[-1]) > 1e-4, "the shift changes something"
    assert nmse(unshifted, found) > 1e-4
