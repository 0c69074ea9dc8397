"""Every command stops where a template's turn ends, shows no marker and keeps all words.

The models say two words, what ends a turn, and then go on for ever. CHAT_TEMPLATES names a folder
of *.jinja, models/templates of llama.cpp, all of which are tried with `-m interop`.
"""

import io
import json
import os
from pathlib import Path

import pytest
import scripted
from starlette.testclient import TestClient

from pyggml.cli.commands.serve import startup

from chats import user

FOLDER = os.environ.get("CHAT_TEMPLATES")
PATHS = sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []
DEEPSEEK_END = "<｜end▁of▁sentence｜>"
# The token with which a model ends its turn -> the templates of such models.
_ENDS = {
    "<|im_end|>": """Bielik-11B-v3.0-Instruct HuggingFaceTB-SmolLM3-3B Kimi-K2-Instruct
        Kimi-K2-Thinking LFM2-8B-A1B LFM2.5-8B-A1B LFM2.5-Instruct MiMo-VL
        NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use
        NousResearch-Hermes-3-Llama-3.1-8B-tool_use Qwen-QwQ-32B Qwen-Qwen2.5-7B-Instruct
        Qwen-Qwen3-0.6B Qwen3-Coder Qwen3.5-4B StepFun3.5-Flash moonshotai-Kimi-K2
        openbmb-MiniCPM5-1B""",
    "<|end|>": """Apriel-1.6-15b-Thinker-fixed microsoft-Phi-3.5-mini-instruct unsloth-Apriel-1.5
        upstage-Solar-Open-100B""",
    "<|eot_id|>": """fireworks-ai-llama-3-firefunction-v2 meetkai-functionary-medium-v3.1
        meetkai-functionary-medium-v3.2 meta-llama-Llama-3.1-8B-Instruct
        meta-llama-Llama-3.2-3B-Instruct meta-llama-Llama-3.3-70B-Instruct""",
    "</s>": """Mistral-Small-3.2-24B-Instruct-2506 mistralai-Ministral-3-14B-Reasoning-2512
        mistralai-Mistral-Nemo-Instruct-2407 unsloth-mistral-Devstral-Small-2507""",
    DEEPSEEK_END: """Spark2.5 deepseek-ai-DeepSeek-R1-Distill-Llama-8B
        deepseek-ai-DeepSeek-R1-Distill-Qwen-32B deepseek-ai-DeepSeek-V3.1
        deepseek-ai-DeepSeek-V3.2 deepseek-ai-DeepSeek-V4 deepseek-ai-DeepSeek-V4-Flash-0731
        llama-cpp-deepseek-r1""",
    "<|end_of_text|>": """ibm-granite-granite-3.3-2B-Instruct ibm-granite-granite-4.0
        ibm-granite-granite-4.1""",
    "<|END_OF_TURN_TOKEN|>": """Cohere2MoE CohereForAI-c4ai-command-r-plus-tool_use
        CohereForAI-c4ai-command-r7b-12-2024-tool_use""",
    "</assistant>": "poolside-Laguna-S-2.1 poolside-Laguna-XS-2.1 poolside-Laguna-XS.2",
    "<turn|>": "google-gemma-4-31B-it google-gemma-4-31B-it-interleaved",
    "<|user|>": "GLM-4.6 GLM-4.7-Flash",
    "<|message_sep|>": "GigaChat3-10B-A1.8B GigaChat3.1-10B-A1.8B",
    "[e~[": "MiniMax-M2 MiniMax-M3",
    "<|assistant_end|>": "Apertus-8B-Instruct",
    "<seed:eos>": "ByteDance-Seed-OSS",
    "<|end_of_msg|>": "Kimi-K3",
    "<end_of_sentence>": "MiniMax-M1",
    "<SPECIAL_12>": "NVIDIA-Nemotron-Nano-v2",
    "<sep>": "Reka-Edge",
    "<end_of_turn>": "google-gemma-2-2b-it",
    "<|role_end|>": "inclusionai-ling-3.0-flash",
    "\n\n": "llama-cpp-rwkv-world",
    "<|eot|>": "muse-glimmer",
    "<|return|>": "openai-gpt-oss-120b",
    "<｜hy_eos:opensource｜>": "tencent-Hy3",
}
ENDS = {name: end for end, names in _ENDS.items() for name in names.split()}
# Where more marks come before that token: all of them.
MARKS = {
    "Cohere2MoE": ("<|END_TEXT|>", "<|END_OF_TURN_TOKEN|>"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"),
}
# The token that ends a call of a tool instead, and its role if its name has none.
CALLS = {
    "GLM-4.6": ("<|observation|>", "eom"),
    "GLM-4.7-Flash": ("<|observation|>", "eom"),
    "google-gemma-4-31B-it": ("<|tool_response>", ""),
    "google-gemma-4-31B-it-interleaved": ("<|tool_response>", ""),
    "meetkai-functionary-medium-v3.1": ("<|eom_id|>", ""),
    "meta-llama-Llama-3.1-8B-Instruct": ("<|eom_id|>", ""),
    "meta-llama-Llama-3.2-3B-Instruct": ("<|eom_id|>", ""),
    "meta-llama-Llama-3.3-70B-Instruct": ("<|eom_id|>", ""),
    "openai-gpt-oss-120b": ("<|call|>", ""),
}
WORDS = ("Quux", " zap")
LEAK = " LEAK"
CITY = {"type": "string", "description": "its name"}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
TOOL_USE = {name: [TOOL] for name in ENDS if name.endswith("tool_use")}  # these fail without
INPUTS = {"fireworks-ai-llama-3-firefunction-v2": {"functions": "[]", "datetime": "now"}}


@pytest.fixture
def answers_of(pyggml, monkeypatch, tmp_path):
    """answers_of(model, tools) -> what each command answers: command -> text."""

    def call(model, tools=None, inputs=None):
        chats = tmp_path / "chats.jsonl"
        row = {"messages": [user("Hi")]} | ({"tools": tools} if tools else {})
        chats.write_text(json.dumps(row) + "\n")
        form = ("--chat-template-kwargs", json.dumps(inputs or {}))
        how = ("-m", model, "--temp", 0, "-n", 12, *form)
        ended = pyggml("generate", *how, "--messages", chats, "--json")
        assert ended.code == 0, ended.err
        record = json.loads(ended.out)
        assert record["finish_reason"] == "stop"
        shown = pyggml("generate", *how, "--messages", chats)
        answers = {"generate": shown.out.removesuffix("\n"), "generate --json": record["text"]}
        if not tools:
            monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
            ended = pyggml("chat", *how, *ROOM)
            assert ended.code == 0, ended.err
            answers["chat"] = ended.out.removesuffix("\n")
        return answers | serve_answers(model, row, form)

    def serve_answers(model, row, form):
        made = []
        with monkeypatch.context() as patch:
            patch.setattr(startup, "serve", lambda app, *rest: made.append(app))
            how = ("--port", 0, "--parallel", 1, *ROOM, *form)
            ended = pyggml("serve", "-m", model, *how)
        assert ended.code == startup.STOPPED, ended.err
        body = row | {"temperature": 0, "max_tokens": 12}
        with TestClient(made[0], base_url="http://127.0.0.1") as http:
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            streamed = http.post("/v1/chat/completions", json=body | {"stream": True})
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "stop"
        lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines if line[0] == "{"]
        text = "".join(delta.get("content") or "" for delta in deltas)
        return {"serve": choice["message"]["content"], "serve, streamed": text}

    return call


ROOM = ("--ctx", 1 << 14)  # some templates write a long text of their own
NO_ROLE = {"tokenizer.ggml.eos_token_id": "[STOP]"}


@pytest.fixture
def check(answers_of, tmp_path):
    """check(path of a template, what ends the answer, control tokens, roles, tools)"""

    def call(name, source, end, markers, keys, tools=None):
        keys = {"tokenizer.chat_template": source} | keys
        model = scripted.write(tmp_path / "m.gguf", [*WORDS, *end, LEAK], markers, keys)
        answers = answers_of(model, tools, INPUTS.get(name))
        assert answers == dict.fromkeys(answers, "".join(WORDS))

    return call


def each(names):
    return [pytest.param(path, id=path.stem) for path in PATHS if path.stem in names]


@pytest.mark.interop
def test_every_template_has_its_end_here():
    assert not PATHS or {path.stem for path in PATHS} == ENDS.keys()


@pytest.mark.interop
@pytest.mark.parametrize("path", each(ENDS))
def test_at_the_token_that_ends_a_turn(path, check):
    end, source = ENDS[path.stem], path.read_text("utf-8")
    marks = MARKS.get(path.stem, (end,))
    markers = [mark for mark in marks if mark.strip()] or marks
    keys = {"tokenizer.ggml.eos_token_id": end}
    check(path.stem, source, marks, markers, keys, TOOL_USE.get(path.stem))


# What templates write that have words between the marks, or tokens of the vocabulary behind them.
OF_SEVERAL = {
    "Kimi-K3": "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
    "microsoft-Phi-3.5-mini-instruct": "<|end|>\n</s>",
}
# A blank line is no mark of RWKV's: texts have some. Firefunction's fails without its inputs.
# Mistral's have the name of the vocabulary's own end, which is a token.
OF_TEXT = ENDS.keys() - {
    *("llama-cpp-rwkv-world", "fireworks-ai-llama-3-firefunction-v2"),
    *_ENDS["</s>"].split(),
}


@pytest.mark.interop
@pytest.mark.parametrize("path", each(OF_TEXT))
def test_at_the_text_that_ends_a_turn(path, check):
    """Of a vocabulary without the token, in which its text is two tokens."""
    end = "".join(MARKS.get(path.stem, (ENDS[path.stem],)))
    end = OF_SEVERAL.get(path.stem, end)
    source, parts = path.read_text("utf-8"), (end[:2], end[2:])
    check(path.stem, source, parts, ["[STOP]"], NO_ROLE, TOOL_USE.get(path.stem))


@pytest.mark.interop
@pytest.mark.parametrize("path", each(CALLS))
def test_at_the_token_that_ends_a_call(path, check):
    mark, role = CALLS[path.stem]
    end, source = ENDS[path.stem], path.read_text("utf-8")
    keys = {"tokenizer.ggml.eos_token_id": end}
    keys |= {f"tokenizer.ggml.{role}_token_id": mark} if role else {}
    check(path.stem, source, (mark,), [mark, end], keys, [TOOL])


# -- without a folder -----------------------------------------------------------------------------

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ENDED_BY_THE_NEXT = """{% for m in messages %}
{%- if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|assistant|>{{ m.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
MARKED = """{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}</user>
{% else %}<assistant>{% generation %}{{ m.content }}
</assistant>{% endgeneration %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""
SEVERAL = CHATML.replace("<|im_end|>", "<|end|>\n</s>")
FOR_TOOLS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}" + CHATML


@pytest.mark.quick
@pytest.mark.parametrize(
    "source, end, tools",
    [
        (CHATML, ("<|im_", "end|>"), None),
        (ENDED_BY_THE_NEXT, ("<|us", "er|>"), None),
        (MARKED, ("\n", "</assistant>"), None),
        (SEVERAL, ("<|end", "|>", "[STOP]"), None),
        (FOR_TOOLS, ("<|im_", "end|>"), [TOOL]),
    ],
    ids=["after it", "by the next", "marked", "several", "for tools"],
)
def test_at_a_text_that_a_small_template_has(source, end, tools, answers_of, tmp_path):
    keys = {"tokenizer.chat_template": source} | NO_ROLE
    model = scripted.write(tmp_path / "m.gguf", [*WORDS, *end, LEAK], ["[STOP]"], keys)
    answers = answers_of(model, tools)
    assert {text.rstrip() for text in answers.values()} == {"".join(WORDS)}


@pytest.mark.quick
@pytest.mark.parametrize("mark, role", [("<|im_end|>", "eos"), ("<over>", "eot"), ("<|call|>", "")])
def test_at_a_token_whatever_its_role(mark, role, check):
    """<|call|> is an end by its name."""
    keys = {f"tokenizer.ggml.{role}_token_id": mark} if role else NO_ROLE
    source = FOR_TOOLS if mark == "<|call|>" else CHATML
    check("", source, (mark,), [mark, "[STOP]"], keys, [TOOL] if mark == "<|call|>" else None)
