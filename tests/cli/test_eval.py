"""eval: what it prints is what the library finds, of one model and of several."""

import json

import numpy as np
import pytest

import pyggml as library
from pyggml.lora import LoraConfig, attach, merge, perplexity
from pyggml.lora.config import DataConfig
from pyggml.lora.data import Encoding, Schema, read_rows
from pyggml.lora.data.windows.answers import documents_of
from pyggml.lora.evaluate import QuestionFormat, choose, encode_questions

PROMPTS = [f"the path {i} to the" for i in range(12)]


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    """An adapter that changes much."""
    path = tmp_path_factory.mktemp("adapter") / "adapter.gguf"
    made = attach(library.load(tiny), LoraConfig(rank=2, alpha=3.0))
    made.parameters.data[:] = np.random.default_rng(0).normal(0, 0.3, made.parameters.data.shape)
    made.save(path)
    return path


@pytest.fixture(scope="module")
def merged(tiny, adapter, tmp_path_factory):
    path = tmp_path_factory.mktemp("merged") / "merged.gguf"
    merge(library.load(tiny, adapter), path)
    return path


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": p, "completion": f" thing {i % 3}"} for i, p in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [
        {"question": p, "choices": ["thing", "path", "x"], "answer": i % 2}
        for i, p in enumerate(PROMPTS)
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_questions_as_a_table(pyggml, tiny, adapter, questions):
    ended = pyggml("eval", "-m", tiny, "-f", questions, "--compare", adapter)
    assert ended.code == 0
    about, _, header, first, second, against, won, *_ = ended.out.splitlines()
    chance = "by chance 33.3 %, always the commonest answer 50.0 %"
    assert about == f"{questions}: 12 questions of 3 choices; {chance}"
    assert header.split() == ["acc", "acc_norm", "acc_token"]
    rows = read_rows(questions, Schema("question"))[1]
    for line, model in ((first, library.load(tiny)), (second, library.load(tiny, adapter))):
        found = choose(model, encode_questions(rows, model.tokenizer, QuestionFormat(most=64)))
        assert f"{100 * found.right['acc'].mean():.1f} %  [" in line
    assert first.startswith("tiny.gguf  ") and second.startswith("tiny.gguf + adapter.gguf  ")
    assert against.startswith("  against tiny.gguf  ") and won.startswith("  won, lost  ")


def test_rows_of_base_adapter_and_merged_as_json(pyggml, tiny, adapter, merged, chats):
    """Only completions are scored; the merged model is the base with its adapter, to rounding."""
    ended = pyggml(
        "eval", "-m", tiny, "-f", chats, "--compare", adapter, merged, "--json", "--compute", "f32"
    )
    (file,) = json.loads(ended.out)["files"]
    assert (file["kind"], file["n"], len(file["models"])) == ("rows", 12, 3)
    base, tuned, whole = file["models"]
    assert base["n_tokens"] == sum(len(f" thing {i % 3}") - 1 + 1 for i in range(12))  # th; the end
    assert tuned["perplexity"]["value"] == pytest.approx(whole["perplexity"]["value"], rel=1e-3)
    assert tuned["perplexity"]["value"] != pytest.approx(base["perplexity"]["value"], rel=0.01)
    assert 0 <= base["token_accuracy"]["low"] <= base["token_accuracy"]["value"]
    ratio = file["differences"][0]["perplexity_ratio"]
    wanted = tuned["perplexity"]["value"] / base["perplexity"]["value"]
    assert ratio["value"] == pytest.approx(wanted) and ratio["low"] < wanted < ratio["high"]
    assert file["differences"][1]["model"] == "merged.gguf"


def test_a_text_is_read_as_perplexity_reads_it(pyggml, tiny, text):
    last = list(perplexity(library.load(tiny), text.read_text().removesuffix("\n"), 32))[-1]
    ended = pyggml("eval", "-m", tiny, "-f", text, "--ctx", 32, "--json")
    (file,) = json.loads(ended.out)["files"]
    (found,) = file["models"]
    assert found["perplexity"] == {"value": last.value, "stderr": last.error}
    assert found["token_accuracy"]["value"] == last.n_right / last.n_tokens
    some = pyggml("eval", "-m", tiny, "-f", text, "--ctx", 32, "--limit", 3, "--json")
    assert json.loads(some.out)["files"][0]["models"][0]["n_tokens"] == 3 * 15


def test_adapters_are_compared_without_the_model_among_them(
    pyggml, tiny, adapter, questions, chats
):
    """Two files at once; two models that are none of -m."""
    ended = pyggml("eval", "-f", questions, "-f", chats, "--compare", tiny, tiny, "--limit", 4)
    assert ended.code == 0 and ended.out.count("against") == 2
    assert "4 questions of 3 choices" in ended.out and "4 rows; " in ended.out
    assert f"{tiny}  " in ended.out, "two of one name are told by their folders"
    assert "+0.0 %  [+0.0, +0.0]" in ended.out


def test_tokens_of_other_vocabularies_are_not_compared(pyggml, tiny, model_with, chats):
    other = model_with(tokenizer__ggml__pre="gpt-2")
    ended = pyggml("eval", "-m", tiny, "-f", chats, "--compare", other)
    assert ended.code == 0 and "other tokens: not comparable" in ended.out
    file = json.loads(pyggml("eval", "-m", tiny, "-f", chats, "--compare", other, "--json").out)
    assert file["files"][0]["differences"] == []


def test_long_rows(pyggml, tiny, chats, questions):
    refused = pyggml("eval", "-m", tiny, "-f", chats, "--ctx", 21)
    assert refused.code == 2 and "23 tokens, the most of 2 that are too long, want" in refused.err
    dropped = pyggml("eval", "-m", tiny, "-f", chats, "--ctx", 21, "--long", "drop")
    assert dropped.code == 0 and "12 rows, 2 too long and left out; 80 tokens sc" in dropped.out
    refused = pyggml("eval", "-m", tiny, "-f", questions, "--ctx", 16)
    assert (
        refused.code == 2 and "to be read, wanted at most 16: --long cut leaves out" in refused.err
    )
    assert refused.err.count("wanted at most 16") <= 5 and " more" in refused.err
    cut = pyggml("eval", "-m", tiny, "-f", questions, "--ctx", 16, "--long", "cut")
    assert cut.code == 0
    refused = pyggml("eval", "-m", tiny, "-f", questions, "--long", "drop")
    assert refused.code == 2 and "--long is drop, wanted refuse or cut for questions" in refused.err


@pytest.mark.parametrize(
    "words, said",
    [
        (("-f", "Q"), "-m is missing, wanted -m MODEL.gguf"),
        (("-f", "Q", "-m", "M", "A"), "wanted --compare before files to compare"),
        (("-f", "Q", "-m", "M", "--compare"), "--compare names no file"),
        (("-f", "Q", "--compare", "A"), "is an adapter, wanted -m"),
        (("-f", "Q", "-m", "M", "--compare", "M:0.5"), "is a model, wanted no weight"),
        (("-f", "Q", "-m", "M", "--ctx", "65"), "--ctx is 65, wanted at most the model's 64"),
        (("-f", "Q", "-m", "M", "--limit", "0"), "--limit is 0, wanted 1 or more"),
        (("-f", "Q", "-m", "M", "--columns", "question=q,choices=c,answer=a"), 'without "q"'),
    ],
)
def test_what_cannot_be_done_is_told(pyggml, tiny, adapter, questions, words, said):
    files = {"Q": questions, "M": tiny, "A": adapter, "M:0.5": f"{tiny}:0.5"}
    ended = pyggml("eval", *(files.get(word, word) for word in words))
    assert ended.code == 2 and said in ended.err and not ended.out


PAIRS = [
    {"prompt": "the th", "chosen": "ing", "rejected": "at path"},
    {"prompt": "", "chosen": "other", "rejected": "the"},
    {"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "thing"},
                {"role": "user", "content": "more"}, {"role": "assistant", "content": "the"}],
     "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "path"}]},
]  # fmt: skip


@pytest.fixture
def template(tmp_path):
    """Of few bytes, as the tiny model's context is one of 64."""
    path = tmp_path / "few.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return path


@pytest.fixture
def pairs(tmp_path):
    """A folder with a file of pairs, one of rows, and a README."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    (folder / "rows.jsonl").write_text('{"text": "the path to the other thing"}\n' * 3)
    (folder / "README.md").write_text("about")
    return folder


def test_pairs_are_right_where_the_chosen_answer_is_likelier(
    pyggml, tiny, adapter, pairs, template
):
    """By the log-probabilities of the tokens that preference training counts."""
    how = ("--chat-template", template, "--json", "--compute", "f32", "--compare", adapter)
    ended = pyggml("eval", "-m", tiny, "-f", pairs / "pairs.jsonl", *how)
    assert ended.code == 0, ended.err
    (record,) = json.loads(ended.out)["files"]
    assert (record["kind"], record["n"], record["chance"]) == ("pairs", 3, 0.5)
    for model, found in zip(
        [library.load(tiny, compute="f32"), library.load(tiny, adapter, compute="f32")],
        record["models"],
        strict=True,
    ):
        encoding = Encoding.of(DataConfig(chat_template=str(template)), model.tokenizer)
        rows = read_rows(pairs / "pairs.jsonl", Schema("pairs"))[1]
        sums, means = [], []
        for row in rows:
            scores = []
            for document in documents_of(row, model.tokenizer, encoding):
                z = model.logits(document.ids[:-1]).astype(np.float64)
                log_p = z - np.logaddexp.reduce(z, axis=1, keepdims=True)
                scored = log_p[np.arange(len(z)), document.ids[1:]][document.trained[1:]]
                scores.append((scored.sum(), scored.mean()))
            sums.append(scores[0][0] > scores[1][0])
            means.append(scores[0][1] > scores[1][1])
        assert found["acc"]["value"] == np.mean(sums)
        assert found["acc_token"]["value"] == np.mean(means)


def test_inputs_reach_the_template_of_questions(pyggml, tiny, questions, template):
    """One that it does not read is refused, as everywhere."""
    inputs = ("--chat-template", template, "--chat-template-kwargs", '{"nothing": 1}')
    ended = pyggml("eval", "-m", tiny, "-f", questions, *inputs)
    assert ended.code == 2 and "nothing" in ended.err and ended.err.count("\n") == 1


def test_long_pairs(pyggml, tiny, pairs, template):
    how = ("-m", tiny, "-f", pairs / "pairs.jsonl", "--chat-template", template, "--ctx", 8)
    ended = pyggml("eval", *how)
    assert ended.code == 2 and "line 1 has 10" in ended.err and "--long cut leaves" in ended.err
    ended = pyggml("eval", *how, "--long", "drop")
    assert ended.code == 2 and "wanted refuse or cut for pairs" in ended.err
    ended = pyggml("eval", *how, "--long", "cut")
    assert ended.code == 2 and "an answer that does not fit into the 8" in ended.err
    ended = pyggml("eval", *how, "--ctx", 20, "--long", "cut")
    assert ended.code == 0 and "3 pairs of a chosen answer and a rejected one" in ended.out


def test_a_folder_is_its_files(pyggml, tiny, pairs, template):
    how = ("--chat-template", template, "--json")
    ended = pyggml("eval", "-m", tiny, "-f", pairs, *how)
    assert ended.code == 0, ended.err
    files = json.loads(ended.out)["files"]
    assert [(file["file"], file["kind"]) for file in files] == [
        (str(pairs / "pairs.jsonl"), "pairs"),
        (str(pairs / "rows.jsonl"), "rows"),
    ]
    assert "README.md is left out: it is plain text beside files of rows" in ended.err
    pattern = pyggml("eval", "-m", tiny, "-f", pairs / "r*.jsonl", *how)
    assert json.loads(pattern.out)["files"] == files[1:]


def test_columns_of_questions_are_mapped(pyggml, tiny, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"q": "the", "c": ["path", "thing"], "a": 1}) + "\n")
    words = ("--columns", "question=q,choices=c,answer=a")
    assert "1 question of 2 choices" in pyggml("eval", "-m", tiny, "-f", path, *words).out
