"""Questions of a file of chats, answered by a base model and by the same with an adapter.

usage: python examples/persona/ask.py -m base.gguf --lora tobias.gguf [--file chats.jsonl]

Each answer of the file is asked for again: the model reads the chat up to there, and writes its
likeliest tokens until it ends its turn or the limit is reached. What is counted: answers that end
by themselves, that is by a token that ends a turn; and answers that say "friend", as Tobias does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyggml import Model, load
from pyggml.chat import ChatTemplate, Message, find_template
from pyggml.generation import generate

HELD_OUT = Path(__file__).with_name("held-out.jsonl")


@dataclass(frozen=True)
class Answer:
    """What a model wrote after a prompt; `ended` by itself, not by the limit."""

    text: str
    ended: bool

    @property
    def in_manner(self) -> bool:
        return "friend" in self.text.lower()

    def __str__(self) -> str:
        return " ".join(self.text.split()) + ("" if self.ended else " … (cut at the limit)")


def questions(path: Path) -> list[list[Message]]:
    """For each answer in the file, the messages before it; the last is the user's."""
    lines = path.read_text(encoding="utf-8").splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    return [
        chat[:i]
        for chat in chats
        for i, message in enumerate(chat)
        if message["role"] == "assistant"
    ]


def ask(model: Model, template: ChatTemplate, messages: Sequence[Message], limit: int) -> Answer:
    """The likeliest answer to the messages, of `limit` tokens at most."""
    prompt = template.render(messages, add_generation_prompt=True)
    ids = model.tokenizer.encode(prompt, parse_special=True)
    written = list(generate(model, ids, limit))
    return Answer(model.tokenizer.decode(written), ended=len(written) < limit)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Answers before and after instruction tuning.")
    parser.add_argument("-m", "--model", required=True, help="base model, GGUF")
    parser.add_argument("--lora", required=True, help="adapter that was trained on it")
    parser.add_argument("--file", type=Path, default=HELD_OUT, help="chats (default: held out)")
    parser.add_argument("--chat-template", default="chatml", help="as in training")
    parser.add_argument("--limit", type=int, default=60, help="most tokens of an answer")
    parser.add_argument("--show", type=int, default=1000, help="most questions that are shown")
    args = parser.parse_args(words)

    models = {"before": load(args.model), "after": load(args.model, args.lora)}
    template = find_template(models["before"].tokenizer, args.chat_template)
    answers: dict[str, list[Answer]] = {when: [] for when in models}
    asked = questions(args.file)
    for i, messages in enumerate(asked):
        for when, model in models.items():
            answers[when].append(ask(model, template, messages, args.limit))
        if i < args.show:
            print(f"question  {messages[-1]['content']}")
            print("".join(f"  {when:6}  {given[-1]}\n" for when, given in answers.items()))
    for when, given in answers.items():
        ended, manner = sum(a.ended for a in given), sum(a.in_manner for a in given)
        print(f"{when:6}  {ended} of {len(given)} end by themselves, {manner} say friend")


if __name__ == "__main__":
    main()
