"""Turns found in templates, real ones among them, write what the templates write."""

import datetime

import pytest

from pyggml.chat import BUILT_IN, ChatTemplate, find_template, find_turns
from pyggml.chat.turns import Turns
from pyggml.errors import TemplateError

from chats import assistant, user

SYSTEM = {"role": "system", "content": "You are terse."}
ROUNDS = [user("1 < 2"), assistant("Yes."), user("{{ b }}?"), assistant("No."), user("c\nd")]
CHATS = [ROUNDS[:1], ROUNDS[:3], ROUNDS]
# Without a place for the system: gemma 2. Not one turn after the other: Mistral-Nemo, whose system
# stands in the last question.
REAL = {
    "HuggingFaceTB-SmolLM3-3B": True,
    "LFM2.5-Instruct": True,
    "Qwen-Qwen2.5-7B-Instruct": True,
    "Qwen-Qwen3-0.6B": True,
    "google-gemma-2-2b-it": False,
    "ibm-granite-granite-3.3-2B-Instruct": True,
    "meta-llama-Llama-3.1-8B-Instruct": True,
    "microsoft-Phi-3.5-mini-instruct": True,
}


def check(template, takes_system):
    found = find_turns(template, "</s>")
    assert (found.system is not None) == takes_system
    for chat in CHATS + [[SYSTEM, *chat] for chat in CHATS if takes_system]:
        assert found.render(chat) == template.render(chat, add_generation_prompt=True)


@pytest.mark.parametrize("name", REAL)
def test_turns_of_real_templates(template, name):
    check(template(name), REAL[name])


@pytest.mark.parametrize("name", BUILT_IN)
def test_turns_of_built_in_templates(vocabulary, name):
    check(find_template(vocabulary(), name, datetime.date(2025, 1, 1)), True)


def test_the_parts_by_hand(vocabulary):
    assert find_turns(find_template(vocabulary(), "chatml")) == Turns(
        "<|im_start|>user\n",
        ("<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n"),
        ("<|im_start|>user\n", "<|im_end|>\n"),
        ("<|im_start|>assistant\n", "<|im_end|>\n"),
        "<|im_start|>assistant\n",
    )
    mistral = find_turns(find_template(vocabulary(), "mistral")).without("<s>")
    assert (mistral.opening, mistral.system) == ("[INST] ", ("[INST] ", "\n\n"))


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content|upper }}{% endfor %}",
        "{{ messages[-1].content }}",
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    ],
)
def test_what_does_more_than_turns_is_refused(source):
    with pytest.raises(TemplateError):
        find_turns(ChatTemplate(source, "t"))


def test_the_system_in_the_last_question_is_refused(template):
    with pytest.raises(TemplateError, match="more than to write one turn after the other"):
        find_turns(template("mistralai-Mistral-Nemo-Instruct-2407"))
