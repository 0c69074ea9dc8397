"""Libraries that programs talk to OpenAI with notice no difference: `pytest -m clients`.

Wanted beside the project: pip install openai langchain-openai llama-index-llms-openai instructor
"""

import json
from typing import Literal

import pytest

from pyggml import gguf
from pyggml.cli.commands.serve.reference import CHATS, RESPONSES

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]  # theirs
NAME = "gpt-4o-mini"  # LlamaIndex has a list of names
PLACE = {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}
PARAMETERS = {"type": "object", "properties": PLACE, "required": ["city"]}
PARAMETERS["additionalProperties"] = False
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
ASK = [{"role": "user", "content": "Is it warm?"}]
CITIES = {"Rome", "Oslo"}


@pytest.fixture(scope="module")
def base(serve, adapters, chatty, model_with):
    """Of a context that holds what the libraries say of tools: a byte is a token."""
    template = gguf.open(chatty).get("tokenizer.chat_template")
    path = model_with(tokenizer__chat_template=template, llama__context_length=4096)
    with serve(path, adapters={NAME: adapters["red"]}) as server:
        yield {"base_url": f"{server.url}/v1", "api_key": "none"}


@pytest.fixture
def client(base):
    return pytest.importorskip("openai").OpenAI(**base)


def test_openai_calls_tools(client):
    given = {"model": NAME, "messages": ASK, "tools": [TOOL], "tool_choice": "required"}
    given |= {"parallel_tool_calls": False, "seed": 1, "max_tokens": 400}
    (choice,) = client.chat.completions.create(**given).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in CITIES
    with client.chat.completions.stream(**given) as stream:
        for _ in stream:
            pass
        (told,) = stream.get_final_completion().choices[0].message.tool_calls
    assert told.function.arguments == call.function.arguments


def test_openai_parses_answers(client):
    pydantic = pytest.importorskip("pydantic")
    place = pydantic.create_model("Place", city=(Literal["Rome", "Oslo"], ...))
    answer = client.chat.completions.parse(
        model=NAME, messages=ASK, response_format=place, max_tokens=400
    )
    assert answer.choices[0].message.parsed.city in CITIES


def test_every_field_of_the_client_is_in_the_table():
    chats = pytest.importorskip("openai.types.chat.completion_create_params")
    from openai.types.responses import response_create_params as responses

    fields = {*chats.CompletionCreateParamsBase.__annotations__, "stream"}
    assert fields <= CHATS.fields
    fields = {*responses.ResponseCreateParamsBase.__annotations__, "stream"}
    assert fields <= RESPONSES.fields


def test_openai_responses(client):
    given = {"model": NAME, "input": "Is it warm?", "extra_body": {"seed": 1}}
    short = {"temperature": 0, "max_output_tokens": 12}
    answer = client.responses.create(**given, **short)
    parts = [*client.responses.create(**given, **short, stream=True)]
    deltas = "".join(p.delta for p in parts if p.type == "response.output_text.delta")
    assert deltas == answer.output_text == parts[-1].response.output_text
    assert answer.usage.total_tokens == parts[-1].response.usage.total_tokens
    given["max_output_tokens"] = 400
    tool = {"type": "function", "strict": True, **TOOL["function"]}
    calls = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(**given, **calls) as stream:
        (call,) = stream.get_final_response().output
    assert json.loads(call.arguments)["city"] in CITIES
    pydantic = pytest.importorskip("pydantic")
    place = pydantic.create_model("Place", city=(Literal["Rome", "Oslo"], ...))
    assert client.responses.parse(**given, text_format=place).output_parsed.city in CITIES


def test_langchain(base):
    chat = pytest.importorskip("langchain_openai").ChatOpenAI(
        model=NAME, max_tokens=400, temperature=1, **base
    )
    assert chat.invoke("a", max_tokens=5).content
    assert [part.content for part in chat.stream("a", max_tokens=5)]
    bound = chat.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = bound.invoke("a").tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in CITIES
    first, *others = bound.stream("a")
    (call,) = sum(others, first).tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in CITIES
    schema = {"title": "Place", "description": "d", **PARAMETERS}
    for method in ("function_calling", "json_schema"):
        value = chat.with_structured_output(schema, method=method).invoke("a")
        assert value["city"] in CITIES


def test_llama_index(base):
    library = pytest.importorskip("llama_index.llms.openai")
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    model = library.OpenAI(
        model=NAME, api_base=base["base_url"], api_key="none", max_tokens=400, strict=True
    )
    assert model.chat([ChatMessage(role="user", content="a")], max_tokens=5).message.content
    assert [part.delta for part in model.stream_chat([ChatMessage(content="a")], max_tokens=5)]

    def get_weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather."""
        return city

    tool = FunctionTool.from_defaults(get_weather)
    answer = model.chat_with_tools([tool], "a", tool_required=True, allow_parallel_tool_calls=False)
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_name == "get_weather" and call.tool_kwargs["city"] in CITIES


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(client, mode):
    instructor = pytest.importorskip("instructor")
    pydantic = pytest.importorskip("pydantic")
    closed = {"extra": "forbid"}  # else random weights write further fields without an end
    place = pydantic.create_model("Place", __config__=closed, city=(Literal["Rome", "Oslo"], ...))
    asking = instructor.from_openai(client, mode=instructor.Mode[mode])
    found = asking.chat.completions.create(
        model=NAME, messages=ASK, response_model=place, max_tokens=400, max_retries=0
    )
    assert found.city in CITIES
