"""Drawn chats as transformers renders them, in every template of ../shared and of CHAT_TEMPLATES.

CHAT_TEMPLATES names a folder of *.jinja, such as models/templates of llama.cpp.
"""

import datetime
import json
import os
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from extras import need
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyggml.chat import ChatTemplate
from pyggml.chat.answers import find_answers
from pyggml.errors import TemplateError

import chats

pytestmark = pytest.mark.interop
SOME = settings(
    max_examples=settings.default.max_examples // 5, suppress_health_check=list(HealthCheck)
)
FOLDERS = [Path(__file__).parents[2] / "../shared/templates", os.environ.get("CHAT_TEMPLATES")]
TEMPLATES = [path for folder in FOLDERS if folder for path in sorted(Path(folder).glob("*.jinja"))]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}

# How turns end in templates of llama.cpp's folder whose end is none of the usual names.
ENDS = {
    "Apertus-8B-Instruct": "<|assistant_end|>",
    "Apriel-1.6-15b-Thinker-fixed": "\n<|end|>",
    "ByteDance-Seed-OSS": "<seed:eos>",
    "Cohere2MoE": "<|END_TEXT|><|END_OF_TURN_TOKEN|>",
    "MiniMax-M2": "[e~[\n",
    "StepFun3.5-Flash": "<|im_end|>\n",
    "inclusionai-ling-3.0-flash": "<|role_end|>",
    "muse-glimmer": "<|eot|>",
    "tencent-Hy3": "<｜hy_eos:opensource｜>",
}

WORDS = st.text(st.sampled_from("ab7 \n'\"\\<>&{}%|`é世🙂\u2028"), min_size=1, max_size=12)
NAME = st.sampled_from(["weather", "get_time", "f"])
VALUES = st.one_of(WORDS, st.integers(-99, 99), st.booleans(), st.lists(WORDS, max_size=2))
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "n", "all"]), VALUES, max_size=3)


def called(name, arguments):
    return {
        "type": "function",
        "id": "abc123xyz",
        "function": {"name": name, "arguments": arguments},
    }


def tool(name, description):
    properties = {"city": {"type": "string", "description": description}}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


@st.composite
def a_chat(draw):
    """The arguments of a rendering: rounds of a chat, some with thoughts, tools and results."""
    tools = draw(st.none() | st.lists(st.builds(tool, NAME, WORDS), min_size=1, max_size=2))
    messages = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(chats.user(draw(WORDS)))
        if tools and draw(st.booleans()):
            call = called(draw(NAME), draw(ARGUMENTS))
            messages.append(chats.assistant("", tool_calls=[call]))
            result = {"role": "tool", "content": draw(WORDS), "tool_call_id": call["id"]}
            messages.append(result | {"name": call["function"]["name"]})
        thought = {"reasoning_content": draw(WORDS)} if draw(st.booleans()) else {}
        messages.append(chats.assistant(draw(WORDS), **thought))
    asked = draw(st.booleans())
    return {"messages": messages[:-1] if asked else messages, "tools": tools, "asked": asked}


def forms(messages):
    """The ways in which templates read calls: arguments as objects or text, content "" or null."""
    for write, content in product((dict, partial(json.dumps, ensure_ascii=False)), ("", None)):
        yield [
            m | {"content": content, "tool_calls": [rewritten(c, write) for c in m["tool_calls"]]}
            if "tool_calls" in m
            else m
            for m in messages
        ]


def rewritten(call, write):
    name, arguments = call["function"].values()
    return called(name, write(arguments))


class Date(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(*chats.DAY.timetuple()[:3])


@pytest.fixture(scope="module")
def theirs():
    """theirs(source, chat): transformers' text, or None where the template refuses the chat."""
    utils = need("transformers.utils.chat_template_utils")

    def render(source, chat):
        try:
            texts, _ = utils.render_jinja_template(
                [chat["messages"]], chat["tools"], chat_template=source,
                add_generation_prompt=chat["asked"], **NAMES,
            )  # fmt: skip
        except Exception:  # whatever Jinja2 raises, which is whatever Python does
            return None
        return texts[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "datetime", Date)
        yield render


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
@SOME
@given(chat=a_chat())
def test_drawn_chats(path, theirs, chat):
    """Of the forms of calls, pyggml gives a template the one that it was written for."""
    source = path.read_text("utf-8")
    wanted = [theirs(source, chat | {"messages": form}) for form in forms(chat["messages"])]
    refused = [None] * len(wanted)
    try:
        template = ChatTemplate(source, path.stem, NAMES, chats.DAY)
        found = template.render(chat["messages"], chat["tools"], None, chat["asked"])
    except TemplateError as error:
        assert wanted == refused, error
    else:
        assert found in wanted or wanted == refused


@pytest.mark.parametrize("path", [p for p in TEMPLATES if p.stem in ENDS], ids=lambda p: p.stem)
def test_turns_end_as_the_models_end_them(path):
    messages = [chats.user("1 < 2"), chats.assistant("Yes."), chats.user("Why?")]
    template = ChatTemplate(path.read_text("utf-8"), path.stem, NAMES, chats.DAY)
    text, found = find_answers(template, [*messages, chats.assistant("So.")])
    (_, first), (_, last) = found
    assert [text[a.start : a.end] for a in (first, last)] == ["Yes.", "So."]
    assert text[first.end : first.limit] == ENDS[path.stem]
