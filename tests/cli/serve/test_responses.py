"""/v1/responses: the answers of chats as items, whole and streamed."""

import json

import pytest

from pyggml.cli.commands.serve.responses import chat_of

CALL = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
PLACE = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}
PLACE |= {"required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "name": "get_weather", "parameters": PLACE}]


def respond(server, given="the ", **fields):
    answer = server.http.post("/v1/responses", json={"input": given, **fields})
    assert answer.status_code == 200, answer.text
    return answer


def events_of(answer):
    """The events of a stream, which are numbered and named."""
    events = []
    for i, event in enumerate(answer.text.strip().split("\n\n")):
        name, data = event.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}" and told["sequence_number"] == i
        events.append(told)
    return events


def rebuilt(events):
    """The items that a client makes of the events."""
    items = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            items.append(event["item"])
        elif kind == "content_part.added":
            items[event["output_index"]]["content"].append(event["part"])
        elif kind == "function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind.endswith("text.delta"):
            items[event["output_index"]]["content"][0]["text"] += event["delta"]
        elif kind == "output_item.done":
            assert _bare(items[event["output_index"]]) == _bare(event["item"])
    return items


def _bare(item):
    item = {**item, "status": None}
    for part in item.get("content", []):
        part["logprobs"] = None
    return item


def test_a_text_is_the_chat_s_whole_and_streamed(server):
    fields = {"temperature": 0, "model": "red"}
    said = server.chat(max_tokens=12, **fields).json()
    whole = respond(server, max_output_tokens=12, **fields).json()
    (item,) = whole["output"]
    assert item["content"][0]["text"] == said["choices"][0]["message"]["content"]
    assert (whole["status"], item["status"]) == ("incomplete", "incomplete")
    assert whole["usage"]["output_tokens"] == 12 == said["usage"]["completion_tokens"]
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    events = events_of(respond(server, max_output_tokens=12, stream=True, **fields))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    (told,) = rebuilt(events)
    assert _bare(told) | {"id": 0} == _bare(item) | {"id": 0}
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["usage"]["output_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_items(server, stream):
    fields = {"tools": TOOLS, "tool_choice": "required", "seed": 1, "max_output_tokens": 400}
    answer = respond(server, stream=stream, parallel_tool_calls=False, **fields)
    response = events_of(answer)[-1]["response"] if stream else answer.json()
    (call,) = response["output"]
    assert call["type"] == "function_call" and call["name"] == "get_weather"
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    assert response["status"] == call["status"] == "completed"
    if stream:
        assert _bare(rebuilt(events_of(answer))[0]) == _bare(call)


def test_log_probabilities_are_those_of_all_tokens(server):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0}
    whole = respond(server, max_output_tokens=5, **fields).json()
    streamed = respond(server, max_output_tokens=5, stream=True, **fields)
    for response in (whole, events_of(streamed)[-1]["response"]):
        told = response["output"][0]["content"][0]["logprobs"]
        assert len(told) == 5 and all(len(each["top_logprobs"]) == 2 for each in told)


def test_items_become_messages():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}
    asked, again = {"role": "user", "content": parts}, {**CALL, "call_id": "c2"}
    items = [asked, thought, {"type": "message", **said}, CALL, again, RESULT]
    chat = chat_of({"input": items, "instructions": "i", "text": {"format": {"type": "text"}}})
    system, user, answer, result = chat["messages"]
    assert system == {"role": "system", "content": "i"} and user["content"] == "ab"
    assert (answer["content"], answer["reasoning_content"]) == ("c", "t")
    assert [call["id"] for call in answer["tool_calls"]] == ["c1", "c2"]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "noon"}
    assert chat["response_format"] == {"type": "text"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input": None}, "input is missing"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "has type 'item_reference', wanted"),
        ({"input": [{"type": ["message"]}]}, "has an item 1 that has type a list, wanted message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "wanted text alone"),
        ({"input": [{"role": "owner", "content": "a"}]}, "'owner'"),
        ({"input": [{"type": "reasoning", "content": "t"}]}, "input is empty"),
        ({"tools": [{"type": "web_search"}]}, "tools has one of type 'web_search'"),
        ({"previous_response_id": "resp_1"}, "previous_response_id is 'resp_1', wanted none"),
        ({"store": True}, "store is true, wanted false"),
        ({"background": True}, "background is true"),
        ({"truncation": "auto"}, "wanted disabled"),
        ({"messages": []}, "messages is a list, which is a field of /v1/chat/completions"),
        ({"include": ["file_search_call.results"]}, "include is"),
        ({"top_logprobs": 2}, "wanted include"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning has 'summary' 'detailed'"),
        ({"text": {"verbosity": "low"}}, "text has 'verbosity' 'low'"),
        ({"text": {"format": {"type": "xml"}}}, "has type 'xml'"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice has type 'mcp'"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"surprise": 1}, "surprise is not supported"),
        ({"temperature": -1}, "temperature is -1"),
    ],
)
def test_what_is_not_answered_is_refused_by_name(server, fields, said):
    answer = server.http.post("/v1/responses", json={"input": "a", **fields})
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text


def test_a_stream_that_fails_ends_with_an_error(serve):
    with serve(parallel=1) as server:
        server.batch.feed = lambda *given: 1 // 0
        *_, last = events_of(respond(server, stream=True))
    assert last["type"] == "error" and "failed" in last["message"]
