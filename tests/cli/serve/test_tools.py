"""Calls of tools and thoughts as clients have them: whole, streamed, required."""

import json

import pytest
import scripted

import chats

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Rome", "Oslo"], "description": "Where."}
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
OTHER = {"type": "function", "function": {"name": "now"}}
ASK = [{"role": "user", "content": "What is the weather?"}]
W = '{"city": "Rome"}'
# Template; the tokens of an answer, parted by ¦; its reasoning and content
ANSWERS = {
    "ibm-granite-granite-4.0": (
        'I look¦.\n¦<tool_call>¦\n{"name": "get_¦weather", "arguments": {"city"¦: "Rome¦"}}¦\n¦'
        "</tool_call>¦<|end_of_text|>",
        ("", "I look."),
    ),
    "openai-gpt-oss-120b": (
        "<|channel|>¦analysis¦<|message|>¦Hm.¦<|end|>¦<|start|>¦assistant¦ to=functions.get_weather"
        f"<|channel|>commentary json<|message|>¦{W}¦<|call|>",
        ("Hm.", None),
    ),
    "Mistral-Small-3.2-24B-Instruct-2506": (
        '[TOOL_CALLS]¦get_weather¦[ARGS]¦{"city": ¦"Rome"}¦</s>',
        ("", None),
    ),
    "google-gemma-4-31B-it": (
        '<|tool_call>¦call:get_weather{city:¦<|"|>¦Rome¦<|"|>}¦<tool_call|>¦<turn|>',
        ("", None),
    ),
    "moonshotai-Kimi-K2": (
        "Well.¦<|tool_calls_section_begin|>¦<|tool_call_begin|>¦functions.get_weather:0¦"
        f"<|tool_call_argument_begin|>¦{W}¦<|tool_call_end|>¦<|tool_calls_section_end|>¦"
        "<|im_end|>",
        ("", "Well."),
    ),
}


@pytest.fixture(scope="module", params=ANSWERS)
def told(request, serve, tmp_path_factory):
    """A server whose model answers so, and what is to come of it."""
    text, expected = ANSWERS[request.param]
    answer = text.split("¦")
    markers = [t for t in answer if t[0] in "<[" and t[-1] in ">]" and t != '<|"|>']
    template = (chats.GOLDEN / f"templates/{request.param}.jinja").read_text("utf-8")
    path = scripted.write(
        tmp_path_factory.mktemp("told") / "told.gguf",
        answer,
        [*markers, "<|return|>"],
        {"tokenizer.chat_template": template, "tokenizer.ggml.eos_token_id": answer[-1]},
    )
    with serve(path, adapters={}, ctx=4096) as server:
        yield server, expected


def ask(server, **fields):
    body = {"messages": ASK, "tools": [TOOL], "temperature": 0, "logit_bias": {}, **fields}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer


def streamed(answer):
    """The message that the deltas of a stream add up to, and why it ended."""
    message, reason = {}, None
    for line in answer.text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        (choice,) = json.loads(line[6:])["choices"]
        reason = choice["finish_reason"] or reason
        for key, value in choice["delta"].items():
            if key != "tool_calls":
                message[key] = message.get(key, "") + value
        for call in choice["delta"].get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append(call | {"function": {**call["function"]}})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


def test_what_a_model_calls(told):
    server, (reasoning, content) = told
    (choice,) = ask(server).json()["choices"]
    message, reason = streamed(ask(server, stream=True))
    for said, why in ((choice["message"], choice["finish_reason"]), (message, reason)):
        assert why == "tool_calls"
        assert said.get("reasoning_content", "") == reasoning
        assert (said["content"] or None) == content
        (call,) = said["tool_calls"]
        assert call["type"] == "function" and len(call["id"]) == 9
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}


def test_its_answer_can_be_sent_back(told):
    server, _ = told
    message = ask(server).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Sunny."}
    ask(server, messages=[*ASK, message, result | {"name": "get_weather"}], max_tokens=1)


def test_where_no_tool_may_be_called_text_stays_text(told):
    server, _ = told
    message = ask(server, tool_choice="none").json()["choices"][0]["message"]
    assert "tool_calls" not in message


@pytest.mark.parametrize(
    ("choice", "several"),
    [
        ("required", True),
        ("required", False),
        ({"type": "function", "function": {"name": "get_weather"}}, True),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [OTHER]},
            },
            False,
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_can_be_required(server, choice, several, stream):
    """Of a model of random weights."""
    fields = {"temperature": 1, "seed": 1, "max_tokens": 400, "stream": stream}
    answer = ask(
        server,
        tools=[TOOL, OTHER],
        tool_choice=choice,
        parallel_tool_calls=several,
        stop=["\x00"],
        **fields,
    )
    if stream:
        message, reason = streamed(answer)
    else:
        (told,) = answer.json()["choices"]
        message, reason = told["message"], told["finish_reason"]
    calls = message["tool_calls"]
    if isinstance(choice, dict):
        name = "get_weather" if choice["type"] == "function" else "now"
        assert [call["function"]["name"] for call in calls] == [name]
    if not several:
        assert len(calls) == 1
    assert reason in ("tool_calls", "length") and not message["content"]
    for call in calls[: len(calls) if reason == "tool_calls" else -1]:
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "get_weather":
            assert arguments in ({"city": "Rome"}, {"city": "Oslo"})


def test_a_strict_tool_holds_a_call_that_is_not_required(server):
    """The model writes either text that is no object, or a call that fits."""
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    seen = set()
    for seed in range(6):
        fields = {"temperature": 2, "seed": seed, "max_tokens": 60, "top_k": 0, "top_p": 1}
        (choice,) = ask(server, tools=[strict], **fields).json()["choices"]
        calls = choice["message"].get("tool_calls")
        seen.add(bool(calls))
        if calls and choice["finish_reason"] == "tool_calls":
            assert json.loads(calls[0]["function"]["arguments"])["city"] in ("Rome", "Oslo")
        elif not calls:
            assert not choice["message"]["content"].startswith("{")
    assert False in seen


def test_a_call_of_an_unknown_syntax_cannot_be_required(serve, tmp_path):
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "~{{ c.function.name }}~{{ c.function.arguments | tojson }}~{% endfor %}{% endfor %}"
        "{{ tools | tojson }}"
    )
    keys = {"tokenizer.chat_template": template}
    path = scripted.write(tmp_path / "m.gguf", ("a", "</s>"), ("</s>",), keys)
    with serve(path, adapters={}) as server:
        body = {"messages": ASK, "tools": [TOOL], "tool_choice": "required"}
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400 and "not known here" in answer.json()["error"]["message"]
        assert "tool_calls" not in ask(server, max_tokens=2).json()["choices"][0]["message"]
