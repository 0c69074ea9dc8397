"""An answer with guessed tokens is the one without; what is not worth it is not guessed."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from tiny_models import TOKENS, VOCABULARY, scaled, write, write_llama

import pyggml
from pyggml.errors import ConfigError, ModelError
from pyggml.generation import Batch, Completion, Sampling, Session, complete
from pyggml.generation.drafts import LookUp, n_common
from pyggml.generation.gain import Offer, PassCosts
from pyggml.generation.serving import Request, Scheduler
from pyggml.generation.speculation import Speculator

PROMPT = "the cat saw the cat saw the cat saw the"
N = 24


@pytest.fixture(scope="module")
def model(tiny):
    return pyggml.load(tiny, compute="f32")  # passes of any size give the same to 1e-5


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """A model of the same tokens and one block."""
    path = tmp_path_factory.mktemp("draft") / "draft.gguf"
    return pyggml.load(
        write_llama(path, len(TOKENS), n_layer=1, seed=1, keys=VOCABULARY), compute="f32"
    )


@pytest.fixture
def always(monkeypatch):
    """Every draft is taken to be worth it, whatever passes take."""
    monkeypatch.setattr(PassCosts, "lengths", lambda self, n, offers: [o.most for o in offers])
    monkeypatch.setattr(PassCosts, "affords", lambda *given: True)


def answer(model, how, draft=None, n=N, cache_type="f16", text=PROMPT, predicted=()):
    """The pieces, and the speculator that fed them."""
    prompt = model.tokenizer.encode(text)
    session = Session(model, len(prompt) + n, cache_type, draft)
    completion = Completion(model.tokenizer, how, prompt, n, predicted=predicted)
    return list(session.pieces(completion, prompt)), session.speculator


HOWS = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.5, "top_k": 0},
    "penalties": {"repeat_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "greedy with penalties": {"temperature": 0, "repeat_penalty": 1.1},
    "biases": {"temperature": 1.0, "logit_bias": {"t": 3, "h": -1}},
    "log-probabilities": {"temperature": 0.7, "logprobs": 2},
    "stop string": {"temperature": 0.9, "stop": ("e",)},
    "form": {"temperature": 1.0, "regex": "(the cat |a dog )+[a-c]{5,20}"},
}


@pytest.mark.parametrize("given", HOWS.values(), ids=HOWS)
def test_an_answer_is_the_one_without_guesses(model, draft, always, given):
    if "regex" in given:
        pytest.importorskip("llguidance")
    (plain, _), n_drafted = answer(model, Sampling(seed=3, **given)), 0
    for ngram, by, most in ((True, None, 2), (False, draft, 2), (True, draft, 5)):
        how = Sampling(seed=3, ngram=ngram, draft_max=most, **given)
        pieces, speculator = answer(model, how, by)
        assert [p.token for p in pieces] == [p.token for p in plain]
        assert [(p.text, p.finish) for p in pieces] == [(p.text, p.finish) for p in plain]
        told = [p.logprob for p in plain if p.logprob is not None]
        assert [p.logprob for p in pieces if p.logprob is not None] == pytest.approx(told, abs=1e-4)
        n_drafted += speculator.n_drafted
    assert n_drafted


def test_a_model_that_drafts_for_itself_is_always_right(model, always):
    """Whatever the temperature: it chooses with the draws of the answer."""
    how = Sampling(seed=7, temperature=2.0, top_k=0, min_p=0, top_p=1)
    _, speculator = answer(model, how, model)
    assert speculator.n_accepted == speculator.n_drafted > N / 2


def test_of_passes_of_three_tokens_greedy_answers_have_every_bit(model, always):
    told = Sampling(temperature=0, logprobs=0)
    plain, _ = answer(model, replace(told, ngram=False))
    for most in (2, 9):  # unasked, none has more
        pieces, speculator = answer(model, replace(told, draft_max=most))
        assert speculator.n_accepted and [p.logprob for p in pieces] == [p.logprob for p in plain]


def test_unasked_nothing_is_guessed_that_could_change_a_bit(model, always):
    """None in a form, none beside others, and none where it is off."""
    pytest.importorskip("llguidance")
    for given in ({"ngram": False}, {"draft_max": 0}, {"regex": "[a-c]{60}"}):
        how = Sampling(**{"temperature": 0, "seed": 3} | given)
        assert answer(model, how, n=60)[1].n_drafted == 0
    scheduler, told = Scheduler(Batch(model, 2, 128)), []
    for text in (PROMPT, PROMPT + " cat"):
        prompt = np.array(model.tokenizer.encode(text), np.int32)
        completion = Completion(model.tokenizer, Sampling(temperature=0), prompt, N)
        request = Request(prompt=prompt, completion=completion, model=model, tell=told.append)
        scheduler.submit(request)
    while scheduler.step():
        assert scheduler.n_active < 2 or scheduler._speculator.n_drafted == 0
    assert told


@pytest.mark.parametrize("wrong", [False, True])
def test_a_predicted_text_is_guessed_where_it_is_right(model, always, wrong):
    how = Sampling(seed=7, temperature=1.5, top_k=0)
    plain, _ = answer(model, how, text="zzz")
    tokens = [piece.token for piece in plain]
    predicted = [*tokens[:5], *tokens[7:9]] if wrong else tokens
    pieces, speculator = answer(model, how, text="zzz", predicted=predicted)
    assert [piece.token for piece in pieces] == tokens
    assert speculator.n_accepted >= (2 if wrong else N // 2)
    assert (speculator.n_accepted < speculator.n_drafted) == wrong


# -- the distribution ---------------------------------------------------------------------------

EIGHTHS = {(): [1, 5, 2], (0,): [0, 3, 5], (1,): [4, 4, 0], (2,): [2, 2, 4]}


class Tree:
    """A slot of a model of three tokens with these chances; the draws are given."""

    def __init__(self, draws):
        self.tokens, self.is_open, self.draws = [], True, iter(draws)
        self.batch, self.n_ctx = self, 99

    n_past = property(lambda self: len(self.tokens))

    def truncate(self, n):
        del self.tokens[n:]

    def random(self):
        return next(self.draws)

    def logits(self, tokens):
        with np.errstate(divide="ignore"):
            return np.log(np.array(EIGHTHS[tuple(tokens)], np.float32) / 8)


class Digits:
    """A vocabulary of three tokens."""

    n_vocab = 3

    def is_eog(self, token):
        return False

    def stream(self, shown):
        return self

    def feed(self, token):
        return str(token)

    def flush(self):
        return ""


@pytest.mark.parametrize("draft", [[], [0], [1], [2]], ids=str)
def test_every_draft_leaves_the_exact_distribution(draft):
    """All draws of an eighth each, of two tokens: each pair comes as often as p says, in full."""
    how = Sampling(temperature=1, top_k=0, top_p=1, min_p=0, seed=0, ngram=False)
    counts = Counter()
    for draws in product((np.arange(8) + 0.5) / 8, repeat=2):
        slot = Tree(draws)
        completion = Completion(Digits(), how, (), 2)
        completion._sampler._rng = slot
        slot.tokens += draft
        rows = np.array([slot.logits(draft[:i]) for i in range(len(draft) + 1)])
        steps = Speculator(slot)
        list(steps.verify(slot, completion, rows))
        while completion.finish is None:
            slot.tokens[:] = completion.tokens
            list(steps.verify(slot, completion, slot.logits(completion.tokens)[None]))
        counts[tuple(completion.tokens)] += 1
    for pair in product(range(3), repeat=2):
        p = Fraction(EIGHTHS[()][pair[0]], 8) * Fraction(EIGHTHS[pair[:1]][pair[1]], 8)
        assert Fraction(counts[pair], 64) == p


def test_many_seeds_have_the_model_s_distribution(model, draft, always):
    """Chi-square of the second token of answers, against its exact probabilities."""
    n, prompt = 200, model.tokenizer.encode(PROMPT)
    how = {"temperature": 1.0, "top_k": 4, "top_p": 1, "min_p": 0}
    session, counts = Session(model, len(prompt) + 3, draft=draft), Counter()

    def shares(tokens):
        session.truncate(0)
        z = session.feed(tokens).astype(np.float64)
        ids = np.argsort(-z, kind="stable")[:4]
        p = np.exp(z[ids] - z[ids[0]])
        return dict(zip(ids.tolist(), p / p.sum(), strict=True))

    expected = Counter()
    for first, p in shares(prompt).items():
        for second, q in shares([*prompt, first]).items():
            expected[first, second] += n * p * q
    for seed in range(n):
        session.truncate(0)
        completion = Completion(model.tokenizer, Sampling(seed=seed, **how), prompt, 3)
        pieces = [piece.token for piece in session.pieces(completion, prompt)]
        counts[tuple(pieces[:2])] += 1
    assert session.speculator.n_accepted > n / 20
    assert counts.keys() <= expected.keys()
    chi2 = sum((counts[pair] - e) ** 2 / e for pair, e in expected.items())
    assert chi2 < 37.7  # of 15 degrees of freedom, 0.1 %


# -- with other features ------------------------------------------------------------------------


def test_requests_of_a_batch_have_their_own_answers(model, draft, always):
    """Several with guesses, and one without, by two models of the same weights."""
    texts = [PROMPT, "the dog saw the dog saw", PROMPT + " cat", "aaaaaaaaa"]
    hows = [Sampling(temperature=t, seed=i, ngram=i != 2) for i, t in enumerate((0, 1, 0.5, 2))]
    alone = [
        [p.token for p in answer(model, h, text=t)[0]] for t, h in zip(texts, hows, strict=True)
    ]
    for by, deterministic in ((None, False), (draft, False), (draft, True)):
        batch = Batch(model, 3, 128, deterministic=deterministic)
        scheduler, told = Scheduler(batch, draft=by), [[] for _ in texts]
        for text, how, own in zip(texts, hows, told, strict=True):
            prompt = np.array(model.tokenizer.encode(text), np.int32)
            completion = Completion(model.tokenizer, how, prompt, N)
            request = Request(prompt=prompt, completion=completion, model=model, tell=own.append)
            scheduler.submit(request)
        while scheduler.step():
            pass
        assert [[p.token for p in own] for own in told] == alone
        assert (scheduler._speculator.n_accepted > 0) != deterministic


def test_a_context_shift_and_a_q8_0_cache_have_the_same_text(tmp_path, always):
    path = write(
        tmp_path / "wide.gguf",
        sizes={"embedding_length": 64, "attention.head_count": 2, "attention.head_count_kv": 2},
        keys=VOCABULARY,
        n_vocab=len(TOKENS),
        numbers=scaled,
    )
    model = pyggml.load(path, compute="f32")
    prompt = model.tokenizer.encode(PROMPT)
    texts = [
        [p.token for p in complete(model, prompt, 60, how, len(prompt) + 20, "q8_0", 4, by)]
        for how in (Sampling(temperature=0), Sampling(temperature=0, ngram=True))
        for by in (None, model)
    ]
    assert texts[0] == texts[1] == texts[2] == texts[3] and len(texts[0]) == 60


def test_nothing_is_guessed_while_a_trace_reads(model, always):
    with model.trace("blk.0.out") as trace:
        answer(model, Sampling(temperature=0, ngram=True))
    assert (
        sum(len(a) for a in trace.runs("blk.0.out")) == len(model.tokenizer.encode(PROMPT)) + N - 1
    )


def test_a_model_with_states_is_refused(tmp_path, model):
    path = write(tmp_path / "m.gguf", "mamba", keys=VOCABULARY, n_vocab=len(TOKENS), numbers=scaled)
    states = pyggml.load(path)
    for call in (
        lambda: list(complete(states, [1, 2], 3, Sampling(ngram=True))),
        lambda: Session(states, 9, draft=model),
        lambda: Session(model, 9, draft=states),
    ):
        with pytest.raises(
            ConfigError, match="speculation: mamba has states, which cannot go back"
        ):
            call()


def test_a_draft_model_of_other_tokens_is_refused(tmp_path, model):
    tokens = [*TOKENS[:-2], "ht", TOKENS[-1]]
    keys = VOCABULARY | {"tokenizer.ggml.tokens": tokens}
    other = pyggml.load(write_llama(tmp_path / "o.gguf", len(tokens), 1, 1, keys=keys))
    with pytest.raises(ModelError, match=f"token {len(tokens) - 2} is 'ht' there and 'th' here"):
        Session(model, 9, draft=other)


# -- drafts, and what they are worth ------------------------------------------------------------


def test_a_look_up_says_what_followed():
    look_up = LookUp()
    look_up.extend([1, 2, 3, 4, 9, 2, 3])
    assert look_up.draft(3) == [4, 9, 2] and look_up.draft(6) == [4, 9, 2, 3, 4, 9]
    before = look_up.chance
    look_up.extend([4])
    assert look_up.draft(1) == [9]
    look_up.extend([7])
    assert look_up.draft(2) == [] and look_up.chance == 0
    assert before == 0.6 and look_up.n_right == 1


def test_a_chance_follows_what_comes():
    right, wrong = LookUp(), LookUp()
    right.extend([5, 6, 7] * 40)
    wrong.extend([x for i in range(40) for x in (5, 6, 10 + i)])
    wrong.extend([5, 6])
    assert right.chance > 0.9 and 0 < wrong.chance < 0.1


def costs_of(**seconds):
    costs = PassCosts()
    for _ in range(2):
        for size, each in seconds.items():
            costs.note(int(size[1:]), each)
    return costs


def test_a_draft_is_as_long_as_it_pays():
    flat = costs_of(n1=1.0, n2=1.01, n3=1.02, n4=5.0)
    assert flat.lengths(1, [Offer(0.9, 8)]) == [2]
    assert flat.lengths(1, [Offer(0.001, 8)]) == [0]
    assert flat.lengths(1, [Offer(0.9, 8, seconds=2.0)]) == [0]
    steep = costs_of(n1=1.0, n2=2.0, n3=3.0)
    assert steep.lengths(1, [Offer(0.9, 2)]) == [0]
    two = costs_of(n2=1.0, n3=1.0, n4=1.2, n5=9.0)
    assert two.lengths(2, [Offer(0.3, 2), Offer(0.9, 2)]) == [0, 2]
    assert PassCosts().lengths(1, [Offer(1.0, 3)]) == [0], "first a pass without a draft"
    assert costs_of(n1=1.0).lengths(1, [Offer(0.5, 2)]) == [2], "to measure it"


def test_a_program_is_bound_once_right_guesses_would_have_paid_for_it_twice():
    costs = PassCosts()
    for seconds in (20.0, 1.0, 1.0):  # the first is bound, and takes one
        costs.note(1, seconds)
    given = [costs.lengths(1, [Offer(0.9, 2, n_right=n)]) for n in (0, 79, 80, 159, 160)]
    assert given == [[0], [0], [1], [1], [2]]
    for seconds in (20.0, 1.8):
        costs.note(2, seconds)
    assert costs.lengths(1, [Offer(0.7, 1, n_right=0)]) == [0], "its price is known"
    assert costs.lengths(1, [Offer(0.9, 1, n_right=0)]) == [1]


def test_a_cost_holds_for_a_while():
    costs = costs_of(n1=1.0, n2=9.0)
    assert costs.lengths(1, [Offer(0.9, 1)]) == [0]
    for _ in range(257):
        costs.note(1, 1.0)
    assert costs.lengths(1, [Offer(0.9, 1)]) == [1]


def test_a_common_start():
    long = list(range(1000))
    assert n_common(long, [*long[:990], 5]) == 990 and n_common(long, [0, 5, *long]) == 1
    assert n_common([], long) == 0 and n_common(long, long) == 1000
