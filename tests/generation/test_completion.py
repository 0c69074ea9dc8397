"""An answer's text, its pieces, and what ends it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyggml
from pyggml.errors import ConfigError
from pyggml.generation import Completion, Finish, Sampling, complete
from pyggml.generation.stops import StopStrings

GREEDY = {"temperature": 0.0}


# -- stop strings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stops, pieces, shown, found",
    [
        (["END"], ["one E", "N", "D two"], ["one ", "", ""], "END"),
        (["END"], ["one E", "N", "d", "E"], ["one ", "", "ENd", ""], None),
        (["aab"], ["aa", "aa", "b"], ["", "aa", ""], "aab"),
        (["\n\n", "###"], ["x\n", "# ", "##", "#"], ["x", "\n# ", "", ""], "###"),
        (["b", "abc"], ["a", "b"], ["", "a"], "b"),
        ([], ["a", "b"], ["a", "b"], None),
    ],
)
def test_a_stop_string_over_several_pieces(stops, pieces, shown, found):
    matched = StopStrings(stops)
    assert [matched.feed(piece) for piece in pieces] == shown
    assert matched.reached == found


TEXT = st.text("ab", max_size=4)


@given(st.lists(TEXT, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_is_shown_is_the_text_before_the_first_stop(pieces, stops):
    """However the text is cut: it is that of one character at a time."""
    matched, shown, whole = StopStrings(stops), "", "".join(pieces)
    ends = [i for i in range(len(whole) + 1) if any(whole[:i].endswith(s) for s in stops)]
    for piece in pieces:
        shown += matched.feed(piece)
        assert whole.startswith(shown) and not any(stop in shown for stop in stops)
        if matched.reached is not None:
            assert matched.reached in whole and matched.reached not in shown
            assert whole[len(shown) :].startswith(matched.reached)
            assert ends
            return
    assert not ends and shown + matched.flush() == whole


# -- completions --------------------------------------------------------------------------------


def logits_of(tokenizer, token):
    z = np.zeros(tokenizer.n_vocab, np.float32)
    z[token] = 9
    return z


def written(tokenizer, ids, n_tokens=None, n_ctx=None, prompt=(), **how):
    """The pieces of an answer whose tokens are these."""
    completion = Completion(tokenizer, Sampling(**GREEDY | how), prompt, n_tokens, n_ctx)
    pieces = []
    for token in ids:
        pieces.append(completion.take(logits_of(tokenizer, token)))
        if completion.finish:
            break
    assert [p.finish for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert completion.finish is (pieces[-1].finish if pieces else None)
    return completion, pieces


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special=False)


@pytest.mark.parametrize(
    "text, limits, shown, finish, n",
    [
        ("abcd", {"n_tokens": 3}, "abc", Finish.LENGTH, 3),
        ("abcd", {"n_ctx": 3, "prompt": [1]}, "ab", Finish.CONTEXT, 2),
        ("abcd", {"stop": ("cd",)}, "ab", Finish.STOP_STRING, 4),
        ("abcd", {"stop": ("bcx",), "n_tokens": 3}, "abc", Finish.LENGTH, 3),
        ("abcd", {"stop": ("bcx",), "n_ctx": 3}, "abc", Finish.CONTEXT, 3),
        ("aü", {"n_tokens": 2}, "a\ufffd", Finish.LENGTH, 2),
        ("aüb", {"stop": ("üb",)}, "a", Finish.STOP_STRING, 4),
    ],
)
def test_what_ends_an_answer(tiny_tokenizer, text, limits, shown, finish, n):
    completion, pieces = written(tiny_tokenizer, ids_of(tiny_tokenizer, text), **limits)
    assert "".join(p.text for p in pieces) == shown
    assert (completion.finish, len(completion.tokens)) == (finish, n)


def test_a_stop_token_is_not_part_of_the_answer_but_frees_held_text(tiny_tokenizer):
    eos = tiny_tokenizer.eos_id
    ids = [*ids_of(tiny_tokenizer, "ab"), eos, 5]
    completion, pieces = written(tiny_tokenizer, ids, stop=("bc",))
    assert [p.text for p in pieces] == ["a", "", "b"]
    assert pieces[-1].token == eos and completion.tokens == ids[:2]
    assert completion.finish is Finish.STOP_TOKEN


@pytest.mark.parametrize("limits", [{"n_tokens": 0}, {"n_ctx": 2, "prompt": [1, 2]}])
def test_an_answer_without_room_has_ended(tiny_tokenizer, limits):
    assert Completion(tiny_tokenizer, Sampling(), **limits).finish is not None


def test_log_probabilities_are_the_model_s_whatever_is_sampled(tiny_tokenizer):
    z = logits_of(tiny_tokenizer, 7)
    how = Sampling(temperature=0, logprobs=2, logit_bias={7: -20, 8: 5})
    piece = Completion(tiny_tokenizer, how).take(z)
    total = np.log(np.exp(z.astype(np.float64)).sum())
    assert piece.token == 8 and piece.logprob == pytest.approx(-total, abs=1e-5)
    assert piece.likeliest[0] == (7, pytest.approx(9 - total, abs=1e-5))
    assert len(piece.likeliest) == 2
    assert Completion(tiny_tokenizer, Sampling()).take(z).logprob is None


def test_the_prompt_is_penalised(tiny_tokenizer):
    how = Sampling(temperature=0, presence_penalty=10)
    completion = Completion(tiny_tokenizer, how, prompt=[7])
    assert completion.take(logits_of(tiny_tokenizer, 7)).token == 0


def test_the_pieces_are_the_text_of_the_tokens(tiny):
    model = pyggml.load(tiny)
    how = Sampling(seed=4, temperature=1.5, top_k=0)
    prompt = model.tokenizer.encode("the ")
    pieces = list(complete(model, prompt, 30, how))
    assert pieces[-1].finish in (Finish.LENGTH, Finish.STOP_TOKEN)
    tokens = [p.token for p in pieces if p.finish is not Finish.STOP_TOKEN]
    assert "".join(p.text for p in pieces) == model.tokenizer.decode(tokens)
    assert tokens == list(pyggml.generate(model, prompt, 30, how))


def test_counts_below_0_are_refused(tiny_tokenizer):
    with pytest.raises(ConfigError, match="n_tokens is -1, wanted 0 or more"):
        Completion(tiny_tokenizer, Sampling(), n_tokens=-1)
