"""Samples: answers to one prompt without and with the adapter, drawn in the same way."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.cli.terminal.show import say
from pyggml.errors import ConfigError, NotFiniteError
from pyggml.generation import Sampling, Session, generate
from pyggml.look.lens import TokenTable
from pyggml.lora import Corpus, DataConfig, Dataset
from pyggml.lora.data.tokens.chats import CHAT, Chats, encoder_of
from pyggml.model import Model

N_TOKENS = 60
_N_TRIED = 8  # held-out documents of which the longest is shown
N_READ = 128  # tokens of what is held out, whose losses a report shows
N_PROMPT = 12  # tokens of the text that make a prompt if none is given
_HOW = Sampling(temperature=0.7, top_k=40, top_p=0.95, seed=1)
DRAWN = f"temperature {_HOW.temperature:g}, seed {_HOW.seed}"


def prompt_ids(model: Model, prompt: str | None, corpus: Corpus, config: DataConfig) -> np.ndarray:
    """The given prompt, or some tokens of what is held out (else of what is trained on).

    Where chats are learned, a prompt is what a user says, in the chats' template; one with control
    tokens is taken as it is. ConfigError for a prompt that leaves no room for an answer.
    """
    if prompt is None:
        parts = (corpus.validation, corpus.train)
        prompts = [_from_text(model, part) for part in parts if part is not None]
        return max(prompts, key=len)
    ids = model.tokenizer.encode_prompt(prompt)
    parsed, plain = (model.tokenizer.encode(prompt, parse_special=p) for p in (True, False))
    is_plain = parsed == plain
    if is_plain and any(CHAT in prompts.notes for prompts in corpus.files):
        encoder = encoder_of(model.tokenizer, Chats.of(config, model.tokenizer))
        ids = encoder.prompt([{"role": "user", "content": prompt}])
    if not 0 < len(ids) < model.config.n_ctx:
        raise ConfigError(f"the prompt has {len(ids)} tokens, wanted 1 to {model.config.n_ctx - 1}")
    return model.check_tokens(ids)


def _from_text(model: Model, windows: Dataset) -> np.ndarray:
    """Of a document with a prompt, that; else some tokens from the start of the first document's
    first whole line, if one starts in the window."""
    first = windows.documents[0] == windows.documents[0, 0]
    ids = windows.tokens[0][first]
    n_read = 0 if windows.trained is None else int(np.argmax(windows.trained[0][first]))
    if n_read:
        return ids[:n_read]
    lines = [
        i for i in range(1, len(ids)) if model.tokenizer.token_bytes(int(ids[i - 1]))[-1:] == b"\n"
    ]
    first = next((i for i in lines if i + N_PROMPT <= len(ids)), 0)
    return ids[first : first + N_PROMPT]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a model reads a text: a word for the model, and each token's bytes with its loss."""

    label: str
    pieces: Sequence[bytes]
    table: TokenTable


def readings(before: Model, after: Model, corpus: Corpus) -> list[Reading]:
    """The start of the longest of some held-out documents as both models read it; none if nothing
    is held out."""
    if corpus.validation is None:
        return []
    ids, learned = max(
        documents(corpus.validation, _N_TRIED), key=lambda document: len(document[0])
    )
    ids, learned = ids[:N_READ], learned[:N_READ]
    from pyggml.lora.evaluate.scorer import read_tokens  # the first step need not wait for it

    pieces = [before.tokenizer.token_bytes(int(i), special=True) for i in ids]
    models = {"before": before, "after": after}
    return [Reading(label, pieces, read_tokens(m, ids, learned)) for label, m in models.items()]


def documents(windows: Dataset, n: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The tokens of n documents, and which of them are learned.

    They are the first ones of evenly spaced windows; with fewer than n windows, all documents.
    """
    spread = len(windows) >= n
    for i in [k * len(windows) // n for k in range(n)] if spread else range(len(windows)):
        numbers, targets = windows.documents[i], windows.part(slice(i, i + 1)).targets()[0]
        trained = np.concatenate([[False], targets])
        for number in dict.fromkeys(numbers[numbers >= 0].tolist()):
            yield windows.tokens[i][numbers == number], trained[numbers == number]
            if spread:
                break


def check_answer(model: Model, ids: np.ndarray) -> None:
    """NotFiniteError if the model's answer to the prompt is not finite."""
    greatest = Session(model, len(ids)).feed(ids).max()
    if not np.isfinite(greatest):
        raise NotFiniteError(
            [
                f"after training the model's answer to the prompt is no number ({greatest})",
                ("lr", "may be too high, or the model's weights make no numbers of this prompt"),
            ]
        )


def compare(before: Model, after: Model, ids: np.ndarray) -> list[tuple[str, str]]:
    """Print both answers; ("before, and how it ended", its text) and ("after, …", its text)."""
    answers = []
    for label, model in (("before", before), ("after", after)):
        say(_line(f"{label} ({DRAWN})"))
        say(model.tokenizer.decode(ids), end="")
        try:
            text, how = _answer(model, ids, lambda piece: say(piece, end=""))
        finally:  # what an error says begins a line
            say()
        say(f"[{how}]")
        answers.append((f"{label}, {how}", text))
    say("-" * 74)
    return answers


def answer_at(step: int, model: Model, ids: np.ndarray) -> tuple[str, str]:
    """Print the model's answer after a step, at once: a bar may stand below. The prompt and the
    answer, as texts."""
    prompt, (text, how) = model.tokenizer.decode(ids), _answer(model, ids)
    say(f"{_line(f'step {step} ({DRAWN})')}\n{prompt}{text}\n[{how}]")
    return prompt, text


def _answer(
    model: Model, ids: np.ndarray, show: Callable[[str], None] = lambda piece: None
) -> tuple[str, str]:
    """The answer, each piece of which is shown as it is drawn, and how it ended."""
    n = min(N_TOKENS, model.config.n_ctx - len(ids))
    stream, pieces, n_made = model.tokenizer.stream(), list[str](), 0

    def add(piece: str) -> None:
        pieces.append(piece)
        show(piece)

    for token in generate(model, ids, n, _HOW):
        add(stream.feed(token))
        n_made += 1
    add(stream.flush())
    return "".join(pieces), "ended by itself" if n_made < n else f"cut after {n} tokens"


def _line(text: str) -> str:
    return f"\n-- {text} " + "-" * (70 - len(text))
