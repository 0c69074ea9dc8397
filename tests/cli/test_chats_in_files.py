"""Chats in files: `generate --messages` answers them, `chat --messages` begins with one, and what
the assistant began is gone on with where that is asked for."""

import io
import json
from types import SimpleNamespace

import pytest

import pyggml as library
from pyggml.chat import ChatEncoder, find_template
from pyggml.cli.commands.serve.chats import ChatWriter
from pyggml.cli.commands.serve.limits import Limits
from pyggml.cli.commands.serve.params import read_chat
from pyggml.cli.commands.serve.service import Service
from pyggml.cli.commands.serve.voices import Voice, Voices
from pyggml.cli.terminal.show import printable
from pyggml.cli.web.errors import ApiError
from pyggml.generation import Sampling, Session

from chats import assistant, user

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if tools %}{{ tools|tojson }}{% endif %}{% if add_generation_prompt %}a:{% endif %}"
)
ASKED, BEGUN = [user("the th")], [user("the th"), assistant("of the ")]


@pytest.fixture(scope="module")
def path(model_with):
    return model_with(tokenizer__chat_template=TEMPLATE, llama__context_length=512)


@pytest.fixture(scope="module")
def encoder(path):
    tokenizer = library.load(path).tokenizer
    return ChatEncoder(find_template(tokenizer), tokenizer)


@pytest.fixture
def generate(pyggml, path, tmp_path):
    """Runs `pyggml generate` with these records in a file, as lines or as it is."""

    def call(records, *arguments, name="chats.jsonl"):
        file = tmp_path / name
        lines = name.endswith("l")
        text = "".join(json.dumps(r) + "\n" for r in records) if lines else json.dumps(records)
        file.write_text(text)
        how = ("-n", 4, "--temp", 0, "--compute", "f32")
        return pyggml("generate", "-m", path, "--messages", file, *how, *arguments)

    return call


def test_each_chat_is_answered(generate, encoder, pyggml, path):
    tools = [{"type": "function", "function": {"name": "look"}}]
    system = {"role": "system", "content": "Be brief."}
    chats = [{"messages": ASKED}, {"messages": ASKED, "system": "Be brief."},
             {"conversations": [{"from": "human", "value": "the th"}], "tools": tools}]  # fmt: skip
    ended = generate(chats, "--json")
    assert ended.code == 0, ended.err
    made = [json.loads(line) for line in ended.out.splitlines()]
    wanted = [encoder.prompt(ASKED), encoder.prompt([system, *ASKED]), encoder.prompt(ASKED, tools)]
    assert [one["prompt_tokens"] for one in made] == wanted
    assert generate(chats).out == "".join(printable(one["text"]) + "\n" for one in made)
    assert {one["finish_reason"] for one in made} <= {"stop", "length"}
    assert all(len(one["tokens"]) <= 4 for one in made)
    one = generate(ASKED, "--json", name="chat.json")
    assert json.loads(one.out) == made[0] | {"seed": json.loads(one.out)["seed"]}


def test_a_question_with_its_answer_is_a_chat_as_in_training(generate, encoder, pyggml, tiny):
    rows = [{"question": "the th", "answer": "path"}]
    made = json.loads(generate(rows, "--json").out)
    assert made["prompt_tokens"] == encoder.prompt([user("the th")])
    as_text = generate(rows, "--json", "--columns", "prompt=question,completion=answer")
    assert json.loads(as_text.out)["prompt_tokens"] != made["prompt_tokens"]
    gone_on = json.loads(generate(rows, "--json", "--continue-last").out)
    assert len(gone_on["prompt_tokens"]) > len(made["prompt_tokens"])
    ended = generate(rows, "-m", tiny, "--json")  # without a template
    assert json.loads(ended.out)["prompt_tokens"] == json.loads(as_text.out)["prompt_tokens"]


def test_json_has_the_probabilities(generate):
    made = json.loads(generate([{"messages": ASKED}], "--json", "--logprobs", 2).out)
    assert [each["token"] for each in made["logprobs"]] == made["tokens"]
    for each in made["logprobs"]:
        assert each["logprob"] == max(each["top_logprobs"].values())  # --temp 0
        assert len(each["top_logprobs"]) == 2


def test_json_of_a_text(pyggml, path):
    how = ("-n", 4, "--seed", 3, "--compute", "f32")
    made = json.loads(pyggml("generate", "-m", path, "-p", "the\\n", "--json", *how).out)
    assert made["prompt_tokens"] == library.load(path).tokenizer.encode_prompt("the\n")
    assert made["seed"] == 3
    assert pyggml("generate", "-m", path, "-p", "the\\n", *how).out.startswith("the\n")


def test_a_begun_answer_is_gone_on_with(generate, encoder):
    open_ids = encoder.prompt(BEGUN, continues=True)
    assert encoder.tokenizer.decode(open_ids).endswith("a:of the ")
    made = json.loads(generate([{"messages": BEGUN}], "--json", "--continue-last").out)
    assert made["prompt_tokens"] == open_ids
    anew = generate([{"messages": BEGUN}], "--json")
    assert json.loads(anew.out)["prompt_tokens"] == encoder.prompt(ASKED)
    assert "note: 1 row with an answer, which is left out: another is written" in anew.err
    assert generate([{"messages": BEGUN}], "--continue-last").out.startswith("of the ")


FAULTS = [
    (["--messages", "q", "-p", "a"], "wanted -p TEXT, or --messages FILE"),
    ([], "wanted -p TEXT, or --messages FILE"),
    (["-p", "a", "--continue-last"], "--continue-last: for chats, wanted --messages FILE"),
    (
        ["-p", "a", "--chat-template", "chatml"],
        "--chat-template: for chats, wanted --messages FILE",
    ),
]


@pytest.mark.parametrize("arguments, message", FAULTS)
def test_options_without_effect_are_refused(pyggml, path, arguments, message):
    ended = pyggml("generate", "-m", path, *arguments)
    assert ended.code == 2 and message in ended.err


BAD = [
    ([{"messages": ASKED}, {"text": "a"}], "line 2 is a text, in which nothing is asked"),
    ([{"messages": ASKED}, {"words": "a"}], 'line 2 has neither "messages" nor a "prompt"'),
    ([{"messages": BEGUN[1:]}], "line 1 has an answer alone, and nothing that is asked"),
    ([{"messages": [{"role": "boss", "content": "a"}]}], "line 1 has a message 1 that"),
    ([{"messages": [{"role": "user", "content": [{"type": "image"}]}]}], "wanted text alone"),
    ([3, {"messages": ASKED}], "line 1 is a number"),
]


@pytest.mark.parametrize("records, message", BAD)
def test_what_is_no_chat_is_told_by_its_line(generate, records, message):
    ended = generate(records)
    assert ended.code == 2 and message in ended.err and "chats.jsonl" in ended.err


def test_what_cannot_be_gone_on_with_is_told_by_its_line(generate):
    ended = generate([{"messages": BEGUN}, {"messages": ASKED}], "--continue-last")
    assert ended.code == 2
    assert "line 2: ends with no words of the assistant, which could be continued" in ended.err


# -- chat ---------------------------------------------------------------------------------------


@pytest.fixture
def talk(pyggml, path, tmp_path, monkeypatch):
    """Runs `pyggml chat` that begins with these messages; what was fed, and how it ended."""

    def call(messages, lines, *arguments):
        file = tmp_path / "saved.jsonl"
        file.write_text(json.dumps({"messages": messages}) + "\n")
        fed, feed = [], Session.feed
        monkeypatch.setattr(Session, "feed", lambda s, ids: (fed.extend(ids), feed(s, ids))[1])
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        how = ("-n", 3, "--temp", 0, "--compute", "f32", "--messages", file)
        ended = pyggml("chat", "-m", path, *how, *arguments)
        return fed, ended, file

    return call


def test_a_saved_conversation_is_gone_on_with(talk, encoder):
    begun = [{"role": "system", "content": "Be brief."}, *BEGUN]
    fed, ended, _ = talk(begun, "more\n")
    assert ended.code == 0, ended.err
    wanted = encoder.prompt([*begun, user("more")])
    assert fed[: len(wanted)] == wanted


def test_the_last_answer_becomes_longer(talk, encoder, tmp_path):
    saved = tmp_path / "after.jsonl"
    fed, ended, _ = talk(BEGUN, f"/continue\n/save {saved}\n", "--continue-last")
    assert ended.code == 0, ended.err
    wanted = encoder.prompt(BEGUN, continues=True)
    assert fed[: len(wanted)] == wanted
    (line,) = saved.read_text().splitlines()
    content = json.loads(line)["messages"][1]["content"]
    assert content.startswith("of the ") and len(content) > len("of the ")
    assert printable(content.removeprefix("of the ")).strip("\n") in ended.out.replace("\n", "")


def test_what_is_no_conversation_is_told(talk, pyggml, path):
    for messages, message in {
        "no": (ASKED, "line 1 is no conversation: wanted questions and answers in turn"),
        "more": ([user("a"), assistant("b", reasoning_content="c")], "more than questions"),
    }.values():
        _, ended, _ = talk(messages, "")
        assert ended.code == 2 and message in ended.err
    ended = pyggml("chat", "-m", path, "--continue-last")
    assert ended.code == 2 and "wanted --messages FILE beside it" in ended.err


# -- serve --------------------------------------------------------------------------------------


def test_a_server_goes_on_with_the_last_message(path, encoder):
    model = library.load(path)
    writer = ChatWriter.of(find_template(model.tokenizer), model.tokenizer)
    voice = Voice("m", model, writer, 512)
    service = Service(Voices(), SimpleNamespace(), Sampling(), Limits())

    def ids(**fields):
        given = read_chat({"messages": BEGUN, **fields}, Sampling(), Limits())
        return service.chat_prompts(voice, given)[0].tolist()

    go_on = {"continue_final_message": True}
    assert ids(**go_on) == encoder.prompt(BEGUN, continues=True)
    assert ids(**go_on, add_generation_prompt=False) == ids(**go_on)
    assert ids(add_generation_prompt=True) == ids() == encoder.prompt(BEGUN)
    for fields in (go_on | {"add_generation_prompt": True}, {"add_generation_prompt": False}):
        with pytest.raises(ApiError, match="add_generation_prompt is (true|false), wanted"):
            ids(**fields)


def test_a_run_does_not_go_on_with_a_template_that_was_changed(pyggml, path, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [*BEGUN]}) + "\n")
    template, out = tmp_path / "t.jinja", tmp_path / "out.gguf"
    template.write_text(TEMPLATE)
    how = ("-f", tmp_path / "a.jsonl", "--chat-template", template, "--ctx", 64, "--lora-rank", 1)
    ends = ("-o", out, "--checkpoint-dir", tmp_path / "ck", "--no-report", "--val-split", 0)
    run = ("finetune", "-m", path, *how, *ends, "--max-steps")
    assert pyggml(*run, 2).code == 0
    template.write_text(TEMPLATE.replace("a:", "b:"))
    ended = pyggml(*run, 2, "--resume", "auto")
    assert ended.code == 2 and "the template was changed" in ended.err
    template.write_text(TEMPLATE)
    assert pyggml(*run, 2, "--resume", "auto").code == 0
