"""A tiny random llama model as a GGUF file, without a vocabulary."""

import numpy as np
import pytest
from tiny_models import write_llama

import pyggml
from pyggml.graph.arrays import array
from pyggml.lora import LoraConfig, TrainConfig, Trainer, attach
from pyggml.lora.trainer import gradient

LENGTHS = [30, 12, 7, 25, 9, 18, 22, 14]  # of documents; the last one is held out
N_VOCAB = 48


@pytest.fixture(autouse=True)
def _nobody_reads_a_gradient_before_its_pass(monkeypatch):
    """It is NaN where it counts as 0 until a pass writes over it."""
    zero = gradient._zero

    def nan_for_zero(parameters, devices, parts):
        counts_as_zero = zero(parameters, devices, parts)

        def begin():
            counts_as_zero()
            if not array(parameters.keeps).any():
                for each in parameters.gradients.values():  # what lies between stays 0
                    array(each)[...] = np.nan

        return begin

    monkeypatch.setattr(gradient, "_zero", nan_for_zero)


def _write(path, tied, seed):
    return write_llama(path, N_VOCAB, n_layer=3, seed=seed, tied=tied)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Path of a model with an output matrix of its own."""
    return _write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", tied=False, seed=1)


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory):
    """Path of another model, whose output matrix is its token embedding."""
    return _write(tmp_path_factory.mktemp("tied") / "tied.gguf", tied=True, seed=2)


@pytest.fixture(scope="session")
def corpus_of():
    """(ctx, lengths, n_held_out) -> Corpus of documents of random tokens of these lengths."""
    from pyggml.lora.data import Corpus, Dataset

    def packed(documents, ctx):
        ids = np.concatenate(documents)
        owner = np.repeat(np.arange(len(documents)), [len(d) for d in documents])
        n_fill = -len(ids) % (ctx + 1)
        ids = np.concatenate([ids, np.zeros(n_fill, int)])
        owner = np.concatenate([owner, -1 - np.arange(n_fill)])
        shape = (-1, ctx + 1)
        return Dataset(ids.astype(np.int32).reshape(shape), owner.astype(np.int32).reshape(shape))

    def make(ctx, lengths=LENGTHS, n_held_out=1, seed=0):
        rng = np.random.default_rng(seed)
        documents = [rng.integers(0, N_VOCAB, n) for n in lengths]
        cut = len(documents) - n_held_out
        held_out = packed(documents[cut:], ctx) if n_held_out else None
        return Corpus(packed(documents[:cut], ctx), held_out)

    return make


@pytest.fixture
def trainer_of(tiny, corpus_of):
    """(lora settings, **train settings) -> a trainer of the tiny model with a fresh adapter."""

    def make(lora=None, path=tiny, corpus=None, load=None, **settings):
        settings = {"ctx": 10, "lr": 0.01, "warmup_steps": 2, "epochs": 2, **settings}
        model = pyggml.load(path, **(load or {}))
        adapter = attach(model, LoraConfig(**{"rank": 3, "alpha": 5.0, **(lora or {})}))
        corpus = corpus or corpus_of(settings["ctx"])
        del settings["ctx"]
        return Trainer(adapter.model, adapter.parameters, corpus, TrainConfig(**settings))

    return make
