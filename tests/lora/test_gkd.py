"""GKD: the loss is its formula over answers that the student wrote, or the rows'; and such a run is
one like others."""

import numpy as np
import pytest
from tiny_models import TOKENS, VOCABULARY, write_llama

import pyggml
from pyggml.errors import ConfigError, ModelError
from pyggml.lora import (
    DataConfig,
    LoraConfig,
    TrainConfig,
    Trainer,
    ValidationReport,
    attach,
)
from pyggml.lora import corpus as corpus_of_rows
from pyggml.lora.objectives.gkd import GKD
from pyggml.lora.objectives.objective import Task
from pyggml.lora.ranks import ALONE
from pyggml.lora.teacher import Teaching
from pyggml.lora.trainer.losses import validation_loss

from runs import steps

CTX, MOST = 40, 6
ROWS = [{"prompt": "ab" * (1 + i % 3) + str(i), "answer": "ba"[i % 2] * (1 + i)} for i in range(10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    for name, n_layer in (("student", 2), ("teacher", 3)):
        write_llama(path / f"{name}.gguf", len(TOKENS), n_layer, n_layer, keys=VOCABULARY)
    return path


@pytest.fixture
def trainer_of(folder):
    """(objective's settings, **train settings) -> a trainer whose adapter changes something."""

    def make(objective=None, rows=ROWS, **settings):
        settings = {"lr": 0.02, "warmup_steps": 1, "batch": 2, "max_steps": 4, **settings}
        model = pyggml.load(folder / "student.gguf", compute="f32")
        adapter = attach(model, LoraConfig(rank=3, alpha=5.0))
        for pair in adapter.pairs.values():
            pair.b.data[:] = np.random.default_rng(1).normal(0, 0.1, pair.b.shape)
        usual = {"teacher": str(folder / "teacher.gguf"), "answer_tokens": MOST, "answers": 2}
        chosen = GKD(**usual | (objective or {}))
        data = DataConfig(ctx=CTX, val_split=0.2)
        corpus = corpus_of_rows(rows, model, data, purpose=chosen.rows)
        return Trainer(adapter.model, adapter.parameters, corpus, TrainConfig(**settings), chosen)

    return make


def probabilities(model, ids, temperature):
    z = model.logits(ids).astype(np.float64)[:-1] / temperature
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def token_loss(p, q, target, o):
    """D over the k likeliest tokens, with the one that stands there, and all others together."""
    chosen = np.argsort(-q, kind="stable")[: o.teacher_top_k]
    if target not in chosen:
        chosen[-1] = target
    p, q = (np.append(x[chosen], np.delete(x, chosen).sum()) for x in (p, q))
    b, factor = o.teacher_beta, o.teacher_temperature**2
    if b in (0, 1):
        p, q = (q, p) if b == 0 else (p, q)
        return factor * (p * np.log(p / q)).sum()
    m = b * q + (1 - b) * p
    return factor * (b * (q * np.log(q / m)).sum() + (1 - b) * (p * np.log(p / m)).sum())


SETTINGS = [
    {"teacher_beta": 0.0},
    {"teacher_beta": 0.4, "teacher_temperature": 1.5},
    {"teacher_beta": 1.0, "teacher_temperature": 0.8, "own_answers": 0.5},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_loss_is_the_formula(settings, trainer_of, folder):
    trainer = trainer_of({"teacher_top_k": 5, **settings})
    o, teacher = trainer.objective, pyggml.load(folder / "teacher.gguf", compute="f32")
    lesson = trainer.losses.practice.lesson(
        3, trainer.corpus.train, np.arange(6), trainer.ranks, trainer.passes.arenas
    )
    found = trainer.losses.over(lesson.dataset, lesson.windows, alone=True).loss
    data, wanted = lesson.dataset, []
    for tokens, documents, trained in zip(data.tokens, data.documents, data.trained, strict=True):
        for number in np.unique(documents[documents >= 0]):
            at = documents == number
            ids, learned = tokens[at], trained[at][1:]
            p, q = (probabilities(m, ids, o.teacher_temperature) for m in (trainer.model, teacher))
            rows = zip(p[learned], q[learned], ids[1:][learned], strict=True)
            wanted += [token_loss(*row, o) for row in rows]
    assert len(wanted) == lesson.tally.n_answer_tokens > 12
    assert found == pytest.approx(np.mean(wanted), rel=2e-5)


def test_rows_give_the_answers_that_the_student_does_not(trainer_of):
    """None of its own; then about half of the prompts, others at each step."""
    trainer, given = trainer_of({"own_answers": 0.0}), []
    practice, data = trainer.losses.practice, trainer.corpus.train
    numbers = practice._sample(0, data, np.arange(len(data)), trainer.ranks, 2)
    for group in practice._groups(numbers, len(data)):
        row, tokenizer = data.rows[group.window].columns, trainer.model.tokenizer
        for answer in group.answers:
            assert answer.is_cut == (len(row["answer"]) >= MOST)
            text = answer.text(trainer.model)
            assert row["answer"].startswith(text) and (answer.is_cut or text == row["answer"])
            assert answer.is_cut or tokenizer.is_eog(answer.ids[-1])
    practice = trainer_of({"own_answers": 0.5, "answers": 1}).losses.practice
    for step in range(6):
        groups = practice._groups(practice._sample(step, data, np.arange(6), ALONE, 1), 6)
        given += [[not g.answers[0].log_probs.any() for g in groups]]
    assert 0.3 < np.mean(given) < 0.7 and len({tuple(row) for row in given}) > 3


def test_a_student_comes_nearer_to_its_teacher(trainer_of, folder):
    """Validation tells the loss of answers that are written anew, as the file's own model does."""
    reports = []
    trainer = trainer_of({"teacher_beta": 0.0}, max_steps=40, val_every=20)
    trainer.run(reports.append, progress=False)
    first, *_, last = (r for r in reports if isinstance(r, ValidationReport))
    assert last.loss < 0.8 * first.loss
    assert last.tally.n_answers == 3 and "answer" in steps(reports)[0].sampled
    task = Task(trainer.model, trainer.corpus, trainer.config)
    again = validation_loss(trainer.validation, trainer.objective, task)
    assert again == pytest.approx(last.loss, rel=1e-4)


def test_what_does_not_serve_is_refused(trainer_of, folder, tmp_path):
    with pytest.raises(ConfigError, match=r"own_answers is 0.5, but .*has no answer, wanted"):
        trainer_of({"own_answers": 0.5}, rows=[{"prompt": "ab"}] * 6).reserve()
    trainer_of(rows=[{"prompt": "ab"}] * 6).reserve()
    keys = VOCABULARY | {"tokenizer.ggml.tokens": [*TOKENS[:9], "Ω", *TOKENS[10:]]}
    other = write_llama(tmp_path / "other.gguf", len(TOKENS), 1, 3, keys=keys)
    with pytest.raises(ModelError, match=r"other.gguf: has another vocabulary .*: token 9 is 'Ω' "):
        trainer_of({"teacher": str(other)}).reserve()
    teacher = pyggml.load(folder / "teacher.gguf", compute="f32")
    texts = corpus_of_rows([{"text": "abab"}] * 4, teacher, DataConfig(ctx=CTX))
    teaching = Teaching(teacher, texts, tmp_path / "answers.gguf", 6)
    assert [*teaching.run()]
    teaching.finish()
    with pytest.raises(ConfigError, match="holds answers of others, wanted a model: gkd writes"):
        trainer_of({"teacher": str(teaching.path)}).reserve()
