"""The built-in templates write tools, calls and thoughts as the models do that they are named for;
a template without a place for them names those that have one."""

import json

import pytest

from pyggml.chat import BUILT_IN, ChatEncoder, find_template
from pyggml.chat.messages import messages_of
from pyggml.chat.template import WITH_TOOLS
from pyggml.errors import TemplateError

from chats import assistant, user

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}


def calls(*towns, content=""):
    some = [
        {
            "id": f"call1234{i}",
            "type": "function",
            "function": {"name": "weather", "arguments": {"town": town}},
        }
        for i, town in enumerate(towns)
    ]
    return {"role": "assistant", "content": content, "tool_calls": some}


def result(text):
    return {"role": "tool", "content": text, "name": "weather", "tool_call_id": "call12340"}


SYSTEM = {"role": "system", "content": "Be brief."}
ONE = [user("Oslo?"), calls("Oslo"), result("grey"), assistant("Grey."), user("Thanks")]
TWO = [user("Oslo, Rome?"), calls("Oslo", "Rome", content="I look."), result("grey"), result("sun")]
THOUGHT = [user("a"), {**assistant("b"), "reasoning_content": "early"}, user("c"),
           {**assistant("d"), "reasoning_content": "late"}]  # fmt: skip
DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"


@pytest.mark.parametrize("chat", [ONE, [SYSTEM, *ONE], TWO, [SYSTEM, *TWO, assistant("So.")]])
@pytest.mark.parametrize("asks", [False, True])
def test_chatml_writes_tools_as_qwen_does(template, vocabulary, chat, asks):
    real = template("Qwen-Qwen3-0.6B")
    ours = find_template(vocabulary(), "chatml").render(chat, [TOOL], add_generation_prompt=asks)
    theirs = real.render(chat, [TOOL], add_generation_prompt=asks)
    assert ours == theirs.replace("<think>\n\n</think>\n\n", "")  # of an answer without a thought


def test_chatml_writes_thoughts_as_qwen_does(template, vocabulary):
    ours = find_template(vocabulary(), "chatml").render(THOUGHT)
    assert ours == template("Qwen-Qwen3-0.6B").render(THOUGHT)
    assert "early" not in ours and "<think>\nlate\n</think>\n\nd<|im_end|>" in ours


@pytest.mark.parametrize("chat", [ONE, [SYSTEM, *ONE], [*ONE, assistant("Bye.")]])
@pytest.mark.parametrize("asks", [False, True])
def test_llama3_writes_tools_as_llama_3_1_does(template, vocabulary, chat, asks):
    real = template("meta-llama-Llama-3.1-8B-Instruct")
    ours = find_template(vocabulary(), "llama3").render(chat, [TOOL], add_generation_prompt=asks)
    theirs = real.render(chat, [TOOL], add_generation_prompt=asks)
    assert ours == theirs.replace(DATES, "")


@pytest.mark.quick
@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("chat, learned", [
    ([*ONE, assistant("Bye.")], ("weather", "Oslo", "Grey.", "Bye.")),
    (THOUGHT, ("late", "d")),
])  # fmt: skip
def test_calls_and_thoughts_are_learned(vocabulary, name, chat, learned):
    tokenizer = vocabulary()
    encoder = ChatEncoder(find_template(tokenizer, name), tokenizer)
    chat, tools = messages_of(chat)[0], [TOOL] if chat is not THOUGHT else None
    found = encoder(chat, tools)
    said = tokenizer.decode([i for i, t in zip(found.ids, found.trained, strict=True) if t], True)
    assert all(word in said for word in learned) and "grey" not in said and "Oslo?" not in said
    assert json.dumps(TOOL["function"]["name"]) in found.text or tools is None
    assert encoder.prompt(chat[:-1], tools) == found.ids[: len(encoder.prompt(chat[:-1], tools))]


def test_llama3_calls_one_function_at_a_time(vocabulary):
    with pytest.raises(TemplateError, match="an answer that calls is one call and nothing else"):
        find_template(vocabulary(), "llama3").render(TWO, [TOOL])


@pytest.mark.quick
@pytest.mark.parametrize("name", [n for n in BUILT_IN if n not in WITH_TOOLS])
def test_a_template_without_a_place_names_those_that_have_one(vocabulary, name):
    encoder = ChatEncoder(find_template(vocabulary(), name), vocabulary())
    way = "the templates chatml and llama3 have one$"
    with pytest.raises(TemplateError, match=f"^has tools, .* {name} has no place; {way}"):
        encoder(messages_of(ONE[:4])[0], [TOOL])
    with pytest.raises(TemplateError, match=f"^calls tools, .* {name} has no place; {way}"):
        encoder(messages_of(ONE[:4])[0])
    with pytest.raises(
        TemplateError, match=f"leaves out the thought of message 2, for which {way}"
    ):
        encoder(messages_of(THOUGHT)[0])
