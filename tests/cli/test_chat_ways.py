"""The four ways of a chat to a model: training, `serve`, `chat` and `generate` read the same tokens
or all refuse."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import pyggml as library
from pyggml.chat import BUILT_IN, ChatEncoder, ChatTemplate, find_template
from pyggml.chat.messages import BadValue
from pyggml.cli.commands.chat.conversation import Conversation
from pyggml.cli.commands.generate import _of_row
from pyggml.cli.commands.serve.chats import ChatWriter
from pyggml.cli.commands.serve.limits import Limits
from pyggml.cli.commands.serve.params import read_chat
from pyggml.cli.commands.serve.service import Service
from pyggml.cli.commands.serve.voices import Voice, Voices
from pyggml.cli.terminal.prompts import read_prompts
from pyggml.cli.web.errors import ApiError
from pyggml.errors import DataError, TemplateError
from pyggml.generation import Sampling
from pyggml.lora.data import read_rows
from pyggml.lora.data.tokens.chats import Chats, encode_chat

from chats import assistant, user

CALLS = [{"id": "abcdef123", "type": "function",
          "function": {"name": "zqsky", "arguments": '{"zqtown": "zqOslo"}'}}]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "zqsky", "description": "zqabout", "parameters":
          {"type": "object", "properties": {"zqtown": {"type": "string"}}}}}]  # fmt: skip
RESULT = {
    "role": "tool",
    "content": '{"zqt": "<12>"}',
    "tool_call_id": "abcdef123",
    "name": "zqsky",
}
SYSTEM = {"role": "system", "content": "zqrule"}
ROUND = [user("zqask"), assistant("zqsaid")]
LAST = assistant("zqlast")
CHATS = {
    "answer": ([user("zqask"), LAST], None),
    "rounds": ([*ROUND, user("zqmore"), LAST], None),
    "system": ([SYSTEM, *ROUND, user("zqmore"), LAST], None),
    "two systems": ([SYSTEM, SYSTEM, user("zqask"), LAST], None),
    "late system": ([*ROUND, SYSTEM, user("zqmore"), LAST], None),
    "developer": ([{**SYSTEM, "role": "developer"}, user("zqask"), LAST], None),
    "parts": ([user([{"type": "text", "text": "zqone"}, {"type": "text", "text": " zqtwo"}]), LAST],
              None),
    "control token": ([user("zq<|endoftext|>zq"), assistant("zq<|endoftext|>"), user("b"), LAST],
                      None),
    "refusal": ([user("zqask"), assistant("zqsaid", refusal="zqno"), user("zqmore"), LAST], None),
    "thought": ([user("zqask"), assistant("zqsaid", reasoning_content="zqthink"), user("zqmore"),
                 LAST], None),
    "thought in content": ([user("zqask"), assistant("<think>\nzqthink\n</think>\n\nzqsaid"),
                            user("zqmore"), LAST], None),
    "tools": ([*ROUND, user("zqmore"), LAST], TOOLS),
    "call": ([user("zqask"), {"role": "assistant", "content": None, "tool_calls": CALLS}, RESULT,
              LAST], TOOLS),
    "content beside a call": ([user("zqask"), assistant("zqlook", tool_calls=CALLS), RESULT, LAST],
                              TOOLS),
    "call without tools": ([user("zqask"), assistant("", tool_calls=CALLS), RESULT, LAST], None),
}  # fmt: skip
REFUSED = ("leaves out", "has no place", "the chat template says", "the chat template fails")
REAL = (
    *("HuggingFaceTB-SmolLM3-3B", "LFM2.5-Instruct", "Qwen-Qwen2.5-7B-Instruct"),
    *("Qwen-Qwen3-0.6B", "google-gemma-2-2b-it", "ibm-granite-granite-3.3-2B-Instruct"),
    *("meta-llama-Llama-3.1-8B-Instruct", "microsoft-Phi-3.5-mini-instruct"),
    "mistralai-Mistral-Nemo-Instruct-2407",
)


@pytest.fixture(scope="module")
def model(model_with):
    return library.load(model_with(llama__context_length=4096), compute="f32")


@pytest.fixture(params=[*BUILT_IN, *REAL])
def template(request, model):
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    if request.param in BUILT_IN:
        made = find_template(model.tokenizer, request.param)
        return ChatTemplate(made.source, made.origin, names)
    folder = request.getfixturevalue("shared")
    source = (folder / f"templates/{request.param}.jinja").read_text("utf-8")
    return ChatTemplate(source, request.param, names)


class Ways:
    """What each way reads up to the last answer: its ids, or the template's complaint."""

    def __init__(self, model, template, path):
        self.model, self.template, self.path = model, template, path
        self.encoder = ChatEncoder(template, model.tokenizer)

    def write(self, messages, tools):
        record = {"messages": messages} | ({"tools": tools} if tools else {})
        self.path.write_text(json.dumps(record) + "\n")
        return self.path

    def training(self, messages, tools):
        """All tokens of the chat with its last answer."""
        (row,) = read_rows(self.write(messages, tools))[1]
        row = replace(row, read_only=frozenset(range(len(row.messages) - 1)))
        t = self.template
        try:
            found = encode_chat(row, self.model.tokenizer, Chats(t.source, t.origin))
        except BadValue as bad:
            raise TemplateError(str(bad)) from None
        return list(found.ids)

    def serve(self, messages, tools):
        given = {"messages": messages[:-1]} | ({"tools": tools} if tools else {})
        voice = Voice("m", self.model, ChatWriter.of(self.template, self.model.tokenizer), 4096)
        params = read_chat(given, Sampling(), Limits())
        service = Service(Voices(), SimpleNamespace(), Sampling(), Limits())
        return service.chat_prompts(voice, params)[0].tolist()

    def generate(self, messages, tools):
        (chat,) = read_prompts([self.write(messages[:-1], tools)])
        return _of_row(self.model, self.encoder, chat, False).ids

    def chat(self, messages, tools):
        """None for what a user cannot have typed."""
        (begun,) = read_prompts([self.write(messages[:-1], tools)])
        if tools:
            return None
        conversation = Conversation(self.model, self.template, Sampling(), 4096)
        *before, asked = begun.messages
        try:
            if before[1:] or (before and before[0]["role"] != "system"):
                conversation.load(before)
            elif before:
                conversation.set_system(before[0]["content"])
        except DataError:
            return None
        return conversation._prompt(asked["content"])


@pytest.mark.parametrize("name", CHATS)
def test_all_ways_read_the_same_tokens(name, template, model, tmp_path):
    messages, tools = CHATS[name]
    ways = Ways(model, template, tmp_path / "chat.jsonl")
    read, said = {}, {}
    for way in ("serve", "generate", "chat"):
        try:
            if (ids := getattr(ways, way)(messages, tools)) is not None:
                read[way] = ids
        except (TemplateError, DataError, ApiError) as error:
            said[way] = str(error)
    assert not (read and said), (read.keys(), said)
    assert all(ids == read["serve"] for ids in read.values())
    for error in said.values():
        assert any(
            x in error for x in ("leaves out", "no place", "template says", "template fails")
        )
    try:
        trained = ways.training(messages, tools)
    except TemplateError as error:
        assert any(
            x in str(error) for x in ("leaves out", "no place", "template says", "fails", "tra")
        )
        return
    if read and ways.model.tokenizer.decode(trained).startswith("x"):
        assert trained[: len(read["serve"])] == read["serve"]
