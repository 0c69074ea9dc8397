"""/v1/embeddings and /v1/rerank, of models that write and of encoders."""

import base64

import numpy as np
import pytest
import tiny_models
from tiny_models import TOKENS, VOCABULARY

import pyggml

TEXTS = ["the thing", "other", "the path"]


def vectors_of(answer):
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [each["index"] for each in data] == [*range(len(data))]
    return np.array([each["embedding"] for each in data], np.float32)


def test_vectors_are_the_library_s(server, chatty, adapters):
    post = server.http.post
    for name in ("tiny", "red"):
        model = pyggml.load(chatty, adapters.get(name))
        found = post("/v1/embeddings", json={"input": TEXTS, "model": name})
        np.testing.assert_allclose(vectors_of(found), model.embed(TEXTS), atol=1e-6)
        n = sum(len(model.tokenizer.encode(text)) for text in TEXTS)
        assert found.json()["usage"] == {"prompt_tokens": n, "total_tokens": n}
    ids = pyggml.load(chatty).tokenizer.encode(TEXTS[0])
    alone = vectors_of(post("/v1/embeddings", json={"input": TEXTS[0]}))
    np.testing.assert_array_equal(vectors_of(post("/v1/embeddings", json={"input": ids})), alone)
    packed = post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"}).json()
    raw = base64.b64decode(packed["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), alone[0])
    short = vectors_of(post("/v1/embeddings", json={"input": TEXTS[0], "dimensions": 5}))[0]
    np.testing.assert_allclose(short, alone[0, :5] / np.linalg.norm(alone[0, :5]), rtol=1e-6)


def test_embeddings_do_not_end_a_stream(server):
    with server.endless() as stream:
        events = stream.iter_lines()
        next(events)
        assert len(vectors_of(server.http.post("/v1/embeddings", json={"input": TEXTS}))) == 3
        assert next(line for line in events if line).startswith("data: {")


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ({}, 400, "input is missing"),
        ({"input": []}, 400, "input is a list, wanted a string, token ids, or a list"),
        ({"input": "a", "encoding_format": "hex"}, 400, "wanted float or base64"),
        ({"input": "a", "dimensions": 33}, 400, "dimensions is 33, wanted at most the 32"),
        ({"input": ["a", ""]}, 400, "input 2"),
        ({"input": "a" * 600}, 400, "600 tokens"),
        ({"input": "a", "model": "green"}, 404, "there is no model 'green'"),
        ({"input": "a", "truncate": True}, 400, "truncate is not supported"),
    ],
)
def test_what_cannot_be_embedded_is_refused(server, given, status, said):
    answer = server.http.post("/v1/embeddings", json=given)
    assert answer.status_code == status and said in answer.json()["error"]["message"]


def test_a_model_without_a_classifier_scores_nothing(server):
    answer = server.http.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert answer.status_code == 400 and "wants a classifier" in answer.json()["error"]["message"]


def test_a_reranker_s_documents_come_best_first(serve, tmp_path):
    keys = VOCABULARY | {"tokenizer.chat_template": "{{ messages }}", "qwen3.pooling_type": 4}
    path = tiny_models.write(
        tmp_path / "reranker.gguf", "qwen3", None, keys, {"cls.output.weight": (2, 16)},
        len(TOKENS), tiny_models.scaled,
    )  # fmt: skip
    scores = pyggml.load(path).rerank("thing", TEXTS)
    order = [int(i) for i in np.argsort(-scores)]
    with serve(path, adapters={}) as server:
        body = {"query": "thing", "documents": TEXTS, "top_n": 2, "return_documents": True}
        answer = server.http.post("/v1/rerank", json=body).json()
        assert [r["index"] for r in answer["results"]] == order[:2]
        assert [r["document"]["text"] for r in answer["results"]] == [TEXTS[i] for i in order[:2]]
        found = [r["relevance_score"] for r in answer["results"]]
        np.testing.assert_allclose(found, scores[order[:2]], atol=1e-6)
        refused = server.http.post("/v1/embeddings", json={"input": "a"})
        assert refused.status_code == 400 and "scores, no vectors" in refused.text
