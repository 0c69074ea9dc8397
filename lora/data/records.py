"""A record, which is a dict of a file's names, → a row, by the names that it has.

names                                 row              for
messages [system, tools]              ChatRow          training
conversations [system, tools]         ChatRow          training
instruction, output [input, system]   ChatRow          training
text                                  TextRow          training
prompt, completion [tools]            CompletionRow    training; a ChatRow if both are messages
chosen, rejected [prompt, tools]      PreferenceRow    pairs
prompt, completion, label [tools]     LabelledRow      labels
see `questions`                       QuestionRow      question

The first line whose names a record has decides. A column map gives names of the file for these.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyggml.errors import ConfigError
from pyggml.lora.data.messages import kind_of, messages_of, tools_of
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
)
from pyggml.lora.data.shapes import Record, Shape, read_text, read_value

_LABELS = {"true": True, "1": True, "false": False, "0": False}
Answer = str | Messages


def _tools(record: Record) -> tuple[dict[str, Any], ...]:
    tools: tuple[dict[str, Any], ...] = read_value(record, "tools", tools_of)
    return tools


# -- for training -------------------------------------------------------------------------------


def _of_text(place: Place, record: Record) -> Row:
    return TextRow(place, read_text(record, "text"))


def _of_prompt(place: Place, record: Record) -> Row:
    if any(isinstance(record.get(name), list) for name in ("prompt", "completion")):
        prompt, _ = read_value(record, "prompt", messages_of)
        completion, read_only = read_value(record, "completion", messages_of)
        first = len(prompt)
        asked = frozenset(range(first)) | {first + i for i in read_only}
        return _chat(place, record, prompt + completion, asked, "completion")
    prompt = read_text(record, "prompt", may_be_empty=True)
    return CompletionRow(place, prompt, read_text(record, "completion"))


def _of_messages(name: str) -> Callable[[Place, Record], Row]:
    def make(place: Place, record: Record) -> Row:
        messages, read_only = read_value(record, name, messages_of)
        if record.get("system") and messages[0]["role"] != "system":
            messages = (*_system(record), *messages)
            read_only = frozenset({0}) | {i + 1 for i in read_only}
        return _chat(place, record, messages, read_only, name)

    return make


def _system(record: Record) -> Messages:
    """The message that a record's "system" is, if it has one."""
    if not record.get("system"):
        return ()
    return ({"role": "system", "content": read_text(record, "system")},)


def _chat(
    place: Place, record: Record, messages: Messages, read_only: frozenset[int], name: str
) -> ChatRow:
    said = [m for i, m in enumerate(messages) if i not in read_only]
    if not any(m["content"] or m.get("tool_calls") for m in said):
        raise BadRow(f'is an object whose "{name}" has no answer of the assistant to learn')
    return ChatRow(place, messages, _tools(record), read_only)


def _of_instruction(place: Place, record: Record) -> Row:
    instruction = read_text(record, "instruction")
    given = read_text(record, "input", may_be_empty=True) if record.get("input") is not None else ""
    asked = f"{instruction}\n\n{given}" if given else instruction
    system = _system(record)
    answer = {"role": "assistant", "content": read_text(record, "output")}
    messages = (*system, {"role": "user", "content": asked}, answer)
    read_only = frozenset(range(len(messages) - 1))
    return ChatRow(place, messages, (), read_only, alpaca=(instruction, given))


# -- for preference training --------------------------------------------------------------------


def _answer(record: Record, name: str) -> Answer:
    """A string, or messages."""
    if isinstance(record.get(name), list):
        messages: Messages = read_value(record, name, messages_of)[0]
        return messages
    return read_text(record, name)


def _of_chosen(place: Place, record: Record) -> Row:
    chosen, rejected = _answer(record, "chosen"), _answer(record, "rejected")
    if isinstance(chosen, str) != isinstance(rejected, str):
        kinds = [kind_of(record[name]) for name in ("chosen", "rejected")]
        raise BadRow('is an object whose "chosen" is a {} and "rejected" a {}'.format(*kinds))
    if chosen == rejected:
        raise BadRow('is an object whose "chosen" and "rejected" are the same')
    prompt = _prompt(record, chosen)
    if not prompt:
        n = _n_shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:n], chosen[n:], rejected[n:]
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        _check_answer(name, answer)
    return PreferenceRow(place, prompt, chosen, rejected, _tools(record))


def _prompt(record: Record, answer: Answer) -> Answer:
    """The prompt in the form of the answer; empty if there is none, or the answer repeats it."""
    prompt = record.get("prompt")
    if prompt is None:
        return () if isinstance(answer, tuple) else ""
    if isinstance(answer, str):
        return read_text(record, "prompt", may_be_empty=True)
    if isinstance(prompt, str):
        asked: Messages = ({"role": "user", "content": read_text(record, "prompt")},)
    else:
        asked = read_value(record, "prompt", messages_of)[0]
    return () if answer[: len(asked)] == asked or answer[0]["role"] != "assistant" else asked


def _n_shared(chosen: Answer, rejected: Answer) -> int:
    """How much both start with, as TRL's `extract_prompt` counts it; a last space is not."""
    both = zip(chosen, rejected, strict=False)
    n = next((i for i, (a, b) in enumerate(both) if a != b), min(len(chosen), len(rejected)))
    return n - 1 if n and chosen[n - 1] == " " else n


def _check_answer(name: str, answer: Answer) -> None:
    if isinstance(answer, str):
        if not answer.strip():
            raise BadRow(f'is an object whose "{name}" has no answer beside the prompt')
    elif not answer or answer[0]["role"] != "assistant":
        raise BadRow(f'is an object whose "{name}" has no answer of the assistant after the prompt')


def _of_label(place: Place, record: Record) -> Row:
    completion = _answer(record, "completion")
    label = _LABELS.get(str(record.get("label")).lower())  # a table has words, or 0 and 1
    if label is None:
        raise BadRow('is an object whose "label" is neither true nor false')
    prompt = _prompt(record, completion)
    _check_answer("completion", completion)
    return LabelledRow(place, prompt, completion, label, _tools(record))


SHAPES: Mapping[str, tuple[Shape, ...]] = {
    "training": (
        Shape(("messages",), _of_messages("messages"), ("system", "tools")),
        Shape(("conversations",), _of_messages("conversations"), ("system", "tools")),
        Shape(("instruction", "output"), _of_instruction, ("input", "system")),
        Shape(("text",), _of_text),
        Shape(("prompt", "completion"), _of_prompt, ("tools",)),
    ),
    "pairs": (Shape(("chosen", "rejected"), _of_chosen, ("prompt", "tools")),),
    "labels": (Shape(("prompt", "completion", "label"), _of_label, ("tools",)),),
    "question": QUESTION_SHAPES,
}
_WANTED = {
    "training": '"text" that is not empty, or with "prompt" and "completion", or "messages", or '
    '"conversations", or "instruction" and "output"',
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
        rows = sorted((" and ".join(s.names) for s in SHAPES[self.purpose]), key=len)
        return f"wanted {', or '.join(rows)}, among them"

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
        for shape in SHAPES[self.purpose]:
            if all(name in fields for name in shape.names):
                return shape.make(place, fields)
        there = ", ".join(str(key)[:20] for key in list(record)[:5]) or "nothing"
        missing = "text" if self.purpose == "training" else SHAPES[self.purpose][0].names[0]
        missing = next((column for _, column in self.columns if column not in record), missing)
        raise BadRow(f'is an object without "{missing}" (it has {there})')

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
