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
4. where it writes earlier messages in another way, too: what the prompt has behind the last word
   before the answer, and a chat that ends with the answer behind its last word, stand there

What the template puts before every answer, such as an empty <think> block, is no answer.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from pyggml.chat.calls import probe_tool
from pyggml.chat.marks import MARK
from pyggml.chat.template import REASONING, ChatTemplate, Message, Tools
from pyggml.chat.words import flat, map_words, words_of
from pyggml.errors import TemplateError

ASSISTANT = "assistant"
_SENTENCE = re.compile(r"\w{3,}\s+\w{3,}")
_TAG = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
# A text up to a tag that white space, another tag or nothing follows.
_MARK_ALONE = re.compile(r".*?(?:<[^<>]*>|\[[^\[\]]*\])(?=\s|[<\[]|$)", re.DOTALL)
_SAID = "an answer"
_TOOL = probe_tool("a", "b", {})
_ESCAPED_MARK = "\\ufdd2"
_REWRITTEN = ("tool_calls", *REASONING)


@dataclass(frozen=True, slots=True)
class AnswerSpan:
    """Characters [start, end) of a text are an answer. The token that ends it lies before
    `limit`. is_open: without such a token, all before the limit is the answer."""

    start: int
    end: int
    limit: int
    is_open: bool = False


def find_answers(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools = None
) -> tuple[str, list[tuple[int, AnswerSpan]]]:
    """The text of a chat that ends with the assistant's message, and all answers in order.

    Raises TemplateError as `render` does, and if the range of an answer cannot be found exactly.
    """
    numbers = [i for i, m in enumerate(messages) if m["role"] == ASSISTANT]
    if template.for_tools(tools).marks_answers:
        return _read_marks(template, messages, tools, numbers)
    text = template.render(messages, tools)
    probes = _Probes(template, messages, tools, text)
    answers = probes.all_at_once(numbers) or probes.one_by_one(numbers)
    return text, [*zip(numbers, answers, strict=True)]


def _read_marks(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools, numbers: Sequence[int]
) -> tuple[str, list[tuple[int, AnswerSpan]]]:
    """As the template marks them with {% generation %}, each in a block or in several.

    Which blocks are a message's is told by the chat that ends with it: it has those up to there.
    """
    text, ranges = template.render_marked(messages, tools)
    answers = [AnswerSpan(start, end, end) for start, end in ranges]
    if len(answers) == len(numbers):
        return text, [*zip(numbers, answers, strict=True)]
    counts = [len(template.render_marked(messages[: i + 1], tools)[1]) for i in numbers]
    if counts[-1] != len(answers) or any(a >= b for a, b in pairwise([0, *counts])):
        raise TemplateError(
            f"{template.origin}: marks {len(ranges)} parts with {{% generation %}}, of which it is "
            f"not clear which are of the {len(numbers)} answers"
        )
    owners = [i for i, n in zip(numbers, pairwise([0, *counts]), strict=True) for _ in range(*n)]
    return text, [*zip(owners, answers, strict=True)]


def open_end(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools = None
) -> tuple[str, int]:
    """The text of a chat, and where the content of its last message ends, which the assistant began
    and is to go on with.

    Raises TemplateError as `find_answers`, and for a last message that cannot be gone on with.
    """
    last = messages[-1] if messages else {}
    content = last.get("content")
    if last.get("role") != ASSISTANT or last.get("tool_calls"):
        raise TemplateError("ends with no words of the assistant, which could be continued")
    if not isinstance(content, str) or not content.strip():
        raise TemplateError("ends with an answer that has no words to go on from")
    text, answers = find_answers(template, messages, tools)
    parts = [answer for i, answer in answers if i == len(messages) - 1]
    begun = content.rstrip()
    at = text.rfind(begun, parts[0].start, parts[-1].end)
    if at < 0:
        raise TemplateError(f"{template.origin}: changes the words that are to be continued")
    end = at + len(begun)
    space = content[len(begun) :]
    return text, end + len(space) if text.startswith(space, end) else end


def answer_ending(template: ChatTemplate) -> str:
    """The text that ends an answer, such as "<|im_end|>"; "" if that is unclear.

    Where the template writes several marks it is the first: a model may end with the token of
    another. Where it ends a turn as the next begins, it is the first mark between the two.
    """
    chat = [{"role": "user", "content": "question"}, {"role": ASSISTANT, "content": _SAID}]
    ending = _after_answer(template, chat).strip()
    if ending:
        mark = _MARK_ALONE.match(ending)
        return mark[0] if mark else ending
    mark = _TAG.match(_after_answer(template, chat * 2).strip())
    return mark[0] if mark else ""


def _after_answer(template: ChatTemplate, chat: Sequence[Message]) -> str:
    """What a template writes after the words of the first answer; with a tool if it fails without.
    A range that {% generation %} marks has more than the words."""
    for tools in (None, [_TOOL]):
        try:
            text, answers = find_answers(template, chat, tools)
        except TemplateError:
            continue
        first = answers[0][1]
        at = text.rfind(_SAID, first.start, first.end)
        return text[first.end if at < 0 else at + len(_SAID) :]
    return ""


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
        rest = self.template.try_render(changed, self.tools)
        if rest is None:
            return None
        parts = []
        for probe in probes.values():
            before, has_probe, rest = rest.partition(probe)
            parts.append(before)
            if not has_probe:
                return None
        parts.append(rest)
        return None if any(self.name in part for part in parts) else parts

    def all_at_once(self, numbers: Sequence[int]) -> list[AnswerSpan] | None:
        """All answers, if each is its message's content, white space around it aside."""
        parts = self.around(numbers)
        if parts is None:
            return None
        answers, at = [], len(parts[0])
        for i, before, after in zip(numbers, parts, parts[1:], strict=False):
            end = self._verbatim(self.messages[i], at, before, after)
            if end is None:
                return None
            answers.append(AnswerSpan(at, end, end + self._ending(i, after, parts[-1])))
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

    def one_by_one(self, numbers: Sequence[int]) -> list[AnswerSpan]:
        """All answers, found one at a time; TemplateError for the first without an exact range."""
        last = self.around(numbers[-1:])
        ending = last[1] if last else ""
        answers = [self._single(i, ending) for i in numbers]
        for i, answer in zip(numbers, answers, strict=True):
            content = self.messages[i].get("content")
            if answer.start == answer.end and isinstance(content, str) and content.strip():
                raise TemplateError(f"{self.template.origin}: leaves out message {i + 1}")
        return answers

    def _single(self, i: int, ending: str) -> AnswerSpan:
        for answer in (self._by_parts(i, ending), self._by_prefix(i)):
            if answer is not None and self._is_alone(i, answer):
                return answer
        answer = self._between_words(i)
        if answer is None or not self._is_alone(i, answer):
            raise TemplateError(
                f"{self.template.origin}: changes what it wrote of message {i + 1}, so that its "
                "tokens cannot be told from the others"
            )
        return answer

    def _by_parts(self, i: int, ending: str) -> AnswerSpan | None:
        parts = self.around([i])
        if parts is None:
            return None
        before, after = parts
        start = self._start(i, before)
        end = len(self.text) - len(after)
        if start is None or start > end or not self.text.endswith(after):
            return None
        return AnswerSpan(start, end, end + self._ending(i, after, ending))

    def _ending(self, i: int, after: str, last: str) -> int:
        """How much of the text after answer i is the end of its turn: what it has in common with
        that after the last answer. Where a template ends a turn when the next begins (Apertus,
        Hy 3), it is what stands before the heading of that next one, as the first question has."""
        first = next((k for k, m in enumerate(self.messages) if m["role"] == "user"), i)
        if last or not first < i < len(self.messages) - 1 or self.messages[i + 1]["role"] != "user":
            return _common(after, last)
        words = [self.messages[k].get("content") for k in (first, i + 1)]
        if not all(isinstance(word, str) and word.strip() for word in words):
            return 0
        before, heading = (
            text.partition(str(word).strip())
            for text, word in zip((self.text, after), words, strict=True)
        )
        if not before[1] or not heading[1]:
            return 0
        n = _common(heading[0][::-1], before[0][::-1])
        shared = heading[0][len(heading[0]) - n :]
        opening = re.match(r"[^<>\[\]]*[>\]]", shared)  # the end of a tag that differs
        return len(heading[0]) - n + (opening.end() if opening else 0)

    def _by_prefix(self, i: int) -> AnswerSpan | None:
        start = self._start(i, None)
        through = self._prefix(self.messages[: i + 1], False)
        if start is None or through is None or start > len(through.rstrip()):
            return None
        end = len(through.rstrip())
        return AnswerSpan(start, end, end)

    def _is_alone(self, i: int, answer: AnswerSpan) -> bool:
        """Whether the range holds the words of one message with calls and of no later message.

        It is a guess: the messages after a call may name it again, and its content may come later.
        """
        if not self.messages[i].get("tool_calls"):
            return True
        told, after = (self._word_ends(i, n, where="call") for n in (None, i + 1))
        if told and after and len(told[0]) >= len(after[0]):
            n = len(after[0])
            if told[0][n - 1] > answer.end or any(at <= answer.end for at in told[0][n:]):
                return False
        later = self._word_ends(i + 1, None) if i + 1 < len(self.messages) else None
        if later is None:
            return True
        said = self._word_ends(i, None, where="content")
        return later[0][0] > answer.end and (said is None or said[0][-1] < later[0][0])

    def _between_words(self, i: int) -> AnswerSpan | None:
        """The answer from where the template asks for it, behind the last word of the message
        before, to where a chat ends that has no more messages; None if that is not exact."""
        where = "call" if self.messages[i].get("tool_calls") else ""
        told, after = (self._word_ends(i, n, where=where) for n in (None, i + 1))
        asked = self._word_ends(i - 1, None)
        if not asked or not told or not after or len(told[0]) < len(after[0]):
            return None
        rest = after[1][after[0][-1] :]
        if self._instructs(i, rest):
            return None
        end = told[0][len(after[0]) - 1]  # later messages may name a call again
        headings = (self._heading_end(i, at) for at in asked[0])
        starts = [start for start in headings if start is not None and start < told[0][0]]
        if not starts:
            return None
        shared = _common(rest, self.text[end:])
        if shared < len(rest.rstrip()):
            shared = len(_whole_tags(rest[:shared]))
        return AnswerSpan(starts[-1], end, end + shared, is_open=True)

    def _instructs(self, i: int, rest: str) -> bool:
        """Whether the template ends every chat with words of its own, whoever speaks last."""
        asked = self._word_ends(i - 1, i)
        behind = asked[1][asked[0][-1] :] if asked else ""
        both = rest[len(rest) - _common(rest[::-1], behind[::-1]) :]
        return _SENTENCE.search(_TAG.sub("", both)) is not None

    def _heading_end(self, i: int, at: int) -> int | None:
        """Where the answer begins behind a heading, if the last word before it ends at this place.

        A heading is what the prompt for the answer has behind that word, or what another answer in
        its place would have there. The text may have all of it, or only its first tags, as where a
        thought opens. None if it has nothing of a heading.
        """
        prompt, around = self._word_ends(i - 1, i, True), self.around([i])
        headings = [prompt[1][prompt[0][-1] :]] if prompt else []
        if around and self.text.startswith(around[0][:at]):
            headings.append(around[0][at:])
        if not headings:
            return None
        rest = self.text[at:]
        whole = [heading for heading in headings if rest.startswith(heading)]
        begun = [_whole_tags(heading[: _common(heading, rest)]) for heading in headings]
        heading = max(whole or begun, key=len)
        return at + len(heading) if heading else None

    def _word_ends(
        self, i: int, n: int | None, asks: bool = False, where: str = ""
    ) -> tuple[list[int], str] | None:
        """Where the words of message i, or those of one kind, end in the text of the first n
        messages, and that text; None if that cannot be told."""
        if i < 0:
            return None
        messages = [*self.messages[:n]]
        changed = [*messages]
        changed[i] = map_words(messages[i], partial(_mark_end, where))
        text, marked = (self.template.try_render(m, self.tools, asks) for m in (messages, changed))
        if text is None or marked is None:
            return None
        parts = marked.replace(_ESCAPED_MARK, MARK).split(MARK)
        if len(parts) == 1 or "".join(parts) != text:
            return None
        words = tuple(flat(word.text) for word in words_of(i, messages[i]))
        if not all(flat(part).endswith(words) for part in parts[:-1]):  # written backwards, say
            return None
        return list(accumulate(map(len, parts[:-1]))), text

    def _start(self, i: int, before: str | None) -> int | None:
        if before is not None and self.text.startswith(before):
            return len(before)
        prompt = self._prefix(self.messages[:i], True)
        return None if prompt is None else len(prompt)

    def _prefix(self, messages: Sequence[Message], asks: bool) -> str | None:
        """The rendering of these first messages, if the text begins with it."""
        text = self.template.try_render(messages, self.tools, asks)
        return text if text is not None and self.text.startswith(text) else None


def _mark_end(mark: str, text: str, where: str) -> str:
    """A word with a mark behind it, before white space, if it is of the kind that is wanted."""
    word = text.rstrip() if mark in ("", where) else ""
    return f"{word}{MARK}{text[len(word) :]}" if word else text


def _whole_tags(text: str) -> str:
    """The text up to a tag that it only begins."""
    first = max(text.rfind("<"), text.rfind("["))
    is_whole = first < 0 or any(end in text[first:] for end in ">]")
    return text if is_whole else text[:first]


def _common(a: str, b: str) -> int:
    """The length of the longest common start of both."""
    same = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(same, min(len(a), len(b)))
