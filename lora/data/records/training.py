"""Records of rows that are learned: texts, prompts with completions, chats.

parts                                                  row
messages [system, tools]                               ChatRow
instruction, completion [input, system, history, tools]   ChatRow
text                                                   TextRow
prompt, completion [context]                           CompletionRow; a question with its answer may
                                                       become a chat, see tokens.encode
prompt, completion [context, system, history, tools]   ChatRow where it is made of messages

Each may have "weight", 0 to 1, or "train" or "loss", true or false.
"""

from pyggml.chat.messages import (
    MARKS,
    BadValue,
    Messages,
    Weights,
    flag_of,
    messages_of,
    not_learned,
    share_of,
    weight_of,
)
from pyggml.lora.data.records.asking import (
    check_not_learned,
    is_chat,
    messages_at,
    opening_of,
    prompt_text,
    shift,
    system_of,
    tools,
)
from pyggml.lora.data.records.names import (
    ANSWER,
    CHAT,
    CONTEXT,
    GIVEN,
    HISTORY,
    INSTRUCTION,
    PROMPT,
    QUESTION,
    SYSTEM,
    TEXT,
    TOOLS,
)
from pyggml.lora.data.records.rows import ChatRow, CompletionRow, Row, RowPlace, TextRow
from pyggml.lora.data.records.shape import Cells, Shape

FLAGS = tuple((mark,) for mark in MARKS)
OF_PROMPTS = (CONTEXT, SYSTEM, HISTORY, TOOLS)
OF_INSTRUCTIONS = (GIVEN, SYSTEM, HISTORY, TOOLS)
OF_CHATS = (SYSTEM, TOOLS)


def weight(cells: Cells) -> float:
    """How much the row counts. BadValue for one of which nothing is to be learned."""
    marks = [mark for mark in MARKS if cells.get(mark) is not None]
    if not marks:
        return 1.0
    for mark in marks:
        cells.read(mark, share_of if mark == "weight" else flag_of)
    try:
        share = weight_of({mark: cells.get(mark) for mark in marks})
    except BadValue as bad:
        raise BadValue(f"is an object that {bad}", says_all=True) from None
    if share == 0:
        raise BadValue("has the weight 0, so nothing of it is learned: leave it out", says_all=True)
    assert share is not None, "there are marks"
    return share


def _of_text(place: RowPlace, cells: Cells) -> Row:
    return TextRow(place, cells.text("text"), weight=weight(cells))


def _of_messages(place: RowPlace, cells: Cells) -> Row:
    messages, weights = cells.read("messages", messages_of)
    system = system_of(cells, messages)
    messages, weights = (*system, *messages), shift(weights, len(system))
    return _chat(place, cells, messages, not_learned(messages, weights), weights, "messages")


def _of_prompt(place: RowPlace, cells: Cells) -> Row:
    if not is_chat(cells, "completion"):
        prompt, completion = prompt_text(cells), cells.text("completion")
        is_answer = cells.names.get("prompt") in QUESTION and bool(prompt.strip())
        return CompletionRow(place, prompt, completion, weight(cells), is_answer)
    opening = opening_of(cells)
    of_answers = (i for i in opening.weights if opening.messages[i]["role"] == "assistant")
    check_not_learned({i: opening.weights[i] for i in of_answers})
    answer, weights = answer_of(cells, "completion")
    n, messages = len(opening.messages), (*opening.messages, *answer)
    weights = {**opening.weights, **shift(weights, n)}
    read_only = frozenset(range(n)) - opening.rounds | not_learned(messages, weights)
    return _chat(place, cells, messages, read_only, weights, "completion")


def answer_of(cells: Cells, part: str) -> tuple[Messages, Weights]:
    """An answer as messages: a text is the assistant's."""
    if cells.holds_messages(part):
        return messages_at(cells, part)
    return ({"role": "assistant", "content": cells.text(part)},), {}


def _chat(
    place: RowPlace,
    cells: Cells,
    messages: Messages,
    read_only: frozenset[int],
    weights: Weights,
    part: str,
) -> ChatRow:
    answers = [m for i, m in enumerate(messages) if i not in read_only]
    if not any(m["content"] or m.get("tool_calls") for m in answers):
        name = cells.names[part]
        raise BadValue(f'is an object whose "{name}" has no answer of the assistant to learn')
    return ChatRow(place, messages, tools(cells), read_only, weights, weight(cells))


TRAINING_SHAPES = (
    Shape((CHAT,), _of_messages, (*OF_CHATS, *FLAGS)),
    Shape((INSTRUCTION, ANSWER), _of_prompt, (*OF_INSTRUCTIONS, *FLAGS)),
    Shape((TEXT,), _of_text, FLAGS),
    Shape((PROMPT, ANSWER), _of_prompt, (*OF_PROMPTS, *FLAGS)),
)
