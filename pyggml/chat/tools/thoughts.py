"""The marks around a thought, by which it is told from the answer."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thought:
    """open, close   the texts around it
    frames           texts around the answer itself, which are no part of it
    turn             what stands between a thought and a call
    """

    open: str
    close: str
    frames: Collection[str] = ()
    turn: str = ""


THOUGHTS = (
    Thought(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        (
            "<|channel|>final<|message|>",
            "<|channel|>commentary<|message|>",
            "<|start|>assistant",
            "<|end|>",
        ),
        turn="<|start|>assistant",
    ),
    Thought("<|channel>thought\n", "<channel|>"),
    Thought(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    Thought("[THINK]", "[/THINK]"),
    *(
        Thought(f"<{name}>", f"</{name}>")
        for name in ("think", "thinking", "thought", "reasoning", "seed:think", "mm:think")
    ),
)


def find_thought(source: str) -> Thought | None:
    """The marks that a template's text has; None for one of models that do not think."""
    return next((t for t in THOUGHTS if _is_in(t, source)), None)


def _is_in(thought: Thought, source: str) -> bool:
    """A template that takes thoughts out of earlier turns may know no more than the second tag."""
    closes = thought.close.startswith("</") and thought.close in source
    return closes or thought.open.strip() in source


def is_opened(prompt: str, thought: Thought | None) -> bool:
    """Whether a prompt ends with an open thought, with which the answer goes on."""
    return thought is not None and prompt.rstrip().endswith(thought.open.rstrip())


def opened_by(prompt: str) -> Thought | None:
    """The thought that a prompt ends with, of whatever template."""
    return next((thought for thought in THOUGHTS if is_opened(prompt, thought)), None)
