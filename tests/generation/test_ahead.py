"""A device that runs ahead of the host gives the tokens that the host would choose."""

from itertools import islice

import numpy as np
import pytest
from separate_cpu import SeparateCPU

import pyggml
from pyggml.errors import ConfigError, DataError
from pyggml.generation import Finish, Sampling, Session, ahead, complete


@pytest.fixture
def prompt(tiny_tokenizer):
    return tiny_tokenizer.encode("the cat sat")


@pytest.fixture
def apart(tiny):
    """The model on a device with memory of its own."""
    return pyggml.load(tiny, backends=[SeparateCPU()])


def fed(model, prompt, n):
    """n of the likeliest tokens, each fed by the host."""
    session, found, tokens = Session(model, len(prompt) + n), [], prompt
    for _ in range(n):
        found.append(int(session.feed(tokens).argmax()))
        tokens = found[-1:]
    return found


@pytest.fixture
def passes(monkeypatch):
    """Counts the passes that are started ahead."""
    count, start = [0], ahead.Ahead._start

    def counted(self):
        count[0] += 1
        return start(self)

    monkeypatch.setattr(ahead.Ahead, "_start", counted)
    return count


def test_the_tokens_are_those_that_the_host_would_choose(tiny, apart, prompt, passes):
    wanted = fed(pyggml.load(tiny), prompt, 40)
    assert len(set(wanted)) > 3
    session = Session(apart, len(prompt) + 40)
    assert list(islice(session.likeliest(prompt), 40)) == wanted
    assert passes[0] == 40  # one more than were asked for: the first token is the prompt's


def test_a_pass_is_started_before_the_token_before_it_is_read(apart, prompt, passes):
    tokens = Session(apart, len(prompt) + 9).likeliest(prompt)
    assert [(next(tokens), passes[0])[1] for _ in range(4)] == [0, 2, 3, 4]


def test_the_last_token_given_is_not_part_of_the_sequence_yet(apart, prompt):
    session = Session(apart, len(prompt) + 9)
    first, second, third = islice(session.likeliest(prompt), 3)
    assert session.n_past == len(prompt) + 2
    assert session.feed([third]).argmax() == fed(apart, prompt, 4)[3]
    session.truncate(len(prompt))
    assert session.feed([first]).argmax() == second


def test_it_ends_where_the_context_is_full(apart, prompt, passes):
    session = Session(apart, len(prompt) + 3)
    assert len(list(session.likeliest(prompt))) == 4
    assert session.n_past == session.n_ctx
    assert passes[0] == 3


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_context_without_room_for_a_pass_ahead(apart, prompt, n):
    session = Session(apart, len(prompt) + n)
    assert list(session.likeliest(prompt)) == fed(apart, prompt, n + 1)


def test_a_sequence_that_is_changed_meanwhile(apart, prompt):
    session = Session(apart, 40)
    tokens = session.likeliest(prompt)
    next(tokens), next(tokens)
    session.feed([1])
    with pytest.raises(ConfigError, match="the sequence was changed"):
        next(tokens)


def test_logits_that_are_no_numbers(apart, prompt, monkeypatch):
    tokens = Session(apart, 40).likeliest(prompt)
    next(tokens), next(tokens)
    read = SeparateCPU.read
    infinite = np.array([3, np.float32(np.inf).view(np.int32)], np.int32)
    monkeypatch.setattr(
        SeparateCPU, "read", lambda self, t: infinite if t.shape == (2,) else read(self, t)
    )
    next(tokens)  # was read before
    with pytest.raises(DataError, match="the greatest logit is inf"):
        next(tokens)


def test_what_is_not_run_ahead(tiny, apart, prompt, passes):
    session = Session(pyggml.load(tiny), 40)
    assert len(list(islice(session.likeliest(prompt), 5))) == 5
    with apart.trace("blk.0.out") as traced:
        assert len(list(islice(Session(apart, 40).likeliest(prompt), 5))) == 5
    assert traced["blk.0.out"].shape[0]
    assert passes[0] == 0


def test_completions_run_ahead_where_only_the_likeliest_counts(apart, tiny, prompt, passes):
    def text(model, how):
        return [(p.text, p.token, p.finish) for p in complete(model, prompt, 20, how)]

    here = pyggml.load(tiny)
    for how, counted in (
        (Sampling(temperature=0), 20),
        (Sampling(temperature=0, logprobs=2), 0),
        (Sampling(temperature=0, presence_penalty=0.5), 0),
        (Sampling(temperature=0, logit_bias={"3": 1.0}), 0),
        (Sampling(seed=3), 0),
    ):
        passes[0] = 0
        assert text(apart, how) == text(here, how)
        assert passes[0] <= counted and bool(passes[0]) == bool(counted), how


def test_a_full_context_that_shifts(apart, tiny, prompt, passes):
    wanted, found = (
        [p.token for p in complete(m, prompt, 60, n_ctx=30, n_keep=2)]
        for m in (pyggml.load(tiny), apart)
    )
    assert found == wanted
    assert len(found) == 60 and passes[0] > 30


def test_an_answer_that_a_stop_string_ends(apart, prompt):
    pieces = list(complete(apart, prompt, 30))
    text = "".join(p.text for p in pieces)
    stop = text[len(text) // 2 :][:2]
    shorter = list(complete(apart, prompt, 30, Sampling(temperature=0, stop=(stop,))))
    assert shorter[-1].finish is Finish.STOP_STRING
    assert "".join(p.text for p in shorter) == text[: text.index(stop)]
