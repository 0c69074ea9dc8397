"""Real models behind a scheduler: each request gets what it would get alone."""

from pathlib import Path

import numpy as np
import pytest

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
