"""pyggml embed: vectors in three formats, cosines, scores of a reranker, refusals."""

import io
import json

import numpy as np
import pytest
import tiny_models
from tiny_models import TOKENS, VOCABULARY

import pyggml as library
from pyggml.tokenizer import from_metadata

TEXTS = ["the thing", "other", "the path"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    path = tmp_path_factory.mktemp("reranker") / "reranker.gguf"
    head = {"cls.output.weight": (2, 16)}
    return tiny_models.write(path, "qwen3", None, VOCABULARY, head, len(TOKENS), tiny_models.scaled)


def test_vectors_are_the_library_s_in_each_format(pyggml, tiny, tmp_path, monkeypatch):
    wanted = library.load(tiny).embed(TEXTS, "mean")
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join([TEXTS[1], "", TEXTS[2]]))
    given = ("embed", "-m", tiny, "-p", TEXTS[0], "-f", texts, "--pooling", "mean")
    printed = pyggml(*given)
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [row["text"] for row in rows] == TEXTS
    np.testing.assert_array_equal([np.float32(row["embedding"]) for row in rows], wanted)
    assert "1 empty line left out" in printed.err
    assert "3 texts, 32 numbers, pooled by mean" in printed.err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(texts.read_bytes())))
    assert pyggml(*given[:5], "-f", "-", *given[7:]).out == printed.out
    for ending in (".npy", ".jsonl", ".txt"):
        path = tmp_path / f"out{ending}"
        assert pyggml(*given, "-o", path).code == 0
        if ending == ".jsonl":
            assert path.read_text() == printed.out
            continue
        found = np.load(path) if ending == ".npy" else np.loadtxt(path, np.float32)
        np.testing.assert_array_equal(found, wanted)
    cosines = np.loadtxt(pyggml(*given, "--cosine").out.splitlines())
    np.testing.assert_allclose(cosines, wanted @ wanted.T, atol=6e-4)


def test_scores_of_a_reranker_come_best_first(pyggml, reranker):
    scores = library.load(reranker).rerank("thing", TEXTS)
    assert ((scores > 0) & (scores < 1)).all() and len(set(scores)) == 3
    given = [w for text in TEXTS for w in ("-p", text)]
    printed = pyggml("embed", "-m", reranker, "--rerank", "thing", *given).out.splitlines()
    order = np.argsort(-scores)
    assert printed == [f"{scores[i]:.6f}\t{TEXTS[i]}" for i in order]


def test_a_pair_has_the_template_s_places_and_no_control_tokens_of_its_own(model_with):
    template = {"tokenizer__chat_template.rerank": "<|endoftext|>{query}|{document}"}
    tokenizer = library.load(model_with(**template)).tokenizer
    end, first, second = len(TOKENS) - 1, "<|endoftext|>{document}", "d"
    assert tokenizer.encode_pair(first, second) == [
        end,
        *tokenizer.encode(f"{first}|{second}"),
    ]
    plain = library.load(model_with()).tokenizer
    assert plain.encode_pair("a", "b") == [*plain.encode("a"), *plain.encode("b")]
    ends = library.load(model_with(tokenizer__ggml__add_eos_token=True)).tokenizer
    a, b = (plain.encode(x)[0] for x in "ab")
    assert ends.encode_pair("a", "b") == [a, end, b, end]


@pytest.mark.parametrize(
    ("keys", "between", "after"),
    [
        ({}, [2], []),  # files of before
        ({"add_eos_token": True, "eos_token_id": 2, "add_sep_token": False}, [2], [2]),  # today's
        ({"add_eos_token": True}, [2, 2], [2]),
    ],
)
def test_a_pair_of_bert_has_the_tokens_that_llama_server_gives_it(keys, between, after):
    """Its scores of such models were these: a separator for EOS where there is none."""
    tokens = ["[UNK]", "[CLS]", "[SEP]", "▁a", "▁b"]
    keys |= {"model": "bert", "tokens": tokens, "bos_token_id": 1, "seperator_token_id": 2}
    keys |= {"unknown_token_id": 0, "token_type": np.array([3, 3, 3, 1, 1], np.int32)}
    tokenizer = from_metadata({f"tokenizer.ggml.{name}": value for name, value in keys.items()})
    assert tokenizer.encode_pair("a", "b") == [1, 3, *between, 4, *after]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "no texts, wanted -p TEXT or -f FILE"),
        (("-p", "a", "--rerank", "b"), "pooling 'rank' wants a classifier, which this llama lacks"),
        (("-p", "a", "--rerank", "b", "--cosine"), "--rerank prints scores, wanted neither"),
        (("-p", "a", "-o", "x.csv"), "--output ends in '.csv', wanted .npy, .jsonl, .txt"),
        (("-p", "a", "--cosine", "--no-normalise"), "--cosine compares normalised vectors"),
    ],
)
def test_what_cannot_be_done_is_said(pyggml, tiny, given, said):
    ended = pyggml("embed", "-m", tiny, *given)
    assert ended.code == 2 and said in ended.err
