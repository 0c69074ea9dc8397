"""Every word of a chat is in the text that is learned or read, or the chat is refused by name."""

import datetime
import json

import numpy as np
import pytest

from pyggml.chat import BUILT_IN, ChatEncoder, ChatTemplate, find_template
from pyggml.chat.messages import messages_of, tools_of
from pyggml.chat.words import flat
from pyggml.cli.commands.serve.limits import Limits
from pyggml.cli.commands.serve.params import read_chat
from pyggml.errors import TemplateError
from pyggml.generation import Sampling

from chats import assistant, user

REAL = (
    *("HuggingFaceTB-SmolLM3-3B", "LFM2.5-Instruct", "Qwen-Qwen2.5-7B-Instruct"),
    *("Qwen-Qwen3-0.6B", "google-gemma-2-2b-it", "ibm-granite-granite-3.3-2B-Instruct"),
    *("meta-llama-Llama-3.1-8B-Instruct", "microsoft-Phi-3.5-mini-instruct"),
    "mistralai-Mistral-Nemo-Instruct-2407",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "zqsky",
            "description": "zqabout",
            "parameters": {"type": "object", "properties": {"zqtown": {"type": "string"}}},
        },
    }
]


def called(*towns, **more):
    """A message with calls, their arguments the text that the API has."""
    calls = [
        {
            "id": f"abcdef12{i}",
            "type": "function",
            "function": {"name": "zqsky", "arguments": json.dumps({"zqtown": town})},
        }
        for i, town in enumerate(towns)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls} | more


def result(text, i=0):
    return {"role": "tool", "content": text, "tool_call_id": f"abcdef12{i}", "name": "zqsky"}


def system(text, role="system"):
    return {"role": role, "content": text}


ASKED, END = user("zqask"), [assistant("zqsaid"), user("zqmore"), assistant("zqlast")]
CALL = ("zqask", "zqsky", "zqtown", "zqOslo", "zqsaid")
CHATS = {
    "answers": ([ASKED, *END], None, ("zqask", "zqsaid", "zqmore", "zqlast")),
    "system": ([system("zqrule"), ASKED, *END], None, ("zqrule", "zqask", "zqlast")),
    "two systems": ([system("zqrule"), system("zqnext"), ASKED, *END], None, ("zqrule", "zqnext")),
    "late system": ([ASKED, *END[:1], system("zqlate"), *END[1:]], None, ("zqlate", "zqlast")),
    "developer": ([system("zqrule", "developer"), ASKED, *END], None, ("zqrule", "zqask")),
    "parts": ([user([{"type": "text", "text": "zqone"}, {"type": "text", "text": " zqtwo"}]), *END],
              None, ("zqone zqtwo", "zqsaid")),
    "call": ([ASKED, called("zqOslo"), result("zqgrey"), *END], TOOLS, (*CALL, "zqgrey")),
    "JSON": ([ASKED, called('zq"Oslo'), result('{"zqt": "<12>\n"}'), *END], TOOLS,
             ("zqsky", flat('zq"Oslo'), flat('{"zqt": "<12>\n"}'))),
    "content beside a call": ([ASKED, called("zqOslo", content="zqlook"), result("zqgrey"), *END],
                              TOOLS, (*CALL, "zqlook", "zqgrey")),
    "two calls": ([ASKED, called("zqOslo", "zqRome"), result("zqgrey"), result("zqblue", 1), *END],
                  TOOLS, (*CALL, "zqRome", "zqgrey", "zqblue")),
    "function_call": ([ASKED, assistant("", function_call={"name": "zqsky", "arguments":
                       '{"zqtown": "zqOslo"}'}), {"role": "function", "name": "zqsky", "content":
                       "zqgrey"}, *END], TOOLS, (*CALL, "zqgrey")),
    "thought": ([ASKED, *END[:2], assistant("zqlast", reasoning_content="zqthink")], None,
                ("zqthink", "zqlast")),
    "thought in content": ([ASKED, assistant("<think>\nzqthink\n</think>\n\nzqlast")], None,
                           ("zqthink", "zqlast")),
    "refusal": ([ASKED, assistant("zqsaid", refusal="zqnever"), *END[1:]], None, ("zqnever",)),
    "plan": ([ASKED, called("zqOslo", tool_plan="zqplan"), result("zqgrey"), *END], TOOLS,
             (*CALL, "zqplan")),
    "results in parts": ([ASKED, called("zqOslo"), result([{"type": "text", "text": "zqgrey"}]),
                          *END], TOOLS, (*CALL, "zqgrey")),
    "tools unused": ([ASKED, *END], TOOLS, ("zqsky", "zqabout", "zqtown", "zqsaid")),
    "thought and call": ([ASKED, called("zqOslo", reasoning_content="zqthink"), result("zqgrey"),
                          *END[:1]], TOOLS, (*CALL, "zqgrey")),
    "twice the same": ([system("zqsame"), user("zqsame"), assistant("zqsame"), system("zqsame"),
                        user("zqsame"), assistant("zqsame")], None, ("zqsame",) * 6),
}  # fmt: skip
REFUSED = ("leaves out", "has no place", "the chat template says", "the chat template fails")


@pytest.fixture(scope="module")
def templates(shared):
    def make(name):
        source = (shared / f"templates/{name}.jinja").read_text("utf-8")
        return ChatTemplate(source, name, {"bos_token": "<s>", "eos_token": "</s>"})

    return {name: make(name) for name in REAL}


def check(template, tokenizer, name):
    """Which ways of a chat were taken: training, a server's prompt, a chat's, a text to go on."""
    chat, tools, words = CHATS[name]
    messages, tools = messages_of(chat)[0], tools_of(tools)
    given = {"messages": chat[:-1], **({"tools": [*tools]} if tools else {})}
    served = read_chat(given, Sampling(), Limits())
    encoder, taken = ChatEncoder(template, tokenizer), []
    try:
        found = encoder(messages, tools)
    except TemplateError as error:
        assert any(reason in str(error) for reason in REFUSED), error
    else:
        taken.append("training")
        text = flat(found.text)
        assert all(text.count(word) >= words.count(word) for word in words)
        learned = tokenizer.decode(np.array(found.ids)[found.trained].tolist(), special=True)
        assert not any(word in learned for word in ("zqask", "zqrule", "zqlate", "zqgrey"))
    try:
        ids = encoder.prompt(served.messages, served.tools)
    except TemplateError as error:
        assert any(reason in str(error) for reason in REFUSED), error
        return taken
    assert ids == encoder.prompt(messages[:-1], tools)
    text = template.render(messages[:-1], tools, add_generation_prompt=True)
    assert tokenizer.encode_prompt(text) == ids
    if "training" in taken and found.text.startswith(text):
        assert found.ids[: len(ids)] == ids
    return [*taken, "prompt"]


@pytest.mark.quick
@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("name", CHATS)
def test_the_words_of_chats_are_in_their_texts_or_missed(name, add_bos, vocabulary):
    tokenizer = vocabulary(add_bos=add_bos)
    ways = [check(find_template(tokenizer, built_in), tokenizer, name) for built_in in BUILT_IN]
    needs = name in (
        "thought",
        "refusal",
        "two systems",
        "late system",
        "twice the same",
    )
    assert any(ways) or needs or CHATS[name][1]


@pytest.mark.parametrize("name", CHATS)
def test_so_are_those_of_real_templates(name, templates, vocabulary):
    ways = [check(template, vocabulary(), name) for template in templates.values()]
    assert any("training" in way for way in ways) == (name not in ("refusal", "plan"))


DEVELOPERS = (
    "{% for m in messages %}{% if m.role == 'developer' %}[{{ m.content }}]"
    "{% else %}<{{ m.content }}>{% endif %}</s>{% endfor %}"
)
SYSTEMS = ("system", "two systems", "late system", "twice the same")


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_developer_is_a_system_where_the_template_knows_none(name, templates, vocabulary):
    """OpenAI's newer name of the role, in every template at hand: the same tokens, or the same
    complaint."""
    tokenizer = vocabulary()
    built_in = {name: find_template(tokenizer, name) for name in BUILT_IN}
    chat = messages_of(CHATS[name][0])[0][:-1]
    newer = [m | {"role": "developer"} if m["role"] == "system" else m for m in chat]
    for template in (built_in | templates).values():
        encoder = ChatEncoder(template, tokenizer)
        assert template.knows_developers == ("'developer'" in template.source.replace('"', "'"))
        if not template.knows_developers:
            assert said_of(encoder, newer) == said_of(encoder, chat)
    knows = ChatTemplate(DEVELOPERS, "t")
    assert knows.render([system("a"), system("b", "developer")]) == "<a></s>[b]</s>"


def said_of(encoder, chat):
    """The tokens of a chat, or what the template says of it."""
    try:
        return encoder.prompt(chat)
    except TemplateError as error:
        return str(error)


LEFT_OUT = {
    "late system": ("alpaca", "leaves out message 3"),
    "refusal": ("gemma", "leaves out the refusal of message 2"),
    "twice the same": ("alpaca", "leaves out message 4"),
    "two systems": ("alpaca", "leaves out message 1"),
    "thought": ("gemma", "leaves out the thought of message 4, for which the templates chatml and"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_named(name, vocabulary):
    template, message = LEFT_OUT[name]
    messages, _ = messages_of(CHATS[name][0])
    with pytest.raises(TemplateError, match=message):
        ChatEncoder(find_template(vocabulary(), template), vocabulary())(messages)


ALONE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls and m.content is none %}"
    "{% for c in m.tool_calls %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}</s>{% endfor %}"
)


@pytest.mark.quick
def test_calls_have_the_form_that_a_template_was_written_for(vocabulary):
    """Arguments as a text, beside a content that is null: as DeepSeek's templates want them."""
    encoder = ChatEncoder(ChatTemplate(ALONE, "t"), vocabulary())
    chat = [user("a"), called("Oslo"), result("grey"), assistant("b")]
    assert '[assistant]zqsky {"zqtown": "Oslo"}</s>' in encoder(messages_of(chat)[0]).text
    chat[1]["content"] = "look"
    with pytest.raises(TemplateError, match="leaves out a call of message 2, 'Oslo'"):
        encoder(messages_of(chat)[0])
    walked = ALONE.replace(
        "c.function.name + ' ' + c.function.arguments",
        "c.function.arguments.items() | map('join', '=') | join",
    ).replace("m.content is none", "m.content == ''")
    text = ChatTemplate(walked, "t").render(messages_of([user("a"), called("Oslo")])[0])
    assert "zqtown=Oslo" not in text or "zqsky" not in text


@pytest.mark.quick
def test_a_call_without_a_word_is_not_taken_for_another(vocabulary):
    """The name of a lost call stands elsewhere in the text, and so does its argument."""
    source = "{% for m in messages %}{{ m.content }}{{ m.tool_calls and '' }}</s>{% endfor %}"
    chat = messages_of([user("zqsky zqtown Oslo"), called("Oslo"), result("1"), assistant("b")])[0]
    with pytest.raises(TemplateError, match="leaves out a call of message 2"):
        ChatEncoder(ChatTemplate(source, "t"), vocabulary())(chat)


@pytest.mark.quick
def test_what_is_escaped_is_there():
    texts = ('a "b" \\ c\n\td', "<é> & 'x'", "👋 \\u00e9", "\\nabla")
    for text in texts:
        for escaped in (json.dumps(text), json.dumps(text, ensure_ascii=False), repr(text)):
            assert flat(text) in flat(f"x{escaped}y")
            assert flat(text) in flat(json.dumps(escaped))
    assert flat("a<b") in flat("a&lt;b") and flat("ab") not in flat("a-b")


@pytest.mark.quick
def test_chats_with_tools_have_the_template_for_them(vocabulary):
    plain = "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    tokenizer = vocabulary(template=plain, tool_use="{{ tools | tojson }}" + plain)
    encoder = ChatEncoder(find_template(tokenizer), tokenizer)
    assert tokenizer.decode(encoder.prompt([user("a")], TOOLS), special=True).startswith("[{")
    assert tokenizer.decode(encoder.prompt([user("a")]), special=True).startswith("user:a")


@pytest.mark.quick
def test_a_prompt_begins_with_one_bos_and_ends_where_it_ends(vocabulary):
    tokenizer = vocabulary(add_bos=True)
    assert tokenizer.encode_prompt("<s>a") == tokenizer.encode_prompt("a")
    assert tokenizer.encode_prompt("a") == tokenizer.encode("a")
    assert vocabulary().encode_prompt("a") == vocabulary().encode("a")


def test_gemma_4_learns_its_calls_and_not_their_results(shared):
    from pyggml.tokenizer import from_gguf

    tokenizer = from_gguf(shared / "vocab/ggml-vocab-gemma-4.gguf")
    template = find_template(tokenizer, today=datetime.date(2025, 1, 31))
    chat = messages_of([ASKED, called("zqOslo"), result("zqgrey"), *END])[0]
    found = ChatEncoder(template, tokenizer)(chat, tools_of(TOOLS))
    learned = tokenizer.decode(np.array(found.ids)[found.trained].tolist(), special=True)
    assert 'call:zqsky{zqtown:<|"|>zqOslo<|"|>}<tool_call|>' in learned and "zqsaid" in learned
    assert "zqgrey" not in learned and "response:" not in learned


@pytest.mark.quick
def test_a_template_gets_further_inputs_that_it_reads(vocabulary):
    source = (
        "{% if thinks is not defined %}{% set thinks = 'yes' %}{% endif %}"
        "{{ thinks }}{% for m in messages %}:{{ m.content }}</s>{% endfor %}"
    )
    tokenizer = vocabulary(template=source, tool_use="{{ tools | tojson }}" + source)
    encoder = ChatEncoder(find_template(tokenizer, names='{"thinks": "no"}'), tokenizer)
    assert encoder([user("a"), assistant("b")]).text == "no:a</s>:b</s>"
    assert encoder.prompt([user("a")], TOOLS) != encoder.with_names({"thinks": "so"}).prompt(
        [user("a")], TOOLS
    )
    for name, message in {"thoughts": "does not read", "tools": "cannot be set"}.items():
        with pytest.raises(TemplateError, match=message):
            encoder.with_names({name: 1})
    with pytest.raises(TemplateError, match="no JSON object"):
        find_template(tokenizer, names="[]")
    given = {"messages": [user("a")], "chat_template_kwargs": {"thinks": "no"}}
    asked = read_chat(given | {"enable_thinking": False}, Sampling(), Limits())
    assert asked.names == {"thinks": "no", "enable_thinking": False}


@pytest.mark.quick
def test_a_template_for_lists_of_parts_gets_them(vocabulary):
    source = (
        "{% for m in messages %}{{ m.role }}{% for part in m.content if part.type == 'text' %}"
        ":{{ part.text }}{% endfor %}</s>{% endfor %}"
    )
    encoder = ChatEncoder(ChatTemplate(source, "t"), vocabulary())
    assert encoder([user("a"), assistant("b")]).text == "user:a</s>assistant:b</s>"
    words = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", "t")
    assert words.render([user("text")]) == "text"
