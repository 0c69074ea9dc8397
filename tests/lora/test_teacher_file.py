"""What a teacher said, in a file: it teaches as the teacher does, and serves its own text alone."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import write_llama

import pyggml
from pyggml import gguf
from pyggml.errors import ConfigError, DataError, PyggmlError
from pyggml.graph.dtypes import F16, F32, I32, I64
from pyggml.lora import LoraConfig, TrainConfig, Trainer, attach
from pyggml.lora.data import Corpus
from pyggml.lora.objectives.distill import Distill
from pyggml.lora.teacher import TeacherFile, Teaching

from runs import steps

CTX, N_VOCAB = 20, 48
DTYPE_OF = {d.numpy: d for d in (F32, F16, I32, I64)}


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
    _change(first.unfinished, "documents", 0, 0)  # as one that was killed at its very beginning
    second = Teaching(teacher, corpus, tmp_path / "b.gguf", 6)
    assert next(second.run()) == 3, "the first two are done"
    assert taught(second).read_bytes() == answers.read_bytes()
    assert not second.unfinished.exists()


def test_what_was_begun_otherwise_is_not_gone_on_with(tiny, teacher, corpus, corpus_of, tmp_path):
    path = tmp_path / "b.gguf"
    begun = Teaching(teacher, corpus, path, 6)
    assert begun.open() == 0

    def refused(what, of=teacher, text=corpus, k=6, **more):
        with pytest.raises(PyggmlError, match=f"b.gguf.unfinished: {what}.*remove it, or name ano"):
            Teaching(of, text, path, k, **more).open()

    refused("was begun with another teacher: ", of=pyggml.load(tiny))
    refused("was begun with another text: ", text=corpus_of(CTX, seed=1))
    refused("was begun with another text: ", text=Corpus(corpus.train, None))
    refused("was begun with another --top-k: ", k=5)
    refused("was begun with another --temperature: ", temperature=2.0)
    for n in (-5, 1 << 40):
        _change(begun.unfinished, "progress", 0, n)
        refused(rf"says that -?[\d,]+ of {len(begun.plan.windows)} windows are done: ")
    begun.unfinished.write_bytes(begun.unfinished.read_bytes()[:-200])
    refused("")


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


# -- files of others ----------------------------------------------------------------------------


def _change(path, name, at, number):
    """Another number in place of one of a tensor."""
    with gguf.open(path) as file:
        info = file.tensors[f"teacher.{name}"]
    np.memmap(path, info.dtype.numpy, "r+", info.offset, (int(np.prod(info.shape)),))[at] = number


def read(path, student, corpus):
    """All that a file says of a text; each is what a teacher may say."""
    file = TeacherFile(gguf.open(path))
    file.check(student, corpus, 1.0)
    parts = [(part, w) for part in corpus.parts for w in range(len(part))]
    said = [file.distributions((), *each) for each in parts]
    for d in said:
        assert ((d.ids >= 0) & (d.ids < N_VOCAB)).all() and (d.log_probs < 1e-3).all()
        assert all(len({*row}) == file.k for row in d.ids.tolist())
        np.testing.assert_allclose(d.shares().sum(axis=1), 1)
    return said


@pytest.fixture(scope="module")
def student(tiny):
    return pyggml.load(tiny, compute="f32")


@given(st.data())
def test_a_damaged_file_is_refused_or_says_what_a_teacher_may(
    student, corpus, answers, tmp_path_factory, data
):
    raw = bytearray(answers.read_bytes())
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 33)) :]  # the last bytes only fill up
        path.write_bytes(raw)
        with pytest.raises(PyggmlError, match="damaged.gguf"):
            read(path, student, corpus)
        return
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    with suppress(PyggmlError):
        read(path, student, corpus)


NUMBERS = "holds numbers that are no teacher's probabilities"
MISFIT = "its tensors do not fit each other"


@pytest.mark.parametrize(
    "name, change, fault",
    [
        ("ids", lambda ids: np.where(np.arange(6) == 2, N_VOCAB, ids), NUMBERS),
        ("ids", lambda ids: np.where(np.arange(6) == 2, -1, ids), NUMBERS),
        ("ids", lambda ids: np.where(np.arange(6) > 3, 3, ids), NUMBERS),
        ("ids", lambda ids: ids[:, ::-1], NUMBERS),
        ("ids", lambda ids: ids[:-1], MISFIT),
        ("ids", lambda ids: ids.reshape(-1), MISFIT),
        ("ids", lambda ids: ids.astype(np.float32), MISFIT),
        ("log_probs", lambda x: np.where(np.arange(7) == 1, np.nan, x), NUMBERS),
        ("log_probs", lambda x: np.where(np.arange(7) == 1, 0.05, x - 5), NUMBERS),
        ("log_probs", lambda x: x - 1, NUMBERS),
        ("log_probs", lambda x: x[:, :-1], MISFIT),
        ("documents", lambda d: d[::-1], "its documents are not in order"),
        ("documents", lambda d: d[1:], "has no answers to 1 of 11 documents"),
        ("documents", lambda d: d - [0, -1 << 62], "has no answers to 11 of 11 documents"),
        ("documents", lambda d: d - [0, 1 << 62], "has no answers to 11 of 11 documents"),
        ("progress", lambda n: n - 1, "is not finished"),
        ("k", lambda k: 1 << 40, MISFIT),
        ("k", lambda k: "6", "'teacher.k' is STRING, wanted int"),
        ("n_vocab", lambda n: n + 1, "was made for another vocabulary"),
        ("n_vocab", lambda n: np.array([n]), "wanted int"),
        ("temperature", lambda t: float("nan"), "temperature is 1, but .* was made at nan"),
        ("windows", lambda n: None, "'teacher.windows' is missing"),
    ],
)
def test_a_file_of_others_is_refused_in_a_sentence(
    student, corpus, answers, tmp_path, name, change, fault
):
    with gguf.open(answers) as file:
        keys = {key: file.get(key) for key in file.metadata}
        tensors = {key: np.array(file.data(key)) for key in file.tensors}
    of, key = keys if f"teacher.{name}" in keys else tensors, f"teacher.{name}"
    old, of[key] = of[key], change(of[key])
    if of is tensors and of[key].dtype != np.float32:
        of[key] = of[key].astype(old.dtype)
    sources = [(n, DTYPE_OF[x.dtype], x.shape, np.ascontiguousarray(x)) for n, x in tensors.items()]
    bad = tmp_path / "bad.gguf"
    gguf.write(bad, {n: value for n, value in keys.items() if value is not None}, sources)
    with pytest.raises(PyggmlError, match=fault):
        read(bad, student, corpus)
