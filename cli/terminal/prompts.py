"""Data → the prompts in it: chats to be answered, or gone on with, and texts to be continued.

A record is a row as for training, preferring or eval, of which what comes before the answer counts;
messages and a "prompt" need no answer. A file of JSON may also be one list of messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyggml.chat.messages import (
    BadValue,
    Messages,
    checked_text,
    is_message,
    kind_of,
    messages_of,
    tools_of,
)
from pyggml.cli.terminal.data_files import data_files
from pyggml.errors import DataError
from pyggml.lora.data.reading.files import format_of, records
from pyggml.lora.data.records import Schema, schema_of
from pyggml.lora.data.records.rows import (
    ChatRow,
    CompletionRow,
    LabelledRow,
    PreferenceRow,
    QuestionRow,
    Row,
    RowPlace,
)

_CHATS = ("messages", "conversations")
_PURPOSES = ("question", "pairs", "labels", "training")
_WANTED = 'wanted {"messages": [{"role": "user", "content": "..."}]}, {"prompt": "..."} or rows'


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt: a text, or messages with the functions that the assistant may call; and the answer
    that the file has, if it has one.

    is_question: a text that models with a chat template read as a chat, as in training
    """

    place: RowPlace
    prompt: str | Messages
    answer: str | Messages = ()
    tools: tuple[dict[str, Any], ...] = ()
    is_question: bool = False

    @property
    def as_chat(self) -> AskedPrompt:
        """A question and its answer as messages; others as they are."""
        if not self.is_question:
            return self
        prompt, answer = (
            ({"role": role, "content": text},)
            for role, text in (("user", self.prompt), ("assistant", self.answer))
        )
        return AskedPrompt(self.place, prompt, answer)

    @property
    def messages(self) -> Messages:
        """The chat with its answer. BadValue for a text."""
        if isinstance(self.prompt, str) or isinstance(self.answer, str):
            raise BadValue("has no messages")
        return (*self.prompt, *self.answer)


def read_prompts(data: Sequence[Path], columns: Sequence[str] | None = None) -> list[AskedPrompt]:
    """The prompts in some data, one at least. Raises DataError with the first row that has none."""
    schema = schema_of(columns)
    return [row for path in data_files(data, columns) for row in _of_file(path, schema)]


def _of_file(path: Path, schema: Schema) -> list[AskedPrompt]:
    kind = format_of(path, schema)
    if kind == "text":
        raise DataError(f"{path}: is text, {_WANTED}")
    rows = [*records(path, kind, schema)]
    if kind == "JSON" and rows and all(is_message(value) for _, value in rows):
        rows = [(rows[0][0], {"messages": [value for _, value in rows]})]
    if not rows:
        raise DataError(f"{path}: has no rows; {_WANTED}")
    try:
        return [*_of_records(rows, schema)]
    except BadValue as bad:
        raise DataError(f"{path}: {bad}; {_WANTED}") from None


def _of_records(rows: Sequence[tuple[RowPlace, Any]], schema: Schema) -> Iterator[AskedPrompt]:
    for place, value in rows:
        try:
            if isinstance(value, BadValue):
                raise value
            if not isinstance(value, dict):
                raise BadValue(f"is a {kind_of(value)}")
            yield _of_record(place, value, schema)
        except BadValue as bad:
            raise BadValue(bad.at(place)) from None


def _of_record(place: RowPlace, record: dict[str, Any], schema: Schema) -> AskedPrompt:
    """Raises BadValue for a record that asks nothing."""
    name = next((name for name in _CHATS if name in record and not schema.columns), None)
    if name is not None:
        messages, _ = messages_of(record[name])
        if record.get("system") and messages[0]["role"] != "system":
            system = [{"role": "system", "content": record["system"]}]
            messages = (*messages_of(system)[0], *messages)
        return _of_chat(place, messages, tools_of(record.get("tools")))
    for purpose in _PURPOSES:
        of_purpose = replace(schema, purpose=purpose)
        if of_purpose.fits(record):
            return _of_row(of_purpose.row(place, record))
    if "prompt" not in record:
        raise BadValue('has neither "messages" nor a "prompt"')
    if isinstance(record["prompt"], list):
        return _of_chat(place, messages_of(record["prompt"])[0], tools_of(record.get("tools")))
    return AskedPrompt(place, checked_text(record["prompt"], may_be_empty=False))


def _of_chat(place: RowPlace, messages: Messages, tools: tuple[dict[str, Any], ...]) -> AskedPrompt:
    """A chat, whose last messages are the answer if they are the assistant's."""
    n = len(messages)
    while n and messages[n - 1]["role"] == "assistant":
        n -= 1
    if not n:
        raise BadValue("has an answer alone, and nothing that is asked")
    return AskedPrompt(place, messages[:n], messages[n:], tools)


def _of_row(row: Row) -> AskedPrompt:
    match row:
        case ChatRow():
            return _of_chat(row.place, row.messages, row.tools)
        case PreferenceRow():
            prompt = AskedPrompt(row.place, row.prompt, row.chosen, row.tools)
        case LabelledRow():
            prompt = AskedPrompt(row.place, row.prompt, row.completion, row.tools)
        case CompletionRow():
            prompt = AskedPrompt(row.place, row.prompt, row.completion, (), row.is_answer)
        case QuestionRow():
            prompt = AskedPrompt(row.place, row.prompt, row.choices[row.answer])
        case _:
            raise BadValue("is a text, in which nothing is asked")
    if not prompt.prompt:
        raise BadValue("has no prompt")
    return prompt
