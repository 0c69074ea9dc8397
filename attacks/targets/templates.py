"""Chat templates."""

from attacks.targets.target import Target

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson(indent=2) }}{% endif %}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_FILTERS = (
    "{% set ns = namespace(a=0) %}{% for i in range(9) %}{% set ns.a = ns.a + loop.index %}"
    "{% endfor %}{{ ns.a }}{{ 'a'.upper() ~ 'x' * 3 }}{{ messages | length }}"
    "{{ '%s' % 3 }}{{ messages | map(attribute='role') | join(', ') | replace('u', 'U') }}"
    "{% macro f(x) %}{{ x[:3] }}{% endmacro %}{{ f('abcdef') }}{{ messages[-1].content.split() }}"
    "{{ 'a' | indent(4) }}{{ raise_exception('no') if false else '' }}{{ strftime_now('%Y') }}"
)
_TEMPLATE_WORDS = (
    b"{{", b"}}", b"{%", b"%}", b"{% for i in range(999999999) %}", b"|indent(10**11)", b"*10**9",
    b".format(", b"'%9999999d' % 1", b"|tojson(indent=99999)", b"__class__", b"|attr('__init__')",
    b"|batch(3)", b"|groupby('role')", b"|sum", b"**", b"{% set x = [x] %}", b"|center(99999999)",
    b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", b"|replace('', 'aaaaaaaaaa')",
)  # fmt: skip
_MESSAGES = (
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "a <b> & \"c\" 日本"},
    {"role": "assistant", "content": "yes", "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
    {"role": "tool", "content": "{\"t\": 12}"},
)  # fmt: skip


def _read_template(data: bytes) -> None:
    from pyggml.chat.template import ChatTemplate

    template = ChatTemplate(data.decode(errors="replace"), "template", {"bos_token": "<s>"})
    template.render(_MESSAGES, add_generation_prompt=True)


TARGETS = (
    Target(
        "template",
        "chat templates",
        _read_template,
        lambda: [TEMPLATE.encode(), _FILTERS.encode()],
        _TEMPLATE_WORDS,
    ),
)
