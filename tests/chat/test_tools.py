"""Calls of tools as models write them: found by a template's probe, read, and held to a grammar."""

import json
from functools import partial

import pytest

from pyggml.chat import ChatTemplate
from pyggml.chat.tools import SYNTAXES, AnswerReader, find_calls, find_thought, is_opened

import chats

FAMILIES = {  # template: its family, and whether an answer may have several calls
    "meta-llama-Llama-3.1-8B-Instruct": ("Llama 3.1", False),
    "Qwen-Qwen2.5-7B-Instruct": ("Hermes", True),
    "Qwen-Qwen3-0.6B": ("Hermes", True),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("Hermes", True),
    "Qwen3-Coder": ("Qwen 3 Coder", True),
    "mistralai-Mistral-Nemo-Instruct-2407": ("Mistral 7B", True),
    "Mistral-Small-3.2-24B-Instruct-2506": ("Mistral Small", True),
    "ibm-granite-granite-3.3-2B-Instruct": ("Granite 3", True),
    "ibm-granite-granite-4.0": ("Hermes", True),
    "google-gemma-4-31B-it": ("Gemma 4", True),
    "openai-gpt-oss-120b": ("gpt-oss", False),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("DeepSeek R1", True),
    "deepseek-ai-DeepSeek-V3.1": ("DeepSeek V3.1", True),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("Command R,", True),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("Command R7B", True),
    "moonshotai-Kimi-K2": ("Kimi", True),
    "LFM2.5-8B-A1B": ("LFM2", True),
}
SHOW_NO_CALL = ("ibm-granite-granite-3.3-2B-Instruct",)
ARGUMENTS = {"city": 'Zürich } "<b>"\n\\x', "days": {"n": [-2.5, 1], "m": None}, "all": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "days": {
                    "type": "object",
                    "additionalProperties": {"type": "number"},
                    "description": "When.",
                },
                "all": {"type": "boolean", "description": "Whether."},
            },
            "required": ["city"],
        },
    },
}
ASK = chats.user("What is the weather?")


@pytest.fixture(scope="module")
def of_family(shared):
    """The template of a real model by its name, and how it writes calls."""

    def make(name):
        path = chats.GOLDEN / f"templates/{name}.jinja"
        path = path if path.exists() else shared / f"templates/{name}.jinja"
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        template = ChatTemplate(path.read_text("utf-8"), name, names, chats.DAY)
        return template, find_calls(template)

    return make


def call(arguments=ARGUMENTS, id="abcdefgh1"):
    return {
        "id": id,
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }


def read(reader, text, n=None):
    """Reasoning, content and calls of an answer that comes n characters at a time."""
    said = []
    for at in range(0, len(text), n or max(len(text), 1)):
        said += reader.feed(text[at : at + (n or len(text))])
    said += reader.finish()
    calls = []
    for part in said:
        if part.call is not None:
            calls += [[part.name, ""]] if part.call == len(calls) else []
            calls[part.call][1] += part.arguments
    thought = "".join(part.reasoning for part in said)
    return thought, "".join(part.content for part in said), [tuple(c) for c in calls]


def reads(reader, text):
    """What a reader makes of an answer: the same however it comes."""
    results = [read(reader(), text, n) for n in (None, 1, 3, 7)]
    assert all(result == results[0] for result in results), results
    return results[0]


def reader_of(syntax, thought=None, is_open=False, tools=(TOOL,)):
    return lambda: AnswerReader(syntax, tools, thought, is_open)


def of(family):
    return next(syntax for syntax in SYNTAXES if syntax.family.startswith(family))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_writes_calls_of_its_family(name, of_family):
    _, found = of_family(name)
    family, several = FAMILIES[name]
    assert found.syntax.family.startswith(family) and found.several == several


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in SHOW_NO_CALL])
def test_what_a_template_writes_is_read(name, of_family):
    """One call, and several, with the answer's heading before and its end behind."""
    template, found = of_family(name)
    for n in (1, 2) if found.several else (1,):
        calls = [call(id=f"abcdefgh{i}") for i in range(n)]
        chat = [ASK, {"role": "assistant", "content": "", "tool_calls": calls}]
        text, prompt = template.render(chat, [TOOL]), template.render([ASK], [TOOL], None, True)
        n_same = len(prompt) if text.startswith(prompt) else text.rindex("weather?") + 8
        answer = text[n_same:]
        if found.syntax.is_bare:
            answer = answer[answer.index("{") :]
        _, _, read_calls = reads(reader_of(found.syntax), answer)
        assert [(name, json.loads(text)) for name, text in read_calls] == [
            ("get_weather", ARGUMENTS)
        ] * n


W = '{"city": "Rome"}'
O = '{"name": "get_weather", "arguments": {"city": "Rome"}}'  # noqa: E741
ONE = [("get_weather", W)]
CASES = [  # family, answer, what is said, the calls
    ("Hermes", f"Let me see.\n<tool_call>\n{O}\n</tool_call>", "Let me see.", ONE),
    ("Hermes", f"<tool_call>{O}</tool_call> <tool_call>{O}</tool_call>", "", ONE * 2),
    ("Hermes", f"<tool_call>\n{O}\n</tool_call>\nThat was it.", "That was it.", ONE),
    ("Hermes", f"<tool_call>\n{O}", "", ONE),
    ("Hermes", "A <tool_call> is a tag.", "A <tool_call> is a tag.", []),
    ("Hermes", "<tool_call>\n{nothing}\n</tool_call>", "<tool_call>\n{nothing}\n</tool_call>", []),
    ("Hermes", "a < b, <tool", "a < b, <tool", []),
    (
        "Hermes",
        '<tool_call>{"arguments": {"city": "Rome"}, "name": "get_weather"}</tool_call>',
        "",
        ONE,
    ),
    (
        "Hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>',
        "",
        ONE,
    ),
    ("Hermes", '<tool_call>{"name": "get_weather"}</tool_call>', "", [("get_weather", "{}")]),
    (
        "Hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Ro',
        "",
        [("get_weather", '{"city": "Ro')],
    ),
    ("Llama", '{"name": "get_weather", "parameters": {"city": "Rome"}}', "", ONE),
    ("Llama", f"<|python_tag|>{O}", "", ONE),
    ("Llama", f"{O}; {O}", "", ONE * 2),
    ("Llama", f'{{"type": "function", {O[1:]}', "", ONE),
    ("Llama", '{"name": "Rome", "parameters": {"a": 1}}', "", []),
    ("Llama", '{"city": "Rome"}', '{"city": "Rome"}', []),
    ("Llama", '{"name": "Ann", "age": 7} is JSON', '{"name": "Ann", "age": 7} is JSON', []),
    ("Llama", "Set {1, 2} and {", "Set {1, 2} and {", []),
    ("Mistral 7B", f"[TOOL_CALLS] [{O}, {O}]", "", ONE * 2),
    ("Mistral 7B", f'[TOOL_CALLS][{O[:-1]}, "id": "a}}b"}}]', "", ONE),
    ("Mistral Small", f"[TOOL_CALLS]get_weather[CALL_ID]x1y2z3[ARGS]{W}", "", ONE),
    ("Granite 3", f"<|tool_call|>[{O}]", "", ONE),
    (
        "Command R7B",
        '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "get_weather", '
        '"parameters": {"city": "Rome"}}\n]<|END_ACTION|>',
        "",
        ONE,
    ),
    ("Gemma 4", '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>', "", ONE),
    ("gpt-oss", f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{W}",
     "", ONE),
    ("gpt-oss", f" to=functions.get_weather<|channel|>commentary json<|message|>{W}<|call|>", "",
     ONE),
    ("DeepSeek V3.1", f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{W}<｜tool▁call▁end｜>", "",
     ONE),
    ("LFM2", "<|tool_call_start|>[get_weather(city='Rome')]<|tool_call_end|>Soon.", "Soon.", ONE),
    ("Qwen 3 Coder", "Well.\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
     "</function>\n</tool_call>", "Well.", ONE),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("family", "answer", "content", "calls"), CASES)
def test_answers(family, answer, content, calls):
    if (family, calls) == ("Llama", []):
        content = answer
    assert reads(reader_of(of(family)), answer) == ("", content, calls)


def test_arguments_come_as_they_are_written():
    reader = AnswerReader(of("Hermes"), [TOOL])
    [name, first] = reader.feed('<tool_call>\n{"name": "get_weather", "arguments": {"ci')
    assert (name.name, first.arguments) == ("get_weather", '{"ci')
    assert [part.arguments for part in reader.feed('ty": "Ro')] == ['ty": "Ro']


def test_without_tools_a_text_stays_as_it_is():
    for text in (" \n<tool_call>{}\n ", "{}", "  "):
        assert reads(reader_of(None), text) == ("", text, [])


# -- thoughts -----------------------------------------------------------------------------------


THINK = find_thought("{{ '<think>' }}")
CALL = f"<tool_call>\n{O}\n</tool_call>"
HARMONY = find_thought("<|channel|>analysis<|message|>")
THOUGHTS = [  # an answer, whether the prompt opened a thought; reasoning, content, calls
    ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes.", []),
    ("Hm.\n</think>\n\nYes.\n", True, "Hm.", "Yes.\n", []),
    ("\nHm. ", True, "Hm.", "", []),
    ("What <think> is </think> is this.", False, "", "What <think> is </think> is this.", []),
    (f"<think>\n\n</think>\n\n{CALL}", False, "", "", ONE),
    (f"<think>I call.</think>Now. {CALL}", False, "I call.", "Now.", ONE),
    # A model may forget to end its thought, and may think about the mark of a call.
    (f"I must call.\n{CALL}", True, "I must call.", "", ONE),
    (f"Not {CALL} yet.</think>So.", True, f"Not {CALL} yet.", "So.", []),
    (f"<think>One.</think>{CALL}<think>Two.</think>{CALL}", False, "One.Two.", "", ONE * 2),
]


@pytest.mark.quick
@pytest.mark.parametrize(("answer", "is_open", "reasoning", "content", "calls"), THOUGHTS)
def test_thoughts(answer, is_open, reasoning, content, calls):
    found = reads(reader_of(of("Hermes"), THINK, is_open), answer)
    assert found == (reasoning, content, calls)


def test_channels():
    call = f"<|start|>assistant<|channel|>commentary to=functions.get_weather<|message|>{W}"
    analysis = "<|channel|>analysis<|message|>Hm.<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>Yes."
    reader = reader_of(of("gpt-oss"), HARMONY)
    assert reads(reader, analysis + final) == ("Hm.", "Yes.", [])
    assert reads(reader, analysis + call) == ("Hm.", "", ONE)
    preamble = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    assert reads(reader, analysis + preamble + call) == ("Hm.", "I look.", ONE)


@pytest.mark.parametrize(
    ("name", "opening"),
    [
        ("Qwen-Qwen3-0.6B", "<think>"),
        ("openai-gpt-oss-120b", "<|channel|>analysis<|message|>"),
        ("google-gemma-4-31B-it", "<|channel>thought\n"),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "<|START_THINKING|>"),
        ("Qwen-Qwen2.5-7B-Instruct", None),
    ],
)
def test_a_template_has_its_marks_of_thoughts(name, opening, of_family):
    thought = find_thought(of_family(name)[0].source)
    assert (thought and thought.open) == opening
    assert is_opened(f"…{opening}\n", thought) == (opening is not None)


# -- faults that others had ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Rome"}}',
        '{"name": "get_weather", "parameters": {"city": "Rome"}, "type": "function"}',
        '{"parameters": {"city": "Rome"}, "type": "function", "name": "get_weather"}',
        '{"type": "function", "function": "get_weather", "parameters": {"city": "Rome"}}',
        '{"type": "function", "function": {"name": "get_weather", "parameters": {"city": "Rome"}}}',
    ],
)
def test_a_call_s_object_may_say_its_type_anywhere(call):
    """llama.cpp 24329: of Llama 3.3 the answer came back empty, without an error."""
    assert reads(reader_of(of("Llama")), call) == ("", "", ONE)
    broken = call.replace('"get_weather"', "get_weather")
    assert reads(reader_of(of("Llama")), broken) == ("", broken, [])


LOGIN = {"password": {"type": "string"}, "password_file": {"type": "string"}}
LOGIN = {"type": "function", "function": {"name": "login", "parameters": {"properties": LOGIN}}}


def test_a_name_that_begins_as_another_and_calls_without_a_mark():
    """llama.cpp 23838, mended in 26960: an argument was taken for a shorter one; 24071:
    LFM2.5 may leave the mark out, and brackets in text are no calls."""
    calls = [("login", '{"password_file": "a", "password": "b"}')]
    for found in (
        "<|tool_call_start|>[login(password_file='a', password='b')]<|tool_call_end|>",
        "[login(password_file='a', password='b')]",
        "login(password_file='a', password='b')",
    ):
        result = reads(reader_of(of("LFM2"), tools=[TOOL, LOGIN]), found)
        assert result == (("", "", calls) if found[0] in "<[" else ("", found, []))
    text = "items = [1, [2]]; [x(1)]"
    assert reads(reader_of(of("LFM2"), tools=[TOOL, LOGIN]), text) == ("", text, [])


def test_a_tag_that_is_closed_twice_and_a_call_that_is_broken():
    """llama.cpp 24807: the call was dropped, and the stream cut off. Broken arguments end where
    their call does, however they come."""
    city = "<parameter=city>\n007\n</parameter>\n"
    head, end = "<tool_call>\n<function=get_weather>\n", "</function>\n</tool_call>\n"
    text = (
        head + city + "</parameter>\n" + end + head + "<city>007</city>\n" + end + head + city + end
    )
    _, content, calls = reads(reader_of(of("Qwen 3 Coder")), text)
    good, bad = ("get_weather", '{"city": "007"}'), "<city>007</city>\n</function>"
    assert (content, calls) == ("", [good, ("get_weather", bad), good])


def test_calls_as_lfm2_documents_them():
    """llama.cpp 23838: the documented form, with text around it, was a fault of the server; 24667:
    what a text escapes was escaped twice."""
    found = "<|tool_call_start|>[search(query='weather in Mexico City', n=5)]<|tool_call_end|>"
    _, content, calls = reads(reader_of(of("LFM2")), f"I look.\n{found}")
    assert content == "I look."
    assert calls == [("search", '{"query": "weather in Mexico City", "n": 5}')]
    found = "<|tool_call_start|>[python(code=\"print('a')\\nprint('b')\")]<|tool_call_end|>"
    _, _, [(_, arguments)] = reads(reader_of(of("LFM2")), found)
    assert json.loads(arguments) == {"code": "print('a')\nprint('b')"}


def test_parameters_in_another_order_than_the_schema_and_code_in_them():
    """llama.cpp 27363, 24644: calls were dropped, or a fault, where optional ones came first, and
    where one held braces or tags."""
    code = 'if a < b {\n    "</div>"\n}\n'
    text = (
        "<tool_call>\n<function=write>\n<parameter=content>\n" + code + "\n</parameter>\n"
        "<parameter=path>\n/tmp/a\n</parameter>\n</function>\n</tool_call>"
    )
    properties = {"path": {"type": "string"}, "content": {"type": "string"}}
    about = {"name": "write", "parameters": {"type": "object", "properties": properties}}
    reader = reader_of(of("Qwen 3 Coder"), tools=[{"type": "function", "function": about}])
    _, content, [(name, arguments)] = reads(reader, text)
    assert (name, json.loads(arguments)) == ("write", {"content": code, "path": "/tmp/a"})
    assert not content


@pytest.mark.parametrize("word", ["a: \\u00e9", "}", '\\"', "{", "\\\\", "</tool_call>", "[x]"])
def test_no_text_of_an_argument_ends_it(word):
    """llama.cpp 16465, ollama 12017: a colon with an escape, a brace, the end's own mark."""
    arguments = f'{{"city": "{word}"}}'
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    assert reads(reader_of(of("Hermes")), text * 2)[2] == [("get_weather", arguments)] * 2


def test_of_calls_alone_what_was_cut_off_before_its_arguments_is_no_content():
    text = f"\n\n{CALL}\n<tool_call>\n{{ "
    reader = partial(AnswerReader, of("Hermes"), [TOOL], THINK, calls_alone=True)
    assert reads(reader, text) == ("", "", ONE)
    assert reads(reader, f"<think>Hm.</think>{text}") == ("Hm.", "", ONE)
    assert "tool_call" in reads(reader_of(of("Hermes")), text)[1]


def test_a_value_out_of_place_is_no_fault():
    """llama.cpp 22072, 23516: broken arguments ended the answer with a fault of the server."""
    broken = '{"name": "get_weather", "arguments": {\'city\': \'Rome\'}}'
    _, _, [(_, arguments)] = reads(reader_of(of("Hermes")), f"<tool_call>\n{broken}\n</tool_call>")
    assert arguments == "{'city': 'Rome'}"
    for text in ("</tool_call>", "<tool_call>\n</tool_call>", "<tool_call>", "<function=", "[]"):
        for family in ("Hermes", "Qwen 3 Coder", "Llama"):
            assert reads(reader_of(of(family)), text) == ("", text, [])
