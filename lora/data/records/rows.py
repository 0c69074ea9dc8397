"""What one record of a file is for training, whatever its names there were.

TextRow         a text, of which every token is learned
CompletionRow   a prompt, which is read, and its completion, which is learned
ChatRow         the messages of a chat, of which those of the assistant are learned
PreferenceRow   a prompt with an answer that is preferred and one that is rejected
LabelledRow     a prompt with one answer, and whether it is wanted
QuestionRow     a prompt with choices, one of them right
PromptRow       a prompt to which answers are sampled
ClassRow        a text and its class
GroupRow        a text, one that is near to it, and some that are not
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyggml.chat.messages import Messages, Weights
from pyggml.chat.words import ALPACA


@dataclass(frozen=True, slots=True)
class RowPlace:
    """The place of a row: the third line, item, record or row of a file, counted from 1.

    end: the last line of a record that spans several; 0 if `number` is already a line.
    """

    file: str
    unit: str
    number: int
    end: int = 0

    def __str__(self) -> str:
        """line 3, or record 2 (to line 5); a sentence names the file before."""
        end = f" (to line {self.end})" if self.end else ""
        return f"{self.unit} {self.number}{end}" if self.number else f"the {self.unit}"


@dataclass(frozen=True, slots=True)
class TextRow:
    """A text that is not empty.

    plain: it is a plain text file, not a row that was written for training.
    weight: of its tokens in the loss, as of all rows that are learned
    """

    place: RowPlace
    text: str
    plain: bool = False
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class CompletionRow:
    """A completion that is not empty, after a prompt that may be.

    is_answer: to a question, so that models with a chat template read both as a chat
    """

    place: RowPlace
    prompt: str
    completion: str
    weight: float = 1.0
    is_answer: bool = False


@dataclass(frozen=True, slots=True)
class ChatRow:
    """Messages, at least one of them the assistant's and learned.

    tools       functions that the assistant may call: {"type": "function", "function": {"name":
                string, "description": string, "parameters": JSON schema}}
    read_only   numbers of messages that are not learned, though the assistant's
    weights     of messages whose file gives them one, 0 to 1
    """

    place: RowPlace
    messages: Messages
    tools: tuple[dict[str, Any], ...] = ()
    read_only: frozenset[int] = frozenset()
    weights: Weights = field(default_factory=dict)
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """A preferred answer and a rejected one; all three are strings, or all three are messages.

    The answers do not repeat the prompt, and differ. Answers that are messages start with the
    assistant's.

    read_only: numbers of messages of each answer that are not learned, counted from its start
    """

    place: RowPlace
    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages
    tools: tuple[dict[str, Any], ...] = ()
    read_only: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """One answer, and whether it is wanted; prompt and answer are strings, or both are messages.

    read_only: numbers of messages of the answer that are not learned
    """

    place: RowPlace
    prompt: str | Messages
    completion: str | Messages
    label: bool
    tools: tuple[dict[str, Any], ...] = ()
    read_only: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class QuestionRow:
    """A prompt, and choices to go on with, of which `choices[answer]` is right.

    Neither prompt nor choices are empty, and there are two choices at least.

    category   the subject that its set counts it to; "" where there are none
    worked     the right answer with its reasoning, for examples; "" where the set has none
    readings   what the answer's word may mean → the number of the choice that it is then, as long
               as the other rows of its file may tell; empty once they have
    """

    place: RowPlace
    prompt: str
    choices: tuple[str, ...]
    answer: int
    category: str = ""
    worked: str = ""
    readings: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt, a string or messages, to which the model writes answers as training goes.

    is_question   of a string: models with a chat template read it as a user's message
    columns       the whole record, by which answers are judged
    """

    place: RowPlace
    prompt: str | Messages
    tools: tuple[dict[str, Any], ...] = ()
    is_question: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClassRow:
    """A text and the name of its class, neither empty."""

    place: RowPlace
    text: str
    label: str


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A text, another that is to lie near to it, and hard negatives, which are not; none empty."""

    place: RowPlace
    anchor: str
    positive: str
    negatives: tuple[str, ...] = ()


_Learned = TextRow | CompletionRow | ChatRow | PreferenceRow | LabelledRow | QuestionRow
Row = _Learned | PromptRow | ClassRow | GroupRow


def texts_of(row: Row) -> list[str]:
    """The texts that a row is made of."""
    parts: tuple[str | Messages, ...]
    match row:
        case TextRow():
            parts = (row.text,)
        case CompletionRow():
            parts = (row.prompt, row.completion)
        case ChatRow():
            parts = (row.messages,)
        case PreferenceRow():
            parts = (row.prompt, row.chosen, row.rejected)
        case LabelledRow():
            parts = (row.prompt, row.completion)
        case QuestionRow():
            parts = (row.prompt, *row.choices)
        case PromptRow():
            parts = (row.prompt,)
        case ClassRow():
            parts = (row.text, row.label)
        case GroupRow():
            parts = (row.anchor, row.positive, *row.negatives)
    texts = [[part] if isinstance(part, str) else _texts_in(part) for part in parts]
    return [text for of_part in texts for text in of_part if text]


def _texts_in(messages: Messages) -> Iterator[str]:
    for message in messages:
        names = ALPACA if ALPACA[0] in message else ("content",)
        yield from (message.get(name, "") for name in names)
