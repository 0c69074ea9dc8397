"""Changed models that train: a short round, and what the round notices."""

import random

import numpy as np
import pytest

from attacks import trained
from attacks.targets.target import folder
from pyggml import gguf
from pyggml.errors import PyggmlError


@pytest.mark.filterwarnings("ignore")
def test_a_short_round():
    tally = trained.attack(["llama"], 60, 0, folder())
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.n_loaded == 60 and tally.n_refused
    assert tally.ends["trained"] and tally.ends["refused to train"]


def tally_of(use):
    tally = trained.Tally()
    trained.check(trained.model_bytes("llama"), folder() / "m.gguf", tally, use)
    return tally


def raising(error):
    def use(model):
        raise error

    return use


@pytest.mark.parametrize("error", [PyggmlError("a\nb"), IndexError(1), AssertionError("nan")])
def test_an_error_that_is_no_sentence_fails(error):
    assert tally_of(raising(error)).failures


def test_a_sentence_is_no_failure():
    tally = tally_of(raising(PyggmlError("no")))
    assert not tally.failures and tally.ends == {"refused to train": 1}


def test_weights_and_metadata_are_both_changed():
    whole, rng = trained.model_bytes("llama"), random.Random(0)
    path = folder() / "m.gguf"
    path.write_bytes(whole)
    with gguf.open(path) as file:
        head = len(whole) - sum(t.n_bytes for t in file.tensors.values())
    a = np.frombuffer(whole, np.uint8)
    where = [
        np.flatnonzero(np.frombuffer(c, np.uint8) != a)
        for c in (trained.change(rng, whole, head) for _ in range(60))
        if len(c) == len(whole)
    ]
    assert any((w < head).all() for w in where if len(w))
    assert any((w >= head).all() for w in where if len(w))
