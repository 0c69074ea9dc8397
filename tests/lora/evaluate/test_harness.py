"""Our class in the real lm-evaluation-harness: `pip install '.[harness]'`.

tests/golden/evaluation has what the harness makes of the demo's model read by transformers; the
tasks here are files, so that nothing is fetched.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from extras import need
from processes import python

import pyggml
from pyggml.chat import find_template
from pyggml.cli import demo
from pyggml.errors import ConfigError
from pyggml.lora.config import EvalConfig
from pyggml.lora.data import Schema, read_rows
from pyggml.lora.evaluate import Asking, choose, encode_questions, write_answers
from pyggml.lora.evaluate.questions import QuestionFormat

need("datasets")
need("lm_eval")
pytestmark = pytest.mark.filterwarnings("default")  # the harness' own
GOLDEN = Path(__file__).parents[2] / "golden/evaluation"
ROOT = Path(__file__).parents[3]

QUESTIONS = [
    ("After love?", ["to hate", "the moon", "a king"], "B", "x"),
    ("After night?", ["day", "it", "my lord"], "A", "y"),
    ("My lord?", ["the lord", "of it", "king"], "C", "x"),
    ("ROMEO:", ["I will", "go", "no, no"], "C", "y"),
]
DEV = [("Who?", ["the king", "the man", "it"], "A", "x"), ("Is it?", ["yes", "no", "so"], "B", "y")]
PROBLEMS = [("Who goes", "the"), ("Where is the king", "well"), ("ROMEO", "i")]
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/{file}.jsonl, dev: {folder}/dev.jsonl}}
test_split: test
fewshot_split: dev
fewshot_config: {{sampler: first_n}}
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
"""
CHOICES = """output_type: multiple_choice
doc_to_target: "{{choices.label.index(answerKey)}}"
doc_to_choice: "{{choices.text}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
WRITTEN = """output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["Question:"], do_sample: false, max_gen_toks: 12}
filter_list:
  - name: first
    filter: [{function: regex, regex_pattern: "([a-z]+)"}, {function: take_first}]
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true,
     regexes_to_ignore: ["(?s).*#### "]}
"""


@pytest.fixture(scope="module")
def harness():
    from pyggml.lora.evaluate import harness

    return harness


@pytest.fixture(scope="module")
def model():
    return pyggml.load(demo.BASE, compute="f32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tasks and their files."""
    folder = tmp_path_factory.mktemp("tasks")

    def lines(name, rows):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    for name, some in (("questions", QUESTIONS), ("dev", DEV)):
        keys = ("question", "choices", "answerKey", "category")
        rows = [dict(zip(keys, row, strict=True)) for row in some]
        labelled = [r | {"choices": {"text": r["choices"], "label": ["A", "B", "C"]}} for r in rows]
        lines(name, labelled)
    lines("problems", [{"question": q, "answer": f"so it is. #### {a}"} for q, a in PROBLEMS])
    for name, file, rest in (("ours", "questions", CHOICES), ("written", "problems", WRITTEN)):
        text = TASK.format(name=name, folder=folder, file=file) + rest
        if name == "written":
            text = text.replace(f", dev: {folder}/dev.jsonl", "").replace(
                "split: dev", "split: test"
            )
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture
def evaluate(harness, model, folder, monkeypatch):
    """(task, shots) -> the harness' samples, in the order of the file."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(task, shots=0):
        done = simple_evaluate(
            model=harness.HarnessModel(model),
            tasks=[task],
            num_fewshot=shots,
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=0,
        )
        return sorted(done["samples"][task], key=lambda sample: sample["doc_id"])

    return call


def test_log_probabilities_are_those_of_the_harness_with_transformers(harness, model):
    rows = read_rows(GOLDEN / "questions.jsonl", Schema("question"))[1]
    theirs = json.loads((GOLDEN / "scores.json").read_text())["harness"]["log_probs"]
    pairs = [(row.prompt, f" {choice}") for row in rows for choice in row.choices]
    asked = [SimpleNamespace(args=pair) for pair in pairs]
    found = harness.HarnessModel(model).loglikelihood(asked, disable_tqdm=True)
    assert [p for p, _ in found] == pytest.approx([p for some in theirs for p in some], abs=2e-4)


@pytest.mark.parametrize("shots", [0, 2])
def test_eval_and_the_harness_score_alike(evaluate, model, folder, shots):
    config = EvalConfig(ask="Question: {}\nAnswer:", shots=shots)
    rows, dev = (
        read_rows(folder / f"{name}.jsonl", Schema("question"))[1] for name in ("questions", "dev")
    )
    # The harness has no categories within a task.
    rows, dev = ([_without_category(row) for row in some] for some in (rows, dev))
    asked = Asking.of(config).rows(rows, dev)
    ours = choose(model, encode_questions(asked, model.tokenizer, QuestionFormat.of(config, model)))
    samples = evaluate("ours", shots)
    for mine, sample in zip(ours.log_probs, samples, strict=True):
        theirs = [float(answer[0][0]) for answer in sample["resps"]]
        assert mine.tolist() == pytest.approx(theirs, abs=1e-4)
    assert ours.right["acc"].tolist() == [bool(sample["acc"]) for sample in samples]


def _without_category(row):
    from dataclasses import replace

    return replace(row, category="")


def test_written_answers_are_the_harness_s(evaluate, model, folder):
    config = EvalConfig(
        ask="Question: {}\nAnswer:", match="#### ([a-z]+)|([a-z]+)", answer_tokens=12,
        stop=("Question:",),
    )  # fmt: skip
    rows = Asking.of(config).rows(read_rows(folder / "problems.jsonl")[1])
    ours = write_answers(model, rows, config)
    samples = evaluate("written")
    assert list(ours.texts) == [sample["resps"][0][0] for sample in samples]
    wanted = [bool(sample["exact_match"]) for sample in samples]
    assert ours.right["match"].tolist() == wanted


def test_a_text_s_log_probability_is_the_sum_of_its_tokens(harness, model):
    text = "My lord, the king is dead, and all the men are gone to the house."
    ids = model.tokenizer.encode(text, add_special=False)
    before = harness.HarnessModel(model).prefix_token_id
    logits = model.logits([before, *ids[:-1]]).astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    wanted = logs[np.arange(len(ids)), ids].sum()
    for most in (None, 8):
        ours = harness.HarnessModel(model, max_length=most)
        (found,) = ours.loglikelihood_rolling([SimpleNamespace(args=(text,))])
        assert (found == pytest.approx(wanted, abs=1e-3)) == (most is None)


def test_a_long_prompt_loses_its_beginning(harness, model):
    asked = [SimpleNamespace(args=("the " * 50 + "king", " is dead"))]
    with pytest.warns(UserWarning, match="1 requests are longer than the context of 6 tokens: the"):
        short = harness.HarnessModel(model, max_length=6).loglikelihood(asked, disable_tqdm=True)
    whole = harness.HarnessModel(model).loglikelihood(asked, disable_tqdm=True)
    assert short != whole and np.isfinite(short[0][0])
    with pytest.raises(ConfigError, match="max_length is 1, wanted 2 to the model's 512"):
        harness.HarnessModel(model, max_length=1)


def test_what_a_task_says_of_sampling_is_obeyed_or_told(harness, model):
    """What it does not say cuts no token off; pyggml's own defaults would."""
    for how in ({}, {"temperature": 0.0}, {"do_sample": False, "temperature": 0.7}):
        assert harness._sampling(how).temperature == 0
    sampling = harness._sampling({"temperature": 0.7, "until": ["x", ""], "top_k": 9})
    cuts = (sampling.top_k, sampling.top_p, sampling.min_p)
    assert (sampling.temperature, sampling.stop, cuts) == (0.7, ("x",), (9, 1.0, 0.0))
    with pytest.warns(UserWarning, match="generation_kwargs num_beams, penalty: have no effect"):
        harness._sampling({"penalty": 2, "num_beams": 3, "max_gen_toks": 5})
    with pytest.warns(UserWarning, match="1 requests are longer than the context of 8 tokens"):
        _write(harness.HarnessModel(model, max_length=8), "the " * 9, max_gen_toks=2)


def test_each_answer_is_that_of_its_prompt_alone(harness, model):
    ours = harness.HarnessModel(model)
    prompts = ["My lord, the king is", "My lord, the king was", "My lord", "ROMEO"]
    assert _write(ours, *prompts, max_gen_toks=6, until=["\n"]) == [
        text for prompt in prompts for text in _write(ours, prompt, max_gen_toks=6, until="\n")
    ]


def _write(model, *prompts, **how):
    requests = [SimpleNamespace(args=(prompt, how)) for prompt in prompts]
    return model.generate_until(requests, disable_tqdm=True)


def test_chats_are_written_by_the_template(harness, model):
    ours = harness.HarnessModel(model, chat_template="chatml")
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The"}]
    template = find_template(model.tokenizer, "chatml")
    assert ours.apply_chat_template(chat[:1]) == (
        template.render(chat[:1], add_generation_prompt=True)
    )
    begun = ours.apply_chat_template(chat, add_generation_prompt=False)
    assert begun == template.render(chat[:1], add_generation_prompt=True) + "The"
    assert ours.chat_template(True) == template.source
    assert ours.chat_template(False) is None


def test_the_harness_as_a_command(folder):
    words = ["run", "--model", "pyggml", "--model_args", f"pretrained={demo.BASE},compute=f32"]
    words += ["--include_path", str(folder), "--tasks", "ours"]
    done = python("-m", "pyggml.lora.evaluate.harness", *words, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-500:]
    assert "|ours |Yaml" in done.stdout.replace("  ", " ") and "|acc" in done.stdout
