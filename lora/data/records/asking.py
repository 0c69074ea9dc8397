"""What a record asks: a text that an answer goes on with, or messages that it answers.

It is messages where a part of it is, and where it has what a text has no place for: an instruction,
a system text, earlier rounds or tools. Then answers that are texts are messages too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyggml.chat import Message
from pyggml.chat.messages import (
    BadValue,
    Messages,
    Weights,
    checked_text,
    kind_of,
    list_of,
    messages_of,
    tools_of,
)
from pyggml.lora.data.records.shape import Cells

_OF_CHATS = ("messages", "instruction", "system", "history", "tools")


@dataclass(frozen=True, slots=True)
class ChatOpening:
    """Messages before an answer.

    weights   of those whose file gives them one
    rounds    the numbers of the answers of earlier rounds, which a record has in a part of its own
    """

    messages: Messages = ()
    weights: Weights = field(default_factory=dict)
    rounds: frozenset[int] = frozenset()


def is_chat(cells: Cells, *answers: str) -> bool:
    """Whether a record with these answers is made of messages."""
    parts = ("prompt", *answers)
    return any(part in cells for part in _OF_CHATS) or any(map(cells.holds_messages, parts))


def prompt_text(cells: Cells) -> str:
    """The prompt, after its context if it does not hold it; "" if there is none."""
    is_there = cells.get("prompt") is not None
    text = cells.text("prompt", may_be_empty=True) if is_there else ""
    context = cells.text("context") if cells.has("context") else ""
    return text if not context or context in text else f"{context}\n{text}"


def opening_of(cells: Cells) -> ChatOpening:
    """The system's text, earlier rounds, and what is asked last."""
    messages, weights = _last_of(cells)
    rounds = cells.read("history", _rounds) if cells.has("history") else ()
    system = system_of(cells, (*rounds, *messages))
    n = len(system) + len(rounds)
    answers = (i for i, m in enumerate((*system, *rounds)) if m["role"] == "assistant")
    return ChatOpening((*system, *rounds, *messages), shift(weights, n), frozenset(answers))


def _last_of(cells: Cells) -> tuple[Messages, Weights]:
    """What is asked last, without the parts that stand before it."""
    if "messages" in cells:
        return messages_at(cells, "messages")
    if cells.holds_messages("prompt"):
        return messages_at(cells, "prompt")
    if "instruction" in cells:
        return (_instruction(cells),), {}
    text = prompt_text(cells)
    return (({"role": "user", "content": text},) if text else ()), {}


def _instruction(cells: Cells) -> Message:
    """Alpaca's, which templates may write apart from its input."""
    instruction, about = cells.text("instruction"), ""
    if cells.get("input") is not None:
        about = cells.text("input", may_be_empty=True)
    content = f"{instruction}\n\n{about}" if about else instruction
    return {"role": "user", "content": content, "instruction": instruction, "input": about}


def messages_at(cells: Cells, part: str) -> tuple[Messages, Weights]:
    """The messages of a part, or the one that it is, and the weights of those that have one."""
    messages: tuple[Messages, Weights] = cells.read(
        part, lambda value: messages_of([value] if isinstance(value, dict) else value)
    )
    return messages


def shift(weights: Weights, n: int) -> dict[int, float]:
    """The weights of messages that stand n places further on."""
    return {i + n: weight for i, weight in weights.items() if i + n >= 0}


def system_of(cells: Cells, messages: Messages) -> Messages:
    """The message that a record's system text is, if these messages do not begin with it.

    Raises BadValue if they begin with another one.
    """
    if not cells.has("system"):
        return ()
    text, first = cells.text("system"), messages[0] if messages else {}
    if first.get("role") not in ("system", "developer"):
        return ({"role": "system", "content": text},)
    if first["content"].strip() != text.strip():
        name = cells.names["system"]
        raise BadValue(f'has a "{name}" beside messages that begin with another system text',
                     says_all=True)  # fmt: skip
    return ()


def _rounds(value: Any) -> Messages:
    """Rounds as LLaMA-Factory and ms-swift have them, [[question, answer], …], or messages."""
    items, messages = list_of(value), list[Message]()
    if all(isinstance(item, Mapping) for item in items):
        return messages_of(items)[0]
    for i, item in enumerate(items):
        if not isinstance(item, list) or len(item) != 2:
            what = f"a list of {len(item)}" if isinstance(item, list) else f"a {kind_of(item)}"
            raise BadValue(f"has a round {i + 1} that is {what}, wanted a question and its answer")
        try:
            question, answer = (checked_text(text, may_be_empty=False) for text in item)
        except BadValue as bad:
            raise BadValue(f"has a round {i + 1} with a text that {bad}") from None
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    return tuple(messages)


def tools(cells: Cells) -> tuple[dict[str, Any], ...]:
    """The functions that the assistant may call."""
    functions: tuple[dict[str, Any], ...] = cells.read("tools", tools_of)
    return functions


def check_not_learned(weights: Weights) -> None:
    """BadValue for marks that would have a prompt learned, where answers alone are."""
    for i, weight in weights.items():
        if weight:
            fault = f'has a message {i + 1} that is marked to be learned, and stands in a "prompt"'
            raise BadValue(f"{fault}, of which nothing is", says_all=True)
