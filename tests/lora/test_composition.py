"""Every objective with what a run may be: resumed, of several batches a step, with layers that are
computed again, with rows that share windows or do not, on other threads."""

from dataclasses import fields

import numpy as np
import pytest
from tiny_models import TOKENS, VOCABULARY, write_llama

import pyggml
from pyggml.lora import DataConfig, LoraConfig, TrainConfig, Trainer, attach
from pyggml.lora import corpus as corpus_of_rows
from pyggml.lora.objectives import OBJECTIVES

from runs import state, steps

WORDS = [f"{'abcd'[i % 4] * (2 + i % 3)} {i}" for i in range(14)]
ROWS = {
    "training": [{"text": word} for word in WORDS],
    "pairs": [{"prompt": w, "chosen": w[::-1], "rejected": w[0]} for w in WORDS],
    "labels": [{"prompt": w, "completion": w[1:], "label": len(w) > 4} for w in WORDS],
    "prompts": [{"prompt": w, "completion": w[::-1]} for w in WORDS],
    "classes": [{"text": w, "label": "xyz"[i % 3]} for i, w in enumerate(WORDS)],
    "groups": [{"anchor": w, "positive": w.upper()} for w in WORDS],
}
SETTINGS = {  # of objectives that have them
    "reward": (lambda completion: sum(map(ord, completion)) % 7,),
    "answers": 2,
    "answer_tokens": 6,
    "iterations": 2,
    "kl_weight": 0.1,
    "own_answers": 0.5,
    "teacher_top_k": 5,
    "teacher_temperature": 1.5,
}
# Of the rows of other objectives answers lie together.
CHOICE = [n for n, kind in OBJECTIVES.items() if kind.rows in ("training", "classes", "groups")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    for name, n_layer in (("student", 2), ("teacher", 1)):
        write_llama(path / f"{name}.gguf", len(TOKENS), n_layer, n_layer, keys=VOCABULARY)
    return path


@pytest.fixture
def trainer_of(folder):
    """(name, packing, **train settings) -> a trainer whose adapter changes something."""

    def make(name, packing=True, **train):
        kind = OBJECTIVES[name]
        given = {**SETTINGS, "teacher": str(folder / "teacher.gguf")}
        own = {f.name: given[f.name] for f in fields(kind) if f.name in given}
        model = pyggml.load(folder / "student.gguf", compute="f32")
        adapter = attach(model, LoraConfig(rank=2))
        p = adapter.parameters.data
        p[:] = np.random.default_rng(1).normal(0, 0.1, p.size)
        data = DataConfig(ctx=40, val_split=0.2, packing=packing)
        corpus = corpus_of_rows(ROWS[kind.rows], model, data, purpose=kind.rows)
        train = {"lr": 0.01, "warmup_steps": 1, "max_steps": 3, "batch": 2, "grad_accum": 2} | train
        run = (adapter.model, adapter.parameters, corpus, TrainConfig(**train), kind(**own))
        return Trainer(*run, reference=model)

    return make


def first_step(trainer):
    reports = []
    trainer.run(reports.append, progress=False)
    return steps(reports)[0]


@pytest.mark.parametrize(
    "name, packing", [*((n, True) for n in OBJECTIVES), *((n, False) for n in CHOICE)]
)
def test_a_resumed_run_is_the_whole_one(name, packing, trainer_of, tmp_path):
    """Bit for bit; the parts compute layers again, the second on one thread."""
    whole = trainer_of(name, packing)
    first = first_step(whole)
    settings = {"checkpoint_dir": str(tmp_path), "grad_checkpointing": True}
    part, rest = (
        trainer_of(name, packing, **settings),
        trainer_of(name, packing, threads=1, **settings),
    )
    part.run(lambda r: part.stop() if r.step == 1 else None, progress=False)
    assert part.progress.step == 1
    rest.resume(tmp_path)
    rest.run(progress=False)
    assert state(rest) == state(whole) and rest.history == whole.history
    assert first.n_tokens > 2 and first.loss != 0
    if name == "embed":  # which compares the texts of a batch
        return
    large = first_step(trainer_of(name, packing, batch=4, grad_accum=1, max_steps=1))
    assert large.loss == pytest.approx(first.loss, rel=1e-4, abs=1e-6)
    assert large.grad_norm == pytest.approx(first.grad_norm, rel=1e-3)
