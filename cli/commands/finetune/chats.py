"""Chats on the command line: a summary before training, and samples as the model will read them."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import click
import numpy as np

from pyggml.chat import MODEL, ChatTemplate, carries_template, find_template, write_alike
from pyggml.cli.commands.finetune.job import Job
from pyggml.cli.terminal.chat_templates import TemplateChoice, choose_template, own_template
from pyggml.cli.terminal.samples import documents
from pyggml.cli.terminal.show import has_colours, plural, printable, row, say
from pyggml.lora import Corpus, DataConfig
from pyggml.lora.data.tokens.chats import CHAT, CUT, NAMED, OPEN, THOUGHTS
from pyggml.tokenizer import Tokenizer

_NOTES = {
    CUT: "lost first rounds, so that the rest fits into a window",
    NAMED: "named control tokens in messages, which are plain text there (--special-tokens parse "
    "takes them as tokens)",
    THOUGHTS: "lost thoughts of earlier turns, which the template takes out",
    OPEN: "taught an answer that no token ends, so that the model may not stop",
}
_AS_TEXT = "these rows are text as it is; rows of messages, or with an instruction, are chats"


def say_chats(
    corpus: Corpus,
    config: DataConfig,
    tokenizer: Tokenizer,
    choice: TemplateChoice,
    init: Path | None,
) -> None:
    """Print the template, what is learned, and what was changed. Without chats, print that there
    are none if the adapter `init` was trained on chats."""
    sources = [f for f in corpus.files if CHAT in f.notes]
    if not sources:
        if init is not None and carries_template(init):
            row("chats", f"none, though {init.name} was trained on chats: {_AS_TEXT}")
        return
    n = sum(f.notes[CHAT][0] for f in sources)
    template = template_of(config, tokenizer)
    learned = "the assistant's answers" if config.train_on == "assistant" else "every token"
    row("chats", f"{n:,}, written as {template.origin} has them; learned: {learned}")
    if template.names:
        row("", f"with {json.dumps(template.names, ensure_ascii=False)}")
    own = own_template(tokenizer)
    if config.chat_template != MODEL and not (own and write_alike(template, own)):
        row(
            "",
            f"the model's file has {'another' if own else 'no'} template: the output carries this "
            "one, which pyggml's commands then use; other programs must be told",
        )
    for text in choice.notes:
        row("", text)
    for part in sources:
        for note, text in _NOTES.items():
            if note in part.notes:
                count, first = part.notes[note]
                row("", f"{plural(count, 'chat')} {text}; the first is {first}")


def with_template(job: Job, tokenizer: Tokenizer) -> tuple[Job, TemplateChoice]:
    """The job with the chat template that it trains with: where none is given that of the adapter
    which it trains on, or trains on top of, if that carries one."""
    told = job.reading.chat_template if "chat_template" in job.fixed else None
    adapters = [*(job.below or ()), *([(job.init, 1.0)] if job.init else [])]
    choice = choose_template(tokenizer, adapters, told)
    return replace(job, reading=replace(job.reading, chat_template=choice.template)), choice


def has_chats(corpus: Corpus) -> bool:
    return any(CHAT in source.notes for source in corpus.files)


def template_of(config: DataConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """The template that chats are written with."""
    return find_template(tokenizer, config.chat_template, names=config.chat_template_kwargs or "")


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
            say(visible, end="", as_is=True)
        say()
    say()


def _runs(tokenizer: Tokenizer, ids: np.ndarray, trained: np.ndarray) -> Iterator[tuple[bool, str]]:
    """Runs of tokens that are all learned, or all not, as text."""
    edges = np.flatnonzero(np.diff(trained.astype(np.int8))) + 1
    for part in np.split(np.arange(len(ids)), edges):
        if len(part):
            raw = b"".join(tokenizer.token_bytes(int(ids[i]), special=True) for i in part)
            yield bool(trained[part[0]]), raw.decode("utf-8", "replace")
