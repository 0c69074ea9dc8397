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

from pyggml.lora.data.messages import flag_of, kind_of, not_learned
from pyggml.lora.data.names import (
    ALTERNATIVE,
    ANSWER,
    CHAT,
    CHOSEN,
    INSTRUCTION,
    LABEL,
    PROMPT,
    REJECTED,
)
from pyggml.lora.data.records.asking import (
    check_unlearned,
    is_chat,
    messages_asked,
    system_of,
    text_asked,
    tools,
)
from pyggml.lora.data.records.shape import Cells, Shape
from pyggml.lora.data.records.training import (
    FLAGS,
    OF_CHATS,
    OF_INSTRUCTIONS,
    OF_PROMPTS,
    answer_of,
    weight,
)
from pyggml.lora.data.rows import BadRow, LabelledRow, Message, Messages, Place, PreferenceRow, Row

Answer = str | Messages
Skipped = frozenset[int]  # the numbers of an answer's messages that are not learned


def _scored(cells: Cells, part: str) -> tuple[Messages, Skipped]:
    """The messages of an answer, and those that are not learned."""
    messages, weights = answer_of(cells, part)
    name = cells.names[part]
    for i, share in weights.items():
        if share not in (0, 1):
            fault = f'"{name}" has a message {i + 1} of the weight {share:g}'
            raise BadRow(f"is an object whose {fault}, wanted 0 or 1: answers are compared whole")
        if share and messages[i]["role"] != "assistant":
            fault = f'"{name}" has a message {i + 1} that is to be learned and is no answer'
            raise BadRow(f"is an object whose {fault} of the assistant")
    return messages, not_learned(messages, weights)


def _check_counts_whole(cells: Cells) -> None:
    """BadRow for a row that is to count less than others: what is compared counts alike."""
    if (share := weight(cells)) != 1:
        raise BadRow(f'has the "weight" {share:g}, and rows that are compared count alike')


def _asked(cells: Cells) -> Messages:
    """The messages before the answers, none of which is learned."""
    asked = messages_asked(cells)
    check_unlearned(cells, asked.weights, "prompt")
    return asked.messages


# -- pairs --------------------------------------------------------------------------------------


def _of_chosen(place: Place, cells: Cells) -> Row:
    return _pair(place, cells, "chosen", "rejected")


def _of_alternative(place: Place, cells: Cells) -> Row:
    return _pair(place, cells, "completion", "rejected_response")


def _pair(place: Place, cells: Cells, good: str, bad: str) -> Row:
    _check_counts_whole(cells)
    values = cells.get(good), cells.get(bad)
    if len({isinstance(value, str) for value in values}) == 2:
        each = (f'"{cells.names[part]}" is a {kind_of(cells.get(part))}' for part in (good, bad))
        raise BadRow(f"is an object whose {' and '.join(each)}, wanted two of a kind")
    if values[0] == values[1]:
        names = f'"{cells.names[good]}" and "{cells.names[bad]}"'
        raise BadRow(f"is an object whose {names} are the same")
    if not is_chat(cells, good, bad):
        return _pair_of_texts(place, cells, good, bad)
    (chosen, read), (rejected, other) = _scored(cells, good), _scored(cells, bad)
    answers, skipped = (chosen, rejected), (read, other)
    return _pair_of_chats(place, cells, _asked(cells), answers, skipped, (good, bad))


def _pair_of_texts(place: Place, cells: Cells, good: str, bad: str) -> Row:
    prompt, chosen, rejected = text_asked(cells), cells.text(good), cells.text(bad)
    if not prompt:
        n = _n_shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:n], chosen[n:], rejected[n:]
    for part, answer in ((good, chosen), (bad, rejected)):
        if not answer.strip():
            fault = f'"{cells.names[part]}" has no answer beside the prompt'
            raise BadRow(f"is an object whose {fault}")
    return PreferenceRow(place, prompt, chosen, rejected)


def _of_last_message(place: Place, cells: Cells) -> Row:
    """The last message is chosen; the other one stands in its place, or after the same rounds."""
    _check_counts_whole(cells)
    asked, last, read = _split_last(cells)
    rejected, other = _scored(cells, "rejected_response")
    n = len(asked)
    before = asked if rejected[0]["role"] == "assistant" else system_of(cells, rejected)
    rejected, other = (*before, *rejected), frozenset(i + len(before) for i in other)
    parts = ("messages", "rejected_response")
    skipped = (read | frozenset(range(n)), other)
    return _pair_of_chats(place, cells, (), ((*asked, last), rejected), skipped, parts)


def _split_last(cells: Cells) -> tuple[Messages, Message, Skipped]:
    """Messages before the last one, which is the assistant's; and it, if it is not learned."""
    asked = messages_asked(cells)
    *before, last = asked.messages
    if last["role"] != "assistant":
        name = cells.names["messages"]
        raise BadRow(f'is an object whose "{name}" end in no answer of the assistant')
    n = len(before)
    check_unlearned(cells, {i: w for i, w in asked.weights.items() if i < n}, "prompt")
    return tuple(before), last, frozenset({n} if asked.weights.get(n) == 0 else ())


def _pair_of_chats(
    place: Place,
    cells: Cells,
    asked: Messages,
    answers: tuple[Messages, Messages],
    skipped: tuple[Skipped, Skipped],
    parts: tuple[str, str],
) -> Row:
    """Answers after what is asked, or which begin with it."""
    (chosen, rejected), (read, other) = answers, skipped
    repeats = bool(asked) and chosen[: len(asked)] == asked
    if repeats or not asked or chosen[0]["role"] != "assistant":
        n = _n_shared(chosen, rejected)
        asked = _joined(cells, asked, chosen[:n])
        chosen, rejected = chosen[n:], rejected[n:]
        read, other = (frozenset(i - n for i in each if i >= n) for each in (read, other))
    _check_answer(cells.names[parts[0]], chosen, read)
    _check_answer(cells.names[parts[1]], rejected, other)
    return PreferenceRow(place, asked, chosen, rejected, tools(cells), (read, other))


def _n_shared(chosen: Answer, rejected: Answer) -> int:
    """How much both start with, as TRL's `extract_prompt` counts it; a last space is not."""
    both = zip(chosen, rejected, strict=False)
    n = next((i for i, (a, b) in enumerate(both) if a != b), min(len(chosen), len(rejected)))
    return n - 1 if n and chosen[n - 1] == " " else n


def _joined(cells: Cells, asked: Messages, repeated: Messages) -> Messages:
    """What both answers begin with, which is what is asked; with its system text, if they lack it.

    Raises BadRow for a prompt that they do not begin with: which of both is meant, nobody knows.
    """
    system = asked[:1] if asked and asked[0]["role"] == "system" else ()
    held = [m["content"].strip() for m in repeated]
    if any(m["content"].strip() not in held for m in asked[len(system) :]):
        name = next(n for p, n in cells.names.items() if p in ("prompt", "instruction", "messages"))
        raise BadRow(f'has answers that begin with another chat than "{name}"', says_all=True)
    if not repeated or repeated[0]["role"] not in ("system", "developer"):
        return (*system, *repeated)
    if system and system[0]["content"].strip() != held[0]:
        name = cells.names["system"]
        raise BadRow(f'has a "{name}" beside answers that begin with another system text',
                     says_all=True)  # fmt: skip
    return repeated


def _check_answer(name: str, answer: Messages, read_only: Skipped) -> None:
    if not answer or answer[0]["role"] != "assistant":
        raise BadRow(f'is an object whose "{name}" has no answer of the assistant after the prompt')
    if read_only >= set(range(len(answer))):
        raise BadRow(f'is an object whose "{name}" has no answer of the assistant to learn')


# -- labels -------------------------------------------------------------------------------------


def _of_label(place: Place, cells: Cells) -> Row:
    _check_counts_whole(cells)
    label = cells.read("label", flag_of)
    if not is_chat(cells, "completion"):
        return LabelledRow(place, text_asked(cells), cells.text("completion"), label)
    completion, read_only = _scored(cells, "completion")
    _check_answer(cells.names["completion"], completion, read_only)
    return LabelledRow(place, _asked(cells), completion, label, tools(cells), read_only)


def _of_labelled_messages(place: Place, cells: Cells) -> Row:
    _check_counts_whole(cells)
    label = cells.read("label", flag_of)
    asked, last, read_only = _split_last(cells)
    read_only = frozenset(0 for _ in read_only)
    _check_answer(cells.names["messages"], (last,), read_only)
    return LabelledRow(place, asked, (last,), label, tools(cells), read_only)


_ASKING = (  # in this order: a prompt may be named input, as what an instruction is given
    (INSTRUCTION, (*OF_INSTRUCTIONS, *FLAGS)),
    (PROMPT, (*OF_PROMPTS, *FLAGS)),
)
_MESSAGES = (*OF_CHATS, *FLAGS)
PAIR_SHAPES = (
    *(Shape((asks, CHOSEN, REJECTED), _of_chosen, others) for asks, others in _ASKING),
    Shape((CHAT, CHOSEN, REJECTED), _of_chosen, _MESSAGES),
    *(Shape((asks, ANSWER, ALTERNATIVE), _of_alternative, others) for asks, others in _ASKING),
    Shape((CHAT, ALTERNATIVE), _of_last_message, _MESSAGES),
    Shape((CHOSEN, REJECTED), _of_chosen, _MESSAGES),
)
LABEL_SHAPES = (
    *(Shape((asks, ANSWER, LABEL), _of_label, others) for asks, others in _ASKING),
    Shape((CHAT, LABEL), _of_labelled_messages, _MESSAGES),
)
