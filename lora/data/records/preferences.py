"""Records whose answers are compared: a chosen one with a rejected one, or each by its label.

parts                                         row             for
prompt, chosen, rejected                      PreferenceRow   pairs
prompt, completion, rejected_response         PreferenceRow   pairs
messages, rejected_response                   PreferenceRow   pairs; the last message is chosen
chosen, rejected                              PreferenceRow   pairs; what both begin with is asked
prompt, completion, label                     LabelledRow     labels
messages, label                               LabelledRow     labels; the last message is the answer

In place of a prompt an instruction may stand, or messages. Beside each stand the parts that it has
in rows for training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from pyggml.chat.messages import BadValue, Messages, flag_of, kind_of, not_learned
from pyggml.lora.data.records.asking import (
    check_not_learned,
    is_chat,
    opening_of,
    prompt_text,
    system_of,
    tools,
)
from pyggml.lora.data.records.names import (
    ALTERNATIVE,
    ANSWER,
    CHAT,
    CHOSEN,
    INSTRUCTION,
    LABEL,
    PROMPT,
    REJECTED,
)
from pyggml.lora.data.records.rows import LabelledRow, PreferenceRow, Row, RowPlace
from pyggml.lora.data.records.shape import Cells, Shape
from pyggml.lora.data.records.training import (
    FLAGS,
    OF_CHATS,
    OF_INSTRUCTIONS,
    OF_PROMPTS,
    answer_of,
    weight,
)


@dataclass(frozen=True, slots=True)
class _Reply:
    """The messages of an answer, and the numbers of those that are not learned."""

    messages: Messages
    skipped: frozenset[int]

    def without(self, n: int) -> _Reply:
        """What follows its first n messages."""
        return _Reply(self.messages[n:], frozenset(i - n for i in self.skipped if i >= n))

    def after(self, messages: Messages) -> _Reply:
        """With these before it, of which none is learned."""
        n = len(messages)
        skipped = frozenset(range(n)) | {i + n for i in self.skipped}
        return _Reply((*messages, *self.messages), skipped)

    def check(self, name: str) -> None:
        """BadValue, with the column's name, if it is no answer or nothing of it is learned."""
        if not self.messages or self.messages[0]["role"] != "assistant":
            fault = "has no answer of the assistant after the prompt"
            raise BadValue(f'is an object whose "{name}" {fault}')
        if self.skipped >= {*range(len(self.messages))}:
            raise BadValue(f'is an object whose "{name}" has no answer of the assistant to learn')


def _reply(cells: Cells, part: str) -> _Reply:
    messages, weights = answer_of(cells, part)
    name = cells.names[part]
    for i, share in weights.items():
        if share not in (0, 1):
            fault = f'"{name}" has a message {i + 1} of the weight {share:g}'
            raise BadValue(f"is an object whose {fault}, wanted 0 or 1: answers are compared whole")
        if share and messages[i]["role"] != "assistant":
            fault = f'"{name}" has a message {i + 1} that is to be learned and is no answer'
            raise BadValue(f"is an object whose {fault} of the assistant")
    return _Reply(messages, not_learned(messages, weights))


def _prompt(cells: Cells) -> Messages:
    """The messages before the answers, none of which is learned."""
    opening = opening_of(cells)
    check_not_learned(opening.weights)
    return opening.messages


def _split_last(cells: Cells) -> tuple[Messages, _Reply]:
    """Messages before the last one, and it, which is the assistant's."""
    opening = opening_of(cells)
    *before, last = opening.messages
    if last["role"] != "assistant":
        name = cells.names["messages"]
        raise BadValue(f'is an object whose "{name}" end in no answer of the assistant')
    n = len(before)
    check_not_learned({i: w for i, w in opening.weights.items() if i < n})
    return tuple(before), _Reply((last,), frozenset({0} if opening.weights.get(n) == 0 else ()))


def _check_counts_whole(cells: Cells) -> None:
    """BadValue for a row that is to count less than others: what is compared counts alike."""
    if (share := weight(cells)) != 1:
        raise BadValue(f'has the "weight" {share:g}, and rows that are compared count alike')


# -- pairs --------------------------------------------------------------------------------------


def _pair(place: RowPlace, cells: Cells, good: str, bad: str) -> Row:
    _check_counts_whole(cells)
    values = cells.get(good), cells.get(bad)
    if len({isinstance(value, str) for value in values}) == 2:
        each = (f'"{cells.names[part]}" is a {kind_of(cells.get(part))}' for part in (good, bad))
        raise BadValue(f"is an object whose {' and '.join(each)}, wanted two of a kind")
    if values[0] == values[1]:
        names = f'"{cells.names[good]}" and "{cells.names[bad]}"'
        raise BadValue(f"is an object whose {names} are the same")
    if not is_chat(cells, good, bad):
        return _pair_of_texts(place, cells, good, bad)
    chosen, rejected = _reply(cells, good), _reply(cells, bad)
    return _pair_of_chats(place, cells, _prompt(cells), {good: chosen, bad: rejected})


def _pair_of_texts(place: RowPlace, cells: Cells, good: str, bad: str) -> Row:
    prompt, chosen, rejected = prompt_text(cells), cells.text(good), cells.text(bad)
    if not prompt:
        n = _n_shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:n], chosen[n:], rejected[n:]
    for part, answer in ((good, chosen), (bad, rejected)):
        if not answer.strip():
            fault = f'"{cells.names[part]}" has no answer beside the prompt'
            raise BadValue(f"is an object whose {fault}")
    return PreferenceRow(place, prompt, chosen, rejected)


def _of_last_message(place: RowPlace, cells: Cells) -> Row:
    """The last message is chosen; the other one stands in its place, or after the same rounds."""
    _check_counts_whole(cells)
    prompt, last = _split_last(cells)
    rejected = _reply(cells, "rejected_response")
    stands_alone = rejected.messages[0]["role"] == "assistant"
    before = prompt if stands_alone else system_of(cells, rejected.messages)
    replies = {"messages": last.after(prompt), "rejected_response": rejected.after(before)}
    return _pair_of_chats(place, cells, (), replies)


def _pair_of_chats(
    place: RowPlace, cells: Cells, prompt: Messages, replies: Mapping[str, _Reply]
) -> Row:
    """The chosen answer and the rejected one, by part, after the prompt or beginning with it."""
    chosen, rejected = replies.values()
    repeats = bool(prompt) and chosen.messages[: len(prompt)] == prompt
    if repeats or not prompt or chosen.messages[0]["role"] != "assistant":
        n = _n_shared(chosen.messages, rejected.messages)
        prompt = _join(cells, prompt, chosen.messages[:n])
        chosen, rejected = chosen.without(n), rejected.without(n)
    for part, reply in zip(replies, (chosen, rejected), strict=True):
        reply.check(cells.names[part])
    skipped = (chosen.skipped, rejected.skipped)
    return PreferenceRow(place, prompt, chosen.messages, rejected.messages, tools(cells), skipped)


def _n_shared(chosen: str | Messages, rejected: str | Messages) -> int:
    """How much both start with, as TRL's `extract_prompt` counts it; a last space is not."""
    both = zip(chosen, rejected, strict=False)
    n = next((i for i, (a, b) in enumerate(both) if a != b), min(len(chosen), len(rejected)))
    return n - 1 if n and chosen[n - 1] == " " else n


def _join(cells: Cells, prompt: Messages, repeated: Messages) -> Messages:
    """What both answers begin with, which is the prompt; with its system text, if they lack it.

    Raises BadValue for a prompt that they do not begin with: which of both is meant, nobody knows.
    """
    system = prompt[:1] if prompt and prompt[0]["role"] == "system" else ()
    texts = [m["content"].strip() for m in repeated]
    if any(m["content"].strip() not in texts for m in prompt[len(system) :]):
        name = next(n for p, n in cells.names.items() if p in ("prompt", "instruction", "messages"))
        raise BadValue(f'has answers that begin with another chat than "{name}"', says_all=True)
    if not repeated or repeated[0]["role"] not in ("system", "developer"):
        return (*system, *repeated)
    if system and system[0]["content"].strip() != texts[0]:
        name = cells.names["system"]
        raise BadValue(f'has a "{name}" beside answers that begin with another system text',
                     says_all=True)  # fmt: skip
    return repeated


_of_chosen = partial(_pair, good="chosen", bad="rejected")
_of_alternative = partial(_pair, good="completion", bad="rejected_response")


# -- labels -------------------------------------------------------------------------------------


def _of_label(place: RowPlace, cells: Cells) -> Row:
    _check_counts_whole(cells)
    label = cells.read("label", flag_of)
    if not is_chat(cells, "completion"):
        return LabelledRow(place, prompt_text(cells), cells.text("completion"), label)
    reply = _reply(cells, "completion")
    reply.check(cells.names["completion"])
    return _row_of_label(place, cells, _prompt(cells), reply, label)


def _of_labelled_messages(place: RowPlace, cells: Cells) -> Row:
    _check_counts_whole(cells)
    label = cells.read("label", flag_of)
    prompt, reply = _split_last(cells)
    reply.check(cells.names["messages"])
    return _row_of_label(place, cells, prompt, reply, label)


def _row_of_label(
    place: RowPlace, cells: Cells, prompt: Messages, reply: _Reply, label: bool
) -> Row:
    return LabelledRow(place, prompt, reply.messages, label, tools(cells), reply.skipped)


_ASKING = (  # in this order: a prompt may be named input, as what an instruction is given
    (INSTRUCTION, (*OF_INSTRUCTIONS, *FLAGS)),
    (PROMPT, (*OF_PROMPTS, *FLAGS)),
)
_MESSAGES = (*OF_CHATS, *FLAGS)
PAIR_SHAPES = (
    *(Shape((asks, CHOSEN, REJECTED), _of_chosen, extra) for asks, extra in _ASKING),
    Shape((CHAT, CHOSEN, REJECTED), _of_chosen, _MESSAGES),
    *(Shape((asks, ANSWER, ALTERNATIVE), _of_alternative, extra) for asks, extra in _ASKING),
    Shape((CHAT, ALTERNATIVE), _of_last_message, _MESSAGES),
    Shape((CHOSEN, REJECTED), _of_chosen, _MESSAGES),
)
LABEL_SHAPES = (
    *(Shape((asks, ANSWER, LABEL), _of_label, extra) for asks, extra in _ASKING),
    Shape((CHAT, LABEL), _of_labelled_messages, _MESSAGES),
)
