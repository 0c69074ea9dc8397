"""A record, which is a dict of a file's names, → a row, by the names that it has.

names                                  row              for
messages [system, tools]               ChatRow          training
conversations [system, tools]          ChatRow          training
instruction, output [input, system]    ChatRow          training
instruction, response [context, system]   ChatRow       training
text                                   TextRow          training
prompt, completion [tools, context]    CompletionRow    training; a ChatRow if both are messages
chosen, rejected [prompt, tools]       PreferenceRow    pairs
prompt, completion, label [tools]      LabelledRow      labels
see `questions`                        QuestionRow      question

A prompt may also be named question, query or input, and a completion response, answer or output.
Rows for training may have "weight", 0 to 1, or "train", true or false.
The first line whose names a record has decides. A column map gives names of the file for these.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from pyggml.errors import ConfigError
from pyggml.lora.data.columns import suggestion
from pyggml.lora.data.messages import (
    flag_of,
    kind_of,
    messages_of,
    not_learned,
    share_of,
    tools_of,
    weight_of,
)
from pyggml.lora.data.questions import QUESTION_SHAPES
from pyggml.lora.data.rows import (
    BadRow,
    ChatRow,
    CompletionRow,
    LabelledRow,
    Messages,
    Place,
    PreferenceRow,
    Row,
    TextRow,
    Weights,
)
from pyggml.lora.data.shapes import Record, Shape, read_text, read_value

Answer = str | Messages
_PROMPTS = ("prompt", "question", "query", "input")
_COMPLETIONS = ("completion", "response", "answer", "output")
_ANSWERED = tuple(product(_PROMPTS, _COMPLETIONS))  # the first names that a record has count
_FLAGS = ("weight", "train")


def _tools(record: Record) -> tuple[dict[str, Any], ...]:
    tools: tuple[dict[str, Any], ...] = read_value(record, "tools", tools_of)
    return tools


# -- for training -------------------------------------------------------------------------------


def _weight(record: Record) -> float:
    """How much the row counts. BadRow for one of which nothing is to be learned."""
    for name, read in (("weight", share_of), ("train", flag_of)):
        if record.get(name) is not None:
            read_value(record, name, read)
    try:
        weight = weight_of(record)
    except BadRow as bad:
        raise BadRow(f"is an object that {bad}", says_all=True) from None
    if weight == 0:
        raise BadRow("has the weight 0, so nothing of it is learned: leave it out", says_all=True)
    return 1.0 if weight is None else weight


def _of_text(place: Place, record: Record) -> Row:
    return TextRow(place, read_text(record, "text"), weight=_weight(record))


def _of_prompt(prompt_name: str, name: str) -> Callable[[Place, Record], Row]:
    def make(place: Place, record: Record) -> Row:
        _check_is_learned(record, prompt_name, name)
        if any(isinstance(record.get(n), list) for n in (prompt_name, name)):
            prompt, asked = read_value(record, prompt_name, messages_of)
            answer, weights = read_value(record, name, messages_of)
            first, messages = len(prompt), prompt + answer
            weights = {**asked, **_shift(weights, first)}
            read_only = frozenset(range(first)) | not_learned(messages, weights)
            return _chat(place, record, messages, read_only, weights, name)
        asks = read_text(record, prompt_name, may_be_empty=True)
        if prompt_name != "prompt" and record.get("context"):
            asks = f"{read_text(record, 'context')}\n{asks}"
        return CompletionRow(place, asks, read_text(record, name), _weight(record))

    return make


def _check_is_learned(record: Record, prompt: str, name: str) -> None:
    """BadRow for rows that sft cannot learn as they are meant, though they have the names."""
    if (prompt, name) != _ANSWERED[0] and record.get("choices") is not None:
        fault = f'has "choices", among which `pyggml eval` asks: --columns prompt={prompt},'
        raise BadRow(f"{fault}completion={name} learns the answer alone", says_all=True)
    if str(record.get("label")).lower() in ("true", "false"):
        fault = f'has a "label", true or false, which {_LEARNED["labels"]}: to learn every answer'
        raise BadRow(f"{fault}, --columns prompt={prompt},completion={name}", says_all=True)


def _shift(weights: Weights, n: int) -> dict[int, float]:
    """The weights of messages that stand n places further on."""
    return {i + n: weight for i, weight in weights.items() if i + n >= 0}


def _of_messages(name: str) -> Callable[[Place, Record], Row]:
    def make(place: Place, record: Record) -> Row:
        messages, weights = read_value(record, name, messages_of)
        if record.get("system") and messages[0]["role"] != "system":
            messages, weights = (*_system(record), *messages), _shift(weights, 1)
        read_only = not_learned(messages, weights)
        return _chat(place, record, messages, read_only, weights, name)

    return make


def _system(record: Record) -> Messages:
    """The message that a record's "system" is, if it has one."""
    if not record.get("system"):
        return ()
    return ({"role": "system", "content": read_text(record, "system")},)


def _chat(
    place: Place,
    record: Record,
    messages: Messages,
    read_only: frozenset[int],
    weights: Weights,
    name: str,
) -> ChatRow:
    said = [m for i, m in enumerate(messages) if i not in read_only]
    if not any(m["content"] or m.get("tool_calls") for m in said):
        raise BadRow(f'is an object whose "{name}" has no answer of the assistant to learn')
    weight, tools = _weight(record), _tools(record)
    return ChatRow(place, messages, tools, read_only, weights=weights, weight=weight)


def _of_instruction(given_name: str, name: str) -> Callable[[Place, Record], Row]:
    def make(place: Place, record: Record) -> Row:
        instruction, given = read_text(record, "instruction"), ""
        if record.get(given_name) is not None:
            given = read_text(record, given_name, may_be_empty=True)
        asked = f"{instruction}\n\n{given}" if given else instruction
        answer = {"role": "assistant", "content": read_text(record, name)}
        messages = (*_system(record), {"role": "user", "content": asked}, answer)
        read_only = frozenset(range(len(messages) - 1))
        alpaca, weight = (instruction, given), _weight(record)
        return ChatRow(place, messages, (), read_only, alpaca=alpaca, weight=weight)

    return make


# -- for preference training --------------------------------------------------------------------


def _answer(record: Record, name: str) -> tuple[Answer, frozenset[int]]:
    """A string, or messages; and the numbers of the messages that are not learned."""
    if not isinstance(record.get(name), list):
        return read_text(record, name), frozenset()
    messages, weights = read_value(record, name, messages_of)
    for i, weight in weights.items():
        if weight not in (0, 1):
            fault = f'"{name}" has a message {i + 1} of the weight {weight:g}'
            raise BadRow(f"is an object whose {fault}, wanted 0 or 1: answers are compared whole")
        if weight and messages[i]["role"] != "assistant":
            fault = f'"{name}" has a message {i + 1} that is to be learned and is no answer'
            raise BadRow(f"is an object whose {fault} of the assistant")
    return messages, not_learned(messages, weights)


def _check_counts_whole(record: Record) -> None:
    """BadRow for a row that is to count less than others: what is compared counts alike."""
    if _weight(record) != 1:
        raise BadRow(f'has the "weight" {record["weight"]}, and rows that are compared count alike')


def _of_chosen(place: Place, record: Record) -> Row:
    _check_counts_whole(record)
    (chosen, read), (rejected, other) = _answer(record, "chosen"), _answer(record, "rejected")
    if isinstance(chosen, str) != isinstance(rejected, str):
        kinds = [kind_of(record[name]) for name in ("chosen", "rejected")]
        raise BadRow('is an object whose "chosen" is a {} and "rejected" a {}'.format(*kinds))
    if chosen == rejected:
        raise BadRow('is an object whose "chosen" and "rejected" are the same')
    prompt = _prompt(record, chosen)
    if not prompt:
        n = _n_shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:n], chosen[n:], rejected[n:]
        read, other = (frozenset(i - n for i in each if i >= n) for each in (read, other))
    for name, answer, skipped in (("chosen", chosen, read), ("rejected", rejected, other)):
        _check_answer(name, answer, skipped)
    return PreferenceRow(place, prompt, chosen, rejected, _tools(record), (read, other))


def _prompt(record: Record, answer: Answer) -> Answer:
    """The prompt in the form of the answer; empty if there is none, or the answer repeats it."""
    name = next((name for name in _PROMPTS if record.get(name) is not None), None)
    if name is None:
        return () if isinstance(answer, tuple) else ""
    if isinstance(answer, str):
        return read_text(record, name, may_be_empty=True)
    if isinstance(record[name], str):
        asked: Messages = ({"role": "user", "content": read_text(record, name)},)
    else:
        asked = read_value(record, name, messages_of)[0]
    return () if answer[: len(asked)] == asked or answer[0]["role"] != "assistant" else asked


def _n_shared(chosen: Answer, rejected: Answer) -> int:
    """How much both start with, as TRL's `extract_prompt` counts it; a last space is not."""
    both = zip(chosen, rejected, strict=False)
    n = next((i for i, (a, b) in enumerate(both) if a != b), min(len(chosen), len(rejected)))
    return n - 1 if n and chosen[n - 1] == " " else n


def _check_answer(name: str, answer: Answer, read_only: frozenset[int]) -> None:
    if isinstance(answer, str):
        if not answer.strip():
            raise BadRow(f'is an object whose "{name}" has no answer beside the prompt')
    elif not answer or answer[0]["role"] != "assistant":
        raise BadRow(f'is an object whose "{name}" has no answer of the assistant after the prompt')
    elif read_only >= set(range(len(answer))):
        raise BadRow(f'is an object whose "{name}" has no answer of the assistant to learn')


def _of_label(name: str) -> Callable[[Place, Record], Row]:
    def make(place: Place, record: Record) -> Row:
        _check_counts_whole(record)
        completion, read_only = _answer(record, name)
        label = read_value(record, "label", flag_of)
        prompt = _prompt(record, completion)
        _check_answer(name, completion, read_only)
        return LabelledRow(place, prompt, completion, label, _tools(record), read_only)

    return make


_OF_CHATS = ("system", "tools", *_FLAGS)
SHAPES: Mapping[str, tuple[Shape, ...]] = {
    "training": (
        Shape(("messages",), _of_messages("messages"), _OF_CHATS),
        Shape(("conversations",), _of_messages("conversations"), _OF_CHATS),
        Shape(("instruction", "output"), _of_instruction("input", "output"), ("input", *_OF_CHATS)),
        Shape(
            ("instruction", "response"),
            _of_instruction("context", "response"),
            ("context", *_OF_CHATS),
        ),
        Shape(("text",), _of_text, _FLAGS),
        *(
            Shape(names, _of_prompt(*names), ("tools", "context", "choices", "label", *_FLAGS))
            for names in _ANSWERED
        ),
    ),
    "pairs": (Shape(("chosen", "rejected"), _of_chosen, (*_PROMPTS, "tools", *_FLAGS)),),
    "labels": tuple(
        Shape((*names, "label"), _of_label(names[1]), ("tools", *_FLAGS)) for names in _ANSWERED
    ),
    "question": QUESTION_SHAPES,
}
_LEARNED = {  # what a row of another purpose is for
    "training": "--objective sft learns to write",
    "pairs": "--objective dpo (or orpo, simpo, ipo) learns to prefer",
    "labels": "--objective kto learns from",
    "question": "`pyggml eval` asks",
}
_WANTED = {
    "training": '"text" that is not empty, or with "prompt" and "completion" (or "question" and '
    '"answer", "input" and "output"), or "messages", or "conversations", or "instruction" and '
    '"output"',
    "pairs": '"chosen" and "rejected", which differ',
    "labels": '"prompt" and "completion", and a "label" that is true or false',
    "question": '"question" or "prompt", with a list "choices" and an "answer"',
}
NAMES = frozenset(name for some in SHAPES.values() for s in some for name in (*s.names, *s.others))


@dataclass(frozen=True, slots=True)
class Schema:
    """The kind of rows wanted, and the names of their parts in the files.

    purpose   "training", "pairs", "labels" or "question"
    columns   name of a row → name in the file; if given, no other names are read
    """

    purpose: str = "training"
    columns: tuple[tuple[str, str], ...] = ()

    @property
    def wanted(self) -> str:
        """What a faulty row lacks: the names wanted."""
        if self.columns:
            names = " and ".join(f'"{column}" ({name})' for name, column in self.columns)
            return f"wanted one JSON object with {names} on each line"
        what = f"wanted one JSON object with a string {_WANTED[self.purpose]}, on each line"
        return f"{what}; --columns maps other names to these"

    @property
    def wanted_columns(self) -> str:
        """Which columns a table should have had."""
        if self.columns:
            return f"wanted {', '.join(sorted(self.names))} among them"
        return f"wanted {', or '.join(self._rows)}, among them"

    @property
    def _rows(self) -> list[str]:
        """The names of each kind of row, without those that stand for a prompt and completion."""
        others = {*_PROMPTS[1:], *_COMPLETIONS[1:]}
        shapes = [s for s in SHAPES[self.purpose] if not others.issuperset(s.names[:1])]
        shapes = [s for s in shapes if s.names[0] != "prompt" or s.names[1] == "completion"]
        return sorted((" and ".join(s.names) for s in shapes), key=len)

    @property
    def names(self) -> frozenset[str]:
        """The names in the file that rows are made of."""
        return frozenset(column for _, column in self.columns) if self.columns else NAMES

    def has_row(self, names: Any) -> bool:
        """Whether these names of a file make a row, of whatever purpose."""
        fields = set(self._rename(dict.fromkeys(names)))
        return any(fields >= set(s.names) for some in SHAPES.values() for s in some)

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Whether a record has the names of a row of this purpose."""
        fields = self._rename(record)
        return any(fields.keys() >= set(s.names) for s in SHAPES[self.purpose])

    def row(self, place: Place, record: Any) -> Row:
        """The row of a record. Raises BadRow for a record without the names or values wanted."""
        if not isinstance(record, dict):
            raise BadRow(f"is a JSON {kind_of(record)}")
        fields = self._rename(record)
        shape = self._shape(fields)
        if shape is None:
            raise self._missing(record, fields)
        return shape.make(place, fields)

    def unread(self, record: Mapping[str, Any]) -> list[str]:
        """The names of a record that its row is not made of."""
        shape = self._shape(self._rename(record))
        read = {*shape.names, *shape.others} if shape else set()
        if self.columns:
            read = {column for name, column in self.columns if name in read}
        return [name for name in record if name not in read]

    def _shape(self, fields: Record) -> Shape | None:
        """The first shape whose names are all there."""
        for shape in SHAPES[self.purpose]:
            if all(name in fields for name in shape.names):
                return shape
        return None

    def _missing(self, record: Mapping[str, Any], found: Record) -> BadRow:
        """What to say of a record without the names of a row."""
        for purpose in ("pairs", "labels", "question", "training"):
            shapes = SHAPES[purpose]
            names = next((s.names for s in shapes if found.keys() >= set(s.names)), None)
            if names is not None and purpose != self.purpose:
                fault = f"has {' and '.join(names)}, which {_LEARNED[purpose]}"
                return BadRow(fault, says_all=True)
        there = ", ".join(str(key)[:20] for key in list(record)[:5]) or "nothing"
        if holds := [name for name, value in record.items() if self._are_rows(value)]:
            fault = f'is an object with rows in its "{holds[0][:20]}" (it has {there})'
            wanted = f"wanted that list alone, as `jq .{holds[0][:20]} FILE` writes it"
            return BadRow(f"{fault}, {wanted}", says_all=True)
        missing = "text" if self.purpose == "training" else SHAPES[self.purpose][0].names[0]
        missing = next((column for _, column in self.columns if column not in record), missing)
        return BadRow(f'is an object without "{missing}" (it has {there}){self.suggest(record)}')

    def _are_rows(self, value: Any) -> bool:
        first = value[0] if isinstance(value, list) and value else None
        return isinstance(first, dict) and self.has_row(first)

    def suggest(self, record: Mapping[str, Any]) -> str:
        """Ready columns for a record of other names, as the end of a sentence; "" if unclear."""
        columns = "" if self.columns else suggestion(record, self.purpose)
        return f": --columns {columns} may be meant" if columns else ""

    def _rename(self, record: Mapping[str, Any]) -> Record:
        if not self.columns:
            return dict(record)
        return {name: record[column] for name, column in self.columns if column in record}


TRAINING = Schema()


def schema_of(columns: Sequence[str] | None, purpose: str = "training") -> Schema:
    """A column map, each word such as `prompt=question`, for rows of this purpose.

    Raises ConfigError for names of which no row is made.
    """
    cut = [column.partition("=") for column in columns or ()]
    pairs = tuple((name.strip(), column.strip()) for name, _, column in cut)
    names = {name for name, _ in pairs}
    unknown = sorted(names - NAMES)
    if unknown:
        some = f"{unknown[0][:20]!r}, wanted some of {', '.join(sorted(NAMES))}"
        raise ConfigError([("columns", f"gives a row the name {some}")])
    if names and not any(names >= set(shape.names) for shape in SHAPES[purpose]):
        rows = "; or ".join(", ".join(shape.names) for shape in SHAPES[purpose])
        raise ConfigError([("columns", f"gives {', '.join(sorted(names))}, wanted {rows}")])
    return Schema(purpose, pairs)
