"""Chats on the command line: a summary before training, and samples as the model will read them."""

import sys
from collections.abc import Iterator, Sequence
from itertools import islice

import click
import numpy as np

from pyggml.chat import MODEL, ChatTemplate, Message, find_template
from pyggml.cli.terminal.samples import documents
from pyggml.cli.terminal.show import has_colours, plural, printable, row, say
from pyggml.errors import TemplateError
from pyggml.lora import Corpus, DataConfig
from pyggml.lora.data.chats import CHAT, CUT, NAMED, OPEN, THOUGHTS
from pyggml.tokenizer import Tokenizer

_NOTES = {
    CUT: "lost first rounds, so that the rest fits into a window",
    NAMED: "named control tokens in messages, which are plain text there (--special-tokens parse "
    "takes them as tokens)",
    THOUGHTS: "lost thoughts of earlier turns, which the template takes out",
    OPEN: "taught an answer that no token ends, so that the model may not stop",
}

_PROBE = [
    {"role": role, "content": f" the {role}'s "} for role in ("system", "user", "assistant", "user")
]


def say_chats(corpus: Corpus, config: DataConfig, tokenizer: Tokenizer) -> None:
    """Print the template, what is learned, and what was changed; nothing if there are no chats."""
    sources = [f for f in corpus.files if CHAT in f.notes]
    if not sources:
        return
    n = sum(f.notes[CHAT][0] for f in sources)
    template = (
        "the model's chat template" if config.chat_template == MODEL else config.chat_template
    )
    learned = "the assistant's answers" if config.train_on == "assistant" else "every token"
    row("chats", f"{n:,}, written as {printable(template)} has them; learned: {learned}")
    if config.chat_template != MODEL and _differs(tokenizer, config.chat_template):
        row("", "the model's file has another template: whatever runs it must be told to use this")
    for part in sources:
        for note, text in _NOTES.items():
            if note in part.notes:
                count, first = part.notes[note]
                row("", f"{plural(count, 'chat')} {text}; the first is {first}")


def question_prompt(corpus: Corpus, config: DataConfig, tokenizer: Tokenizer) -> str:
    """A prompt for `generate -p` that asks "..." as the chats did; without chats, "..." itself."""
    if not any(CHAT in source.notes for source in corpus.files):
        return "..."
    names = config.chat_template_kwargs or ""
    template = find_template(tokenizer, config.chat_template, names=names)
    text = _render(template, [{"role": "user", "content": "..."}]) or "..."
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


def _differs(tokenizer: Tokenizer, name: str) -> bool:
    """Whether the model's own template, if it has one, writes short chats in another way."""
    try:
        own = find_template(tokenizer)
    except TemplateError:
        return False
    named = find_template(tokenizer, name)
    return any(_render(own, chat) != _render(named, chat) for chat in (_PROBE, _PROBE[1:]))


def _render(template: ChatTemplate, chat: Sequence[Message]) -> str:
    """The chat up to an answer; "" if the template refuses it."""
    try:
        return template.render(chat, add_generation_prompt=True)
    except TemplateError:
        return ""


def preview(corpus: Corpus, tokenizer: Tokenizer, n: int) -> None:
    """Print n documents. Learned text is green, or between ⟦ and ⟧ without colours."""
    has_colour = has_colours(sys.stdout)
    learned = "green" if has_colour else "between ⟦ and ⟧"
    for i, (ids, trained) in enumerate(islice(documents(corpus.train, n), n)):
        count = int(trained.sum())
        say(f"\n-- sample {i + 1}: {plural(len(ids), 'token')}, {count} learned, {learned} --")
        for is_learned, text in _runs(tokenizer, ids, trained):
            visible = printable(text)
            if is_learned:
                visible = click.style(visible, fg="green") if has_colour else f"⟦{visible}⟧"
            say(visible, end="")
        say()
    say()


def _runs(tokenizer: Tokenizer, ids: np.ndarray, trained: np.ndarray) -> Iterator[tuple[bool, str]]:
    """Runs of tokens that are all learned, or all not, as text."""
    edges = np.flatnonzero(np.diff(trained.astype(np.int8))) + 1
    for part in np.split(np.arange(len(ids)), edges):
        if len(part):
            raw = b"".join(tokenizer.token_bytes(int(ids[i]), special=True) for i in part)
            yield bool(trained[part[0]]), raw.decode("utf-8", "replace")
