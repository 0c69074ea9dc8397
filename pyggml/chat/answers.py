"""Where in the rendered text of a chat the assistant's answers stand, whatever the template.

A template with {% generation %} says so itself. For any other, the answers are replaced by probes,
texts that occur nowhere else, and rendered again. What stands around a probe is the template's, and
depends on no answer. The range of an answer is accepted if the text is made of exactly these parts:

1. all answers replaced at once: parts and answers in turn, joined, are the text
2. where that fails, because a template rewrites answers (calls of tools, thoughts): one by one; the
   text begins with what stands before the probe, or with the prompt for this answer, and ends with
   what stands behind
3. where the template refuses a probe: the text begins with the prompt for this answer, and with all
   messages up to it

What the template puts before every answer, such as an empty <think> block, is no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyggml.chat.template import ChatTemplate, Message
from pyggml.errors import TemplateError

ASSISTANT = "assistant"
Tools = Sequence[dict[str, Any]] | None
_REWRITTEN = ("tool_calls", "reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Answer:
    """Characters [start, end) of a text are an answer. The token that ends it lies before
    `limit`."""

    start: int
    end: int
    limit: int


def find_answers(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools = None
) -> tuple[str, list[Answer]]:
    """The text of a chat that ends with the assistant's message, and all answers in order.

    Raises TemplateError as `render` does, and if the range of an answer cannot be found exactly.
    """
    numbers = [i for i, m in enumerate(messages) if m["role"] == ASSISTANT]
    if template.marks_answers:
        text, ranges = template.render_marked(messages, tools)
        if len(ranges) != len(numbers):
            raise TemplateError(
                f"{template.origin}: marks {len(ranges)} answers with {{% generation %}}, and "
                f"there are {len(numbers)}"
            )
        return text, [Answer(start, end, end) for start, end in ranges]
    text = template.render(messages, tools)
    probes = _Probes(template, messages, tools, text)
    return text, probes.all_at_once(numbers) or probes.one_by_one(numbers)


def answer_ending(template: ChatTemplate) -> str:
    """What the template writes after an answer, such as "<|im_end|>\\n"; "" if that is unclear."""
    chat = [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
    try:
        text, answers = find_answers(template, chat)
    except TemplateError:
        return ""
    return text[answers[-1].end :]


class _Probes:
    """Renderings of a chat with probes in place of answers."""

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Message], tools: Tools, text: str
    ) -> None:
        self.template, self.messages, self.tools, self.text = template, messages, tools, text
        salt = 0
        while f"answer{salt}x" in text:
            salt += 1
        self.name = f"answer{salt}x"

    def around(self, numbers: Sequence[int]) -> list[str] | None:
        """The text before, between and after these answers; None if the template refuses."""
        probes = {i: f"{self.name}{i}x" for i in numbers}
        changed = [
            {"role": ASSISTANT, "content": probes[i]} if i in probes else message
            for i, message in enumerate(self.messages)
        ]
        try:
            rest = self.template.render(changed, self.tools)
        except TemplateError:
            return None
        parts = []
        for probe in probes.values():
            before, has_probe, rest = rest.partition(probe)
            parts.append(before)
            if not has_probe:
                return None
        parts.append(rest)
        return None if any(self.name in part for part in parts) else parts

    def all_at_once(self, numbers: Sequence[int]) -> list[Answer] | None:
        """All answers, if each is its message's content, white space around it aside."""
        parts = self.around(numbers)
        if parts is None:
            return None
        answers, at = [], len(parts[0])
        for i, before, after in zip(numbers, parts, parts[1:], strict=False):
            end = self._verbatim(self.messages[i], at, before, after)
            if end is None:
                return None
            answers.append(Answer(at, end, end + _common(after, parts[-1])))
            at = end + len(after)
        return answers if at == len(self.text) else None

    def _verbatim(self, message: Message, at: int, before: str, after: str) -> int | None:
        """The end of an answer that begins here; None if something else stands here."""
        content = message.get("content")
        if not isinstance(content, str) or any(name in message for name in _REWRITTEN):
            return None
        if not self.text.startswith(before, at - len(before)):
            return None
        for variant in (content, content.lstrip(), content.rstrip(), content.strip()):
            end = at + len(variant)
            if self.text.startswith(variant, at) and self.text.startswith(after, end):
                return end
        return None

    def one_by_one(self, numbers: Sequence[int]) -> list[Answer]:
        """All answers, found one at a time; TemplateError for the first without an exact range."""
        last = self.around(numbers[-1:])
        ending = last[1] if last else ""
        found = [self._single(i, ending) for i in numbers]
        for i, answer in zip(numbers, found, strict=True):
            content = self.messages[i].get("content")
            if answer.start == answer.end and isinstance(content, str) and content.strip():
                raise TemplateError(f"{self.template.origin}: leaves out message {i + 1}")
        return found

    def _single(self, i: int, ending: str) -> Answer:
        parts = self.around([i])
        if parts is not None:
            before, after = parts
            start = self._start(i, before)
            end = len(self.text) - len(after)
            if start is not None and start <= end and self.text.endswith(after):
                return Answer(start, end, end + _common(after, ending))
        start = self._start(i, None)
        through = self._prefix(self.messages[: i + 1], False)
        if start is None or through is None or start > len(through.rstrip()):
            raise TemplateError(
                f"{self.template.origin}: changes what it wrote of message {i + 1}, so that its "
                "tokens cannot be told from the others"
            )
        end = len(through.rstrip())
        return Answer(start, end, end)

    def _start(self, i: int, before: str | None) -> int | None:
        if before is not None and self.text.startswith(before):
            return len(before)
        prompt = self._prefix(self.messages[:i], True)
        return None if prompt is None else len(prompt)

    def _prefix(self, messages: Sequence[Message], asks: bool) -> str | None:
        """The rendering of these first messages, if the text begins with it."""
        try:
            text = self.template.render(messages, self.tools, add_generation_prompt=asks)
        except TemplateError:
            return None
        return text if self.text.startswith(text) else None


def _common(a: str, b: str) -> int:
    """The length of the longest common start of both."""
    same = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(same, min(len(a), len(b)))
