"""Rows of multiple choice → the tokens of each choice after its prompt.

Prompt, delimiter and choice are encoded as one text. Where the choice begins in its tokens, there
are two rules, and each measure follows that of its program:

lm-evaluation-harness   after as many tokens as the prompt has alone. White space at the end of the
                        prompt belongs to the choice.
llama.cpp               after the tokens that all choices of the question begin with, whatever text
                        these are of; at least one token is left to each choice.

The rules differ where the choices begin alike, which llama.cpp does not score, and where a token
has characters of both prompt and choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from pyggml.chat import ChatTemplate, find_template
from pyggml.chat.messages import BadValue
from pyggml.errors import ConfigError, TemplateError
from pyggml.lora.config import EvalConfig
from pyggml.lora.data import QuestionRow
from pyggml.lora.data.reading.files import map_rows
from pyggml.lora.evaluate.passes import Continuation, Ids
from pyggml.model import Model
from pyggml.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class QuestionFormat:
    """How a question becomes tokens.

    delimiter   the text between prompt and choice
    template    the prompt is the user's message, the choice the assistant's answer, with nothing
                between; None: both are text as they are
    parse       whether names of control tokens in the text are those tokens
    most        the most tokens that the model reads
    cut         of a longer question the beginning is left out; else it is refused
    """

    delimiter: str = " "
    template: ChatTemplate | None = None
    parse: bool = True
    most: int = 512
    cut: bool = False

    @staticmethod
    def of(config: EvalConfig, model: Model) -> QuestionFormat:
        """As the settings say. Raises TemplateError for an unknown template, and ConfigError for
        more tokens than the model's context has."""
        most, name = model.config.n_ctx, config.chat_template
        if config.ctx is not None and config.ctx > most:
            raise ConfigError([("ctx", f"is {config.ctx}, wanted at most the model's {most}")])
        return QuestionFormat(
            delimiter=" " if config.delimiter is None else config.delimiter,
            template=None
            if name is None
            else find_template(model.tokenizer, name, names=config.chat_template_kwargs or ""),
            parse=config.special_tokens != "plain",
            most=config.ctx or most,
            cut=config.long == "cut",
        )


@dataclass(frozen=True, slots=True)
class QuestionChoice:
    """A choice after its prompt, by either rule, and its length without the delimiter."""

    whole: Continuation  # lm-evaluation-harness's
    own: Continuation  # llama.cpp's
    n_characters: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Question:
    """Choices, of which that with the number `answer` is right."""

    choices: tuple[QuestionChoice, ...]
    answer: int


def encode_questions(
    rows: Sequence[QuestionRow], tokenizer: Tokenizer, asking: QuestionFormat
) -> list[Question]:
    """The tokens of each question. Raises DataError for those that cannot be asked, by place."""
    return map_rows(rows, lambda row: _question(row, tokenizer, asking))


def _question(row: QuestionRow, tokenizer: Tokenizer, asking: QuestionFormat) -> Question:
    prompt, delimiter = row.prompt, asking.delimiter
    if asking.template is not None:
        prompt, delimiter = _as_chat(row.prompt, asking.template), ""
    texts = [f"{prompt}{delimiter}{choice}" for choice in row.choices]
    encoded = [_ids(text, tokenizer, asking.parse) for text in texts]
    n_same = min(_n_same(encoded), min(map(len, encoded)) - 1)
    alone = _ids(prompt.rstrip(), tokenizer, asking.parse)
    n_cut = _n_cut(max(map(len, encoded)) - 1, min(len(alone), n_same), asking)
    choices = []
    for text, ids in zip(row.choices, encoded, strict=True):
        if not 0 < len(alone) < len(ids) or not n_same:
            raise BadValue(f"has no token of its own for the choice {text[:20]!r}")
        whole = Continuation((*alone, *ids[len(alone) :])[n_cut:], len(alone) - n_cut)
        own = Continuation(ids[n_cut:], n_same - n_cut)
        choices.append(QuestionChoice(whole, own, len(text), len(text.encode())))
    return Question(tuple(choices), row.answer)


def prompt_ids(prompt: str, model: Model, asking: QuestionFormat) -> Ids:
    """The tokens of a prompt whose answer is to be written. BadValue as of a template's fault."""
    text = prompt if asking.template is None else _as_chat(prompt, asking.template)
    return _ids(text, model.tokenizer, asking.parse)


def _as_chat(prompt: str, template: ChatTemplate) -> str:
    message = {"role": "user", "content": prompt}
    try:
        return template.render([message], add_generation_prompt=True)
    except TemplateError as error:
        raise BadValue(str(error), joint=": ") from None


def _ids(text: str, tokenizer: Tokenizer, parse: bool) -> Ids:
    """The ids, with BOS where the tokenizer adds one and the text has none."""
    ids = tokenizer.encode(text, add_special=False, parse_special=parse)
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    return tuple(ids) if bos is None or ids[:1] == [bos] else (bos, *ids)


def _n_same(sequences: Sequence[Ids]) -> int:
    """Tokens that all sequences begin with."""
    columns = zip(*sequences, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def _n_cut(n_read: int, n_prompt: int, asking: QuestionFormat) -> int:
    """Tokens that are left out at the beginning of all choices of a question, the longest of which
    has n_read tokens to be read. BadValue if that is not allowed, or leaves no prompt."""
    n = max(n_read - asking.most, 0)
    if n and not asking.cut:
        raise BadValue(
            f"has {n_read} tokens to be read, wanted at most {asking.most}: --long cut leaves out "
            "the beginning"
        )
    if n and n >= n_prompt:
        n_own = n_read + 1 - n_prompt
        raise BadValue(
            f"has a choice of {n_own} tokens, wanted fewer than the {asking.most} to be read"
        )
    return n
