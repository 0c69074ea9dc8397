"""A device that runs ahead of the host gives the tokens that the host would choose."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from separate_cpu import SeparateCPU

import pyggml
from pyggml.errors import ConfigError, DataError
from pyggml.generation import Batch, Finish, Sampling, Session, ahead, complete

GOLDEN = Path(__file__).parents[1] / "golden/models"


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
    count, start = [0], ahead.Ahead.start

    def counted(self):
        count[0] += 1
        return start(self)

    monkeypatch.setattr(ahead.Ahead, "start", counted)
    return count


def test_the_tokens_are_those_that_the_host_would_choose(tiny, apart, prompt, passes):
    wanted = fed(pyggml.load(tiny), prompt, 40)
    assert len(set(wanted)) > 3
    session = Session(apart, len(prompt) + 40)
    assert list(islice(session.greedy(prompt), 40)) == wanted
    assert passes[0] == 40  # one more than were asked for: the first token is the prompt's


def test_a_pass_is_started_before_the_token_before_it_is_read(apart, prompt, passes):
    tokens = Session(apart, len(prompt) + 9).greedy(prompt)
    assert [(next(tokens), passes[0])[1] for _ in range(4)] == [0, 2, 3, 4]


def test_the_last_token_given_is_not_part_of_the_sequence_yet(apart, prompt):
    session = Session(apart, len(prompt) + 9)
    first, second, third = islice(session.greedy(prompt), 3)
    assert session.n_past == len(prompt) + 2
    assert session.feed([third]).argmax() == fed(apart, prompt, 4)[3]
    session.truncate(len(prompt))
    assert session.feed([first]).argmax() == second


def test_it_ends_where_the_context_is_full(apart, prompt, passes):
    session = Session(apart, len(prompt) + 3)
    assert len(list(session.greedy(prompt))) == 4
    assert session.n_past == session.n_ctx
    assert passes[0] == 3


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_context_without_room_for_a_pass_ahead(apart, prompt, n):
    session = Session(apart, len(prompt) + n)
    assert list(session.greedy(prompt)) == fed(apart, prompt, n + 1)


CHANGES = {
    "fed": lambda slot: slot.batch.feed_one(slot, [1]),
    "fed with others": lambda slot: slot.batch.feed({slot: [1]}),
    "another last token": lambda slot: (
        slot.truncate(slot.n_past - 1), slot.batch.feed_one(slot, [5])
    ),
    "shifted": lambda slot: slot.shift(),
    "closed": lambda slot: slot.close(),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("n_given", [1, 3])
def test_a_sequence_that_is_changed_meanwhile(apart, prompt, change, n_given):
    batch = Batch(apart, 1, 40)
    slot = batch.open()
    tokens = batch.greedy(slot, prompt)
    for _ in range(n_given):
        next(tokens)
    CHANGES[change](slot)
    with pytest.raises(ConfigError, match="the sequence was changed"):
        next(tokens)


def test_sequences_of_a_batch_in_turns(tiny, apart, passes):
    """The second takes the pass that runs ahead; the first goes on by the host."""
    prompts = [apart.tokenizer.encode(text) for text in ("the cat", "a dog sat on")]
    wanted = [fed(pyggml.load(tiny), prompt, 12) for prompt in prompts]
    batch = Batch(apart, 2, 40)
    streams = [batch.greedy(batch.open(), prompt) for prompt in prompts]
    found = [[], []]
    for _ in range(12):
        for stream, tokens in zip(streams, found, strict=True):
            tokens.append(next(stream))
    assert found == wanted
    assert passes[0] > 10


def test_models_with_other_adapters_in_turns(tiny, apart, prompt, passes):
    other = apart.with_adapters()
    wanted = fed(pyggml.load(tiny), prompt, 8)
    batch = Batch(apart, 2, 40)
    streams = [batch.greedy(batch.open(model=model), prompt) for model in (apart, other)]
    for token in wanted:
        assert [next(stream) for stream in streams] == [token, token]
    assert passes[0] > 6


def test_a_trace_that_begins_meanwhile_reads_each_pass(tiny, apart, prompt, passes):
    tokens = Session(apart, 40).greedy(prompt)
    found = list(islice(tokens, 4))
    with apart.trace("blk.0.out") as traced:
        found += islice(tokens, 3)
    assert traced["blk.0.out"].shape[0] == 1  # the last pass
    assert found == fed(pyggml.load(tiny), prompt, 7)
    assert passes[0] == 4


def test_logits_that_are_no_numbers(apart, prompt, monkeypatch):
    tokens = Session(apart, 40).greedy(prompt)
    next(tokens), next(tokens)
    read = SeparateCPU.read
    infinite = np.array([3, np.float32(np.inf).view(np.int32)], np.int32)
    monkeypatch.setattr(
        SeparateCPU, "read", lambda self, t: infinite if t.shape == (2,) else read(self, t)
    )
    next(tokens)  # was read before
    with pytest.raises(DataError, match="the greatest logit is inf"):
        next(tokens)


def test_a_state_does_not_run_ahead(passes):
    """It would be that of a token which may never be asked for."""
    path = GOLDEN / "mamba-Q4_K_M.gguf"
    apart = pyggml.load(path, compute="f32", backends=[SeparateCPU()])
    found = list(islice(Session(apart, 20).greedy([1, 2, 3]), 8))
    assert found == fed(pyggml.load(path, compute="f32"), [1, 2, 3], 8)
    assert passes[0] == 0


def test_what_is_not_run_ahead(tiny, apart, prompt, passes):
    session = Session(pyggml.load(tiny), 40)
    assert len(list(islice(session.greedy(prompt), 5))) == 5
    with apart.trace("blk.0.out") as traced:
        assert len(list(islice(Session(apart, 40).greedy(prompt), 5))) == 5
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


def test_a_prompt_is_refused_even_where_no_token_is_wanted(apart, prompt):
    assert list(complete(apart, prompt, 0)) == []
    with pytest.raises(DataError, match="empty, wanted at least one token"):
        list(complete(apart, [], 0))
    with pytest.raises(DataError, match="do not fit into a context of 3"):
        list(complete(apart, prompt, 5, n_ctx=3))
