"""Templates give the text that transformers gives; hostile ones are stopped."""

import json
import time
import tracemalloc

import pytest
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pyggml import gguf
from pyggml.chat import (
    BUILT_IN,
    ChatTemplate,
    carried_metadata,
    find_template,
    template_file,
    template_metadata,
    write_alike,
)
from pyggml.chat.sandbox import Sandbox
from pyggml.errors import TemplateError

from chats import DAY, GOLDEN, assistant, user

TEXTS = json.loads((GOLDEN / "templates.json").read_text("utf-8"))


@pytest.mark.parametrize("model", TEXTS)
def test_the_text_is_that_of_transformers(model, template, conversations):
    for name, text in TEXTS[model].items():
        given = conversations[name]
        messages, rest = (
            given["conversation"],
            {k: given[k] for k in given.keys() - {"conversation"}},
        )
        if text is None:
            with pytest.raises(TemplateError, match="the chat template says: "):
                template(model).render(messages, **rest)
        else:
            assert template(model).render(messages, **rest) == text, name


SYSTEM = {"role": "system", "content": "Be kind."}
MESSAGES = [SYSTEM, user("Hi"), assistant("Hello"), user("Bye")]
IN_WORDS = "Below is an instruction that describes a task"
BUILT = {
    "chatml": "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    "<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<s><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    "Hello<end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    "mistral": "<s>[INST] Be kind.\n\nHi[/INST] Hello</s>[INST] Bye[/INST]",
    "phi3": "<|system|>\nBe kind.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n"
    "<|user|>\nBye<|end|>\n<|assistant|>\n",
    "alpaca": "<s>Be kind.\n\n### Instruction:\nHi\n\n### Response:\nHello</s>\n\n"
    "### Instruction:\nBye\n\n### Response:\n",
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_templates(name, vocabulary):
    found = find_template(vocabulary(), name)
    assert found.render(MESSAGES, add_generation_prompt=True) == BUILT[name]
    whole = found.render(MESSAGES[:3])
    assert BUILT[name].startswith(whole)


def test_an_alpaca_row_has_alpaca_s_words(vocabulary):
    found = find_template(vocabulary(), "alpaca")
    row = {"role": "user", "content": "Add\n\n1 2", "instruction": "Add", "input": "1 2"}
    text = found.render([row, assistant("3")])
    assert text.startswith(f"<s>{IN_WORDS}, paired with an input that provides further context. ")
    assert text.endswith("\n\n### Instruction:\nAdd\n\n### Input:\n1 2\n\n### Response:\n3</s>")
    alone = found.render([user("Sing")])
    assert alone.startswith(f"<s>{IN_WORDS}. ") and "Input" not in alone


def test_a_template_is_found_by_its_name_or_in_a_file(vocabulary, tmp_path):
    tokenizer = vocabulary(template="{{ messages[0].content }}!")
    assert find_template(tokenizer).render(MESSAGES) == "Be kind.!"
    path = tmp_path / "my.jinja"
    path.write_text("{{ bos_token }}{{ messages|length }}")
    assert find_template(tokenizer, str(path)).render(MESSAGES) == "<s>4"
    with pytest.raises(TemplateError, match="has no chat template: name one, chatml, .* or a file"):
        find_template(vocabulary())
    with pytest.raises(TemplateError, match="chatmi: is no chat template, wanted one of model, c"):
        find_template(tokenizer, "chatmi")
    path.write_bytes(b"\xff")
    with pytest.raises(TemplateError, match="is not UTF-8"):
        find_template(tokenizer, str(path))


def test_a_named_template_of_a_file_and_that_of_a_gguf_file(vocabulary, tmp_path):
    tokenizer = vocabulary(template="default", tool_use="{{ tools|length }} {{ mark }}")
    assert find_template(tokenizer, "tool_use").render(MESSAGES, [{}]) == "1 "
    made = find_template(tokenizer, names='{"mark": "+"}')
    carried = {key: value for key, value in template_metadata(made).items() if value is not None}
    path = tmp_path / "adapter.gguf"
    gguf.write(path, {"general.type": "adapter", **carried}, [])
    again = find_template(vocabulary(), str(path))
    assert again.names == {"mark": "+"} and carried_metadata(path) == template_metadata(made)
    assert again.render(MESSAGES) == "default" and again.render(MESSAGES, [{}]) == "1 +"
    assert template_file("chatml").read_text() == find_template(tokenizer, "chatml").source
    assert template_file(str(path)) is None and template_file("chatmi") is None


def test_templates_that_differ_in_tools_or_inputs_are_not_alike(vocabulary):
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mark }}"
    a, b = (ChatTemplate(plain + more, "t") for more in ("", "{{ tools|length if tools }}"))
    assert write_alike(a, ChatTemplate("{# other words #}" + plain, "t"))
    assert not write_alike(a, b) and not write_alike(a, a.with_names({"mark": "+"}))


def test_lists_are_not_changed_as_in_the_sandbox_of_transformers():
    """Which some templates try, as Kimi K2's."""
    source = "{% set some = [] %}{% set _ = some.append(1) %}{{ some }}"
    with pytest.raises(SecurityError) as theirs:
        ImmutableSandboxedEnvironment().from_string(source).render()
    with pytest.raises(TemplateError, match=f"t: the chat template fails: {theirs.value}"):
        ChatTemplate(source, "t").render(MESSAGES)


def test_the_date_is_the_one_that_is_given():
    source = "{{ strftime_now('%d %b %Y') }}"
    assert ChatTemplate(source, "t", today=DAY).render(MESSAGES) == "31 Jan 2025"
    assert ChatTemplate(source, "t").render(MESSAGES) == time.strftime("%d %b %Y")


PLAIN = {
    "{{ '{{}} {} {{x}}'.format('mid') }}": "{} mid {x}",
    "{{ '{{\"name\": \"{}\"}}'.format('f') }}": '{"name": "f"}',
    "{{ messages | map(attribute='content') | map('length') | sum }}": "18",
    "{{ 'a b c d' | wordcount }}": "4",
    "{{ 2.345 | round(1) }}": "2.3",
    "{{ 'one two three' | truncate(9, leeway=0) }}": "one...",
    "{% for b in [1, 2, 3] | batch(2, 0) %}{{ b }}{% endfor %}": "[1, 2][3, 0]",
    "{% for g in messages | groupby('role') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}": (
        "assistant1system1user2"
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("source", PLAIN)
def test_plain_jinja_means_what_it_does(source):
    assert ChatTemplate(source, "t").render(MESSAGES) == PLAIN[source]


HOSTILE = {
    "summed lists": "{{ [[1]] * 99999 | sum(start=[]) }}{{ ([[1]] * 99999) | sum(start=[]) }}",
    "rounded": "{{ 1 | round(10**9, 'floor') }}",
    "batches": "{{ [1] | batch(10**9, 0) | list }}",
    "padded by a field in a field": "{{ '{{{:{}}'.format(1, 10**9) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops in a filter": "{% for i in range(99999) if range(99999)|max %}{% endfor %}",
    "calls": "{% macro f(n) %}{{ f(n-1) if n }}{{ f(n-1) if n }}{% endmacro %}{{ f(60) }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "times": "{{ 'a' * 10**9 }}",
    "a list times": "{{ ([0] * 10**9)|length }}",
    "power": "{{ 2 ** (10 ** 9) }}",
    "doubled by +": "{% set n = namespace(s='a') %}{% for i in range(99) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
    "doubled by ~": "{% set n = namespace(s='a') %}{% for i in range(99) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "nested": "{% set n = namespace(s=[]) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}"
    "{% endfor %}{{ n.s }}",
    "nested, compared": "{% set n = namespace(s=[], t=[]) %}{% for i in range(99) %}"
    "{% set n.s = [n.s, n.s] %}{% set n.t = [n.t, n.t] %}{% endfor %}{{ n.s == n.t }}",
    "nested, as a key": "{% set n = namespace(s=()) %}{% for i in range(99) %}"
    "{% set n.s = (n.s, n.s) %}{% endfor %}{{ {n.s: 1} }}{{ messages[n.s] }}",
    "written": "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "kept": "{% set x %}{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}",
    "replaced": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "replaced by a filter": "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
    "joined": "{{ (['a' * 99999] * 99999)|join }}",
    "joined by a method": "{{ ('b' * 99999).join(['a'] * 99999) }}",
    "as JSON": "{{ (['a' * 99999] * 99999)|tojson }}",
    "indented": "{{ messages|tojson(indent=10**9) }}",
    "indented lines": "{{ 'a\nb'|indent(10**9) }}",
    "padded": "{{ '%99999d' % 1 }}",
    "padded by an argument": "{{ '%*d' % (10**9, 1) }}",
    "padded by format": "{{ '{:{}}'.format(1, 10**9) }}",
    "indented without a line": "{{ 'a'|indent(3 * 10**9) }}",
    "indented by other line ends": "{{ ('\u2028' * 99999)|indent(9999) }}",
    "padded often": "{{ ('{0:9999}' * 150000).format(1) }}",
    "padded often by %": "{{ ('%(a)9999d' * 150000) % {'a': 1} }}",
    "padded often by a filter": "{{ ('%(a)9999d' * 150000)|format(a=1) }}",
    "a long text in many fields": "{{ ('{0}' * 99999).format('a' * 99999) }}",
    "a long text in many fields of %": "{{ ('%(a)s' * 99999) % {'a': 'a' * 99999} }}",
    "a list in many fields": "{{ ('{0}' * 9999).format(['a' * 9999]) }}",
    "deep JSON": "{% set n = namespace(s=[0]) %}{% for i in range(400) %}"
    "{% set n.s = [n.s, [0] * 600] %}{% endfor %}{{ n.s|tojson(indent=16) }}",
    "JSON with long commas": "{{ ([0] * 9999)|tojson(separators=('a' * 99999, ':')) }}",
    "a namespace in a list": "{% set n = namespace(s='a' * 999999) %}{{ [n] * 99999 }}",
    "items in a list": "{% set d = {'a': 'a' * 999999} %}{{ ([d.items()] * 99999)|string }}",
    "slices": "{% set n = namespace(s=[]) %}{% set t = 'a' * 999999 %}{% for i in range(999) %}"
    "{% set n.s = n.s + [t[i:]] %}{% endfor %}",
    "parts": "{% set n = namespace(s=[]) %}{% set t = 'ab' * 499999 %}{% for i in range(999) %}"
    "{% set n.s = n.s + [t.partition('b')] %}{% endfor %}",
    "words": "{{ ('ab ' * 2000000).split()|length }}",
    "lists": "{% set n = namespace(s=[]) %}{% for i in range(9999) %}{% set n.s = [n.s"
    + ", 0" * 10_000
    + "] %}{% endfor %}",
    "mappings": "{% set n = namespace(s=0) %}{% for i in range(9999) %}{% set n.s = {0: n.s"
    + "".join(f",{i}:0" for i in range(1, 2_000))
    + "} %}{% endfor %}",
    "negated numbers": "{% set n = namespace(s=[]) %}{% set x = 2**2000 %}"
    "{% for i in range(9999) %}{% set n.s = [n.s" + ", -x" * 2_000 + "] %}{% endfor %}",
    "characters": "{{ ('€' * 8000000)|list|length }}",
    "large numbers": "{{ ([2**2000] * 200000)|string|length }}",
    "padded date": "{{ strftime_now('%99999d') }}",
    "stripped": "{{ ('a' * 999999).strip('b' * 999999) }}",
    "range": "{{ range(10**9)|list }}",
    "class": "{{ ''.__class__.__mro__ }}",
    "class by name": "{{ messages['__class__'].__base__ }}",
    "globals": "{{ cycler.__init__.__globals__.os }}",
    "inside of format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "namespace": "{{ namespace(__class__=1) }}",
    "changing a list": "{{ messages.append(1) }}",
    "bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "include": "{% include '/etc/passwd' %}",
    "no such filter": "{{ messages|center }}",
    "no Jinja2": "{% for x in messages %}",
    "unknown": "{{ nobody.content }}",
    "too long": "x" * (1 << 18) + "x",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped_before_it_costs(name, monkeypatch):
    monkeypatch.setattr("pyggml.chat.limits.SECONDS", 0.1)
    began = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError, match="^evil: "):
            ChatTemplate(HOSTILE[name], "evil").render(MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()
    assert time.thread_time() - began < 5


@pytest.mark.parametrize("name", ["lists", "mappings", "negated numbers"])
def test_what_is_written_out_counts_where_it_is_kept(name, monkeypatch):
    """Before its seconds end: they would do for a gigabyte."""
    monkeypatch.setattr("pyggml.chat.limits.SECONDS", 60)
    with pytest.raises(TemplateError, match="it makes too much text"):
        ChatTemplate(HOSTILE[name], "evil").render(MESSAGES)


def test_what_is_refused_is_named():
    said = {
        "{{ raise_exception('No system!') }}": "the chat template says: No system!",
        "{{ 'a' * 10**9 }}": "the chat template was stopped: it makes too much text",
        "\n{% for %}": "line 2 of the chat template: ",
        "{{ nobody.content }}": "the chat template fails: 'nobody' is undefined",
    }
    for source, message in said.items():
        with pytest.raises(TemplateError) as error:
            ChatTemplate(source, "evil").render(MESSAGES)
        assert str(error.value).startswith(f"evil: {message}")
        assert "\n" not in str(error.value)


def test_messages_are_what_json_can_hold():
    template = ChatTemplate("{{ messages }}", "t")
    deep = []
    for _ in range(99):
        deep = [deep]
    for content in (object(), deep, "a\ufdd0b"):
        with pytest.raises(TemplateError, match="a message has"):
            template.render([user(content)])


def test_every_filter_that_is_allowed_exists():
    assert {"tojson", "trim", "join"} <= set(Sandbox(str).filters)
