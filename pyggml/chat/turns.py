"""A chat template as turns: the text that it puts around the messages of each role.

Most templates write one message after the other, each between two texts of its role's. What these
texts are is found by rendering probes. It is then held against chats of several rounds, so that a
template which does more is refused, not written wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyggml.chat.template import ChatTemplate, Message
from pyggml.errors import TemplateError

Around = tuple[str, str]  # the texts before and after a message


@dataclass(frozen=True, slots=True)
class Turns:
    """The parts of a chat that begins with a user's message, or a system's and a user's.

    opening     before the first user's message, if there is no system's
    system      around the system's message, as far as the first user's; None: it has no place
    user        before every user's message but the first; after every one
    assistant   around the assistant's
    answer      before the answer that is to be written
    """

    opening: str
    system: Around | None
    user: Around
    assistant: Around
    answer: str

    def without(self, bos: str) -> Turns:
        """These turns for whoever puts BOS before a chat himself."""
        system = self.system and (self.system[0].removeprefix(bos), self.system[1])
        return replace(self, opening=self.opening.removeprefix(bos), system=system)

    def render(self, messages: Sequence[Message]) -> str:
        """The text up to the next answer."""
        text, begun = "", False
        for message in messages:
            before, after = self.assistant if message["role"] == "assistant" else self.user
            if message["role"] == "system":
                assert self.system is not None and not text
                before, after = self.system
                begun = True
            elif not text:
                before = self.opening
            elif begun:
                before, begun = "", False
            text += before + message["content"] + after
        return text + self.answer


def find_turns(template: ChatTemplate, eos: str = "") -> Turns:
    """The turns of a template. TemplateError if it writes chats in any other way.

    eos: the end of text, which some templates put after a chat that asks for no answer.
    """
    first, answer, second, system = _chat()
    opening, after_user = _parts(template.render([first]), first)
    _, asking = _parts(_render_probe(template, [first]), first)
    _, after_answer = _parts(template.render([first, answer]), answer)
    _, between, again, _ = _parts(
        _render_probe(template, [first, answer, second]), first, answer, second
    )
    if not asking.startswith(after_user):
        after_user = after_user.removesuffix(eos)
    if not again.startswith(after_answer):
        after_answer = after_answer.removesuffix(eos)
    try:
        before, following, _ = _parts(_render_probe(template, [system, first]), system, first)
        around_system = (before, following)
    except TemplateError:
        around_system = None
    turns = Turns(
        opening,
        around_system,
        (again.removeprefix(after_answer), after_user),
        (between.removeprefix(after_user), after_answer),
        asking.removeprefix(after_user),
    )
    _check(turns, template)
    return turns


def _chat() -> list[Message]:
    """A question, an answer, a question, and a system's message, of unlikely words."""
    roles = ("user", "assistant", "user", "system")
    return [{"role": role, "content": f"zq{i}xw"} for i, role in enumerate(roles)]


def _render_probe(template: ChatTemplate, messages: Sequence[Message]) -> str:
    return template.render(messages, add_generation_prompt=True)


def _parts(text: str, *messages: Message) -> list[str]:
    """What stands before, between and after the messages. TemplateError if they are not in it."""
    parts = []
    for message in messages:
        before, has_content, text = text.partition(message["content"])
        if not has_content:
            raise TemplateError("it leaves messages out")
        parts.append(before)
    return [*parts, text]


def _check(turns: Turns, template: ChatTemplate) -> None:
    """TemplateError if the template writes chats of one to three rounds in another way."""
    first, answer, second, system = _chat()
    chats = [[first], [first, answer, second], [first, answer, second, answer, first]]
    if turns.system is not None:
        chats += [[system, *chat] for chat in chats]
    for chat in chats:
        if turns.render(chat) != _render_probe(template, chat):
            raise TemplateError("it does more than to write one turn after the other")
