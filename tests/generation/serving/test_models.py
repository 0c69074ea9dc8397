"""Real models behind a scheduler: each request gets what it would get alone."""

from pathlib import Path

import numpy as np
import pytest
import tiny_models

import pyggml
from pyggml.generation import Batch, Completion, Sampling, Session
from pyggml.generation.serving import Request, Scheduler

import chats

MODELS = Path(__file__).parents[2] / "golden/models"
N_TOKENS = 10


def completion(prompt):
    return Completion(chats.vocabulary(), Sampling(temperature=0), prompt, N_TOKENS)


def alone(model, prompt):
    session, answer = Session(model, 96), completion(prompt)
    logits = session.feed(prompt)
    while answer.take(logits[:256]).finish is None:
        logits = session.feed(answer.tokens[-1:])
    return answer.tokens


@pytest.mark.parametrize("name", ["qwen3-F16", "mamba-Q4_K_M"])
def test_each_gets_what_it_would_get_alone(name, rng):
    """Five requests that begin alike, two slots; of a model with a state, too."""
    model = pyggml.load(MODELS / f"{name}.gguf")
    start = rng.integers(6, 250, 40)
    prompts = [np.append(start, rng.integers(6, 250, 3 + i)).astype(np.int32) for i in range(5)]
    batch = Batch(model, 2, 96)
    scheduler = Scheduler(batch)
    feed = batch.feed
    batch.feed = lambda *given: {slot: row[:256] for slot, row in feed(*given).items()}
    made = [
        Request(prompt=p, completion=completion(p), model=model, tell=lambda piece: None)
        for p in prompts
    ]
    for request in made:
        scheduler.submit(request)
    while scheduler.step():
        pass
    assert [r.completion.tokens for r in made] == [alone(model, p) for p in prompts]
    assert [r.n_cached for r in made] == [0, 40, 40, 40, 40] if model.batches else [0] * 5


class Logits(Completion):
    """Keeps the logits that it samples from."""

    def __init__(self, prompt, model):
        super().__init__(model.tokenizer, Sampling(temperature=0), prompt, N_TOKENS)
        self.rows = []

    def take(self, logits):
        self.rows.append(logits.copy())
        return super().take(logits)


def answer_all(scheduler, model, prompts, n_told=0):
    """The requests of some prompts, answered together; the first n_told prompts are told."""
    requests = [
        Request(
            prompt=p, completion=Logits(p, model), model=model, tell=lambda piece: None,
            n_likeliest=0 if i < n_told else None,
        )
        for i, p in enumerate(prompts)
    ]  # fmt: skip
    for request in requests:
        scheduler.submit(request)
    while scheduler.step():
        pass
    return requests


@pytest.fixture
def passes_of_32(monkeypatch):
    """Whole passes that prompts of a small model fill."""
    monkeypatch.setattr("pyggml.generation.passes.MOST_TOKENS", 32)
    monkeypatch.setattr("pyggml.generation.serving.scheduler.MOST_TOKENS", 32)


@pytest.mark.parametrize("name", ["llama-Q8_0", "qwen2-Q4_K_M", "qwen3-F16", "mamba-Q4_K_M"])
def test_in_a_deterministic_batch_company_changes_no_bit(name, rng, passes_of_32):
    """Together, again once prompts are cached, beside a prompt that is told, and as a session."""
    model = pyggml.load(MODELS / f"{name}.gguf")
    start = rng.integers(6, 250, 70)
    prompts = [np.append(start, rng.integers(6, 250, 1 + 9 * i)).astype(np.int32) for i in range(4)]
    scheduler = Scheduler(Batch(model, 5, 128, deterministic=True))
    first, again = (answer_all(scheduler, model, prompts) for _ in range(2))
    _, *beside = answer_all(scheduler, model, prompts[:1] + prompts, n_told=1)
    assert model.batches == any(request.n_cached for request in again)
    assert all(request.n_cached % 32 == 0 for request in [*first, *again, *beside])
    for i, prompt in enumerate(prompts):
        session, answer = Session(model, 128), Logits(prompt, model)
        logits = session.feed(prompt)
        while answer.take(logits).finish is None:
            logits = session.feed(answer.tokens[-1:])
        for request in (first[i], again[i], beside[i]):
            assert np.array_equal(request.completion.rows, answer.rows)


def test_a_deterministic_batch_shares_what_whole_passes_read(rng, passes_of_32):
    """Not what follows a cut within one: those tokens had another pass than a new prompt has."""
    batch = Batch(pyggml.load(MODELS / "qwen3-F16.gguf"), 2, 128, deterministic=True)
    slot, ids = batch.open(), rng.integers(6, 250, 100).astype(np.int32)
    batch.feed({slot: ids[:70]})
    assert batch.open(ids).n_past == 64
    slot.truncate(40)
    batch.feed({slot: ids[40:]})
    batch.slots[1].close()
    batch.slots[1].truncate(0)
    assert batch.open(ids).n_past == 32


@pytest.fixture
def phi3(tmp_path):
    """Sequences of more than 16 tokens have long rotary factors."""
    factors = {"short": (1.0, 3.0), "long": (2.0, 0.5)}
    path = tiny_models.write(
        tmp_path / "phi3.gguf", "phi3",
        keys=tiny_models.VOCABULARY | {"phi3.rope.scaling.original_context_length": 16},
        tensors={f"rope_factors_{k}.weight": np.array(f, np.float32) for k, f in factors.items()},
        n_vocab=len(tiny_models.TOKENS), numbers=tiny_models.scaled,
    )  # fmt: skip
    return pyggml.load(path, compute="f32")


def test_answers_that_grow_beyond_the_original_context(phi3, rng):
    """Each logit is that of a whole run of the tokens so far, with short rotary factors or long."""
    model, start = phi3, rng.integers(6, 250, 8)
    prompts = [np.append(start, rng.integers(6, 250, n)).astype(np.int32) for n in (3, 5, 8, 9, 30)]
    scheduler = Scheduler(Batch(model, 3, 64))
    for n_told in (0, 5):
        for request in answer_all(scheduler, model, prompts, n_told):
            text = [*request.prompt.tolist(), *request.completion.tokens]
            for n, row in enumerate(request.completion.rows, len(request.prompt)):
                wanted = model.logits(text[:n])[-1]
                assert np.abs(row - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_a_long_prompt_that_is_told_is_long_from_its_first_piece_on(phi3, rng, monkeypatch):
    monkeypatch.setattr("pyggml.generation.serving.scheduler.PREFILL_READ", 10)
    prompt, events = rng.integers(6, 250, 30).astype(np.int32), []
    scheduler = Scheduler(Batch(phi3, 2, 64))
    scheduler.submit(
        Request(
            prompt=prompt, completion=Logits(prompt, phi3), model=phi3, tell=events.append,
            n_likeliest=0,
        )
    )  # fmt: skip
    while scheduler.step():
        pass
    logits = phi3.logits(prompt)[:-1].astype(np.float64)
    wanted = logits[np.arange(29), prompt[1:]] - np.log(np.exp(logits).sum(axis=1))
    found = [piece.logprob for piece in events[0].pieces[1:]]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
