"""What a teacher said, in a file: it teaches as the teacher does, and serves its own text alone."""

import numpy as np
import pytest
from tiny_models import write_llama

import pyggml
from pyggml import gguf
from pyggml.errors import ConfigError, DataError, PyggmlError
from pyggml.lora import LoraConfig, TrainConfig, Trainer, attach
from pyggml.lora.data import Corpus
from pyggml.lora.objectives.distill import Distill
from pyggml.lora.teacher import TeacherFile, Teaching

from runs import steps

CTX, N_VOCAB = 20, 48


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher") / "teacher.gguf"
    return pyggml.load(write_llama(path, N_VOCAB, n_layer=1, seed=7), compute="f32")


@pytest.fixture(scope="module")
def corpus(corpus_of):
    return corpus_of(CTX)


@pytest.fixture(scope="module")
def answers(teacher, corpus, tmp_path_factory):
    return taught(Teaching(teacher, corpus, tmp_path_factory.mktemp("f") / "answers.gguf", 6))


def taught(teaching):
    assert [*teaching.run()][-1] == len(teaching.plan.windows)
    teaching.finish()
    return teaching.path


def losses(tiny, corpus, teacher, **settings):
    adapter = attach(pyggml.load(tiny, compute="f32"), LoraConfig(rank=3))
    train = TrainConfig(max_steps=4, batch=2, compute="f32")
    objective = Distill(teacher=str(teacher), teacher_top_k=6, **settings)
    events = []
    Trainer(adapter.model, adapter.parameters, corpus, train, objective).run(events.append)
    return [step.loss for step in steps(events)]


def test_a_file_teaches_as_its_model_does(tiny, corpus, teacher, answers):
    """But for the halves that it keeps; whatever is held out, and in whatever order."""
    for same in (corpus, Corpus(corpus.train.part(slice(None, None, -1)), None)):
        found, wanted = (losses(tiny, same, t) for t in (answers, teacher.file.path))
        np.testing.assert_allclose(found, wanted, rtol=1e-3)


def test_its_size_is_told_beforehand(teacher, corpus, answers):
    n = sum(part.n_targets() for part in (corpus.train, corpus.validation))
    teaching = Teaching(teacher, corpus, answers, 6)
    assert teaching.plan.n == n and teaching.n_bytes > n * (4 * 6 + 2 * 7)
    assert 0 < answers.stat().st_size - teaching.n_bytes < 2000


def test_an_ended_run_is_gone_on_with(teacher, corpus, answers, tmp_path):
    first = Teaching(teacher, corpus, tmp_path / "b.gguf", 6)
    under_way = first.run()
    assert [next(under_way), next(under_way)] == [1, 2]
    under_way.close()
    with pytest.raises(DataError, match="is not finished"):
        TeacherFile(gguf.open(first.unfinished))
    with pytest.raises(PyggmlError, match=r"was begun with another teacher, text or setting: rem"):
        Teaching(teacher, corpus, tmp_path / "b.gguf", 5).open()
    second = Teaching(teacher, corpus, tmp_path / "b.gguf", 6)
    assert next(second.run()) == 3, "the first two are done"
    assert taught(second).read_bytes() == answers.read_bytes()
    assert not second.unfinished.exists()


def test_a_file_of_another_vocabulary_text_template_or_temperature_is_refused(
    tiny, corpus, corpus_of, teacher, answers, tmp_path
):
    with pytest.raises(DataError, match="has no answers to [0-9]+ of [0-9]+ documents: it was"):
        losses(tiny, corpus_of(CTX, seed=1), answers)
    chats = Corpus(corpus_of(CTX, seed=1).train, None, about={"template": "abc"})
    with pytest.raises(DataError, match="its chats were written by another template"):
        losses(tiny, chats, answers)
    with pytest.raises(ConfigError, match=r"temperature is 2, but .* was made at 1, wanted the sa"):
        losses(tiny, corpus, answers, teacher_temperature=2.0)
    words = {"tokenizer.ggml.tokens": [f"w{i}" for i in range(N_VOCAB)]}
    other = write_llama(tmp_path / "o.gguf", N_VOCAB, 1, 3, keys=words)
    with pytest.raises(DataError, match=r"was made for another vocabulary than .*o.gguf has"):
        losses(other, corpus, answers)


@pytest.mark.parametrize("name, number", [("ids", N_VOCAB), ("ids", 3), ("log_probs", np.nan)])
def test_numbers_that_no_teacher_says_are_refused(tiny, corpus, answers, tmp_path, name, number):
    data, file = bytearray(answers.read_bytes()), gguf.open(answers)
    info = file.tensors[f"teacher.{name}"]
    array = np.frombuffer(data, info.dtype.numpy, int(np.prod(info.shape)), info.offset)
    array.reshape(info.shape)[:, 1:3] = number
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(data)
    with pytest.raises(DataError, match="holds numbers that are no teacher's probabilities"):
        losses(tiny, corpus, bad)
