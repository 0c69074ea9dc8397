"""What is evaluated, and how it is asked."""

import re
from dataclasses import dataclass

from pyggml.chat import BUILT_IN, MODEL
from pyggml.errors import Fault
from pyggml.lora.config.data import SPECIAL_TOKENS, DataConfig, columns_fit
from pyggml.settings import Settings, of_data, one_of

_CTX = 512  # llama.cpp's
_LONG = ("refuse", "drop", "cut")


def _is_pattern(text: object) -> bool:
    try:
        return text is None or bool(re.compile(str(text)))
    except re.error:
        return False


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Settings):
    """How texts, rows and questions are read for evaluation. See `pyggml.lora.evaluate`."""

    ctx: int | None = of_data(
        None,
        f"tokens of a chunk of text or a window of rows (default: {_CTX}), and the most that are "
        "read of a question (default: the model's context)",
        "4 to 2^20",
        aliases=("ctx-size", "max-length"),
        common=True,
        brief=f"tokens of a chunk of text or a window of rows [{_CTX}]",
    )
    limit: int | None = of_data(
        None,
        "evaluate the first N questions, rows or chunks of text alone",
        "1 or more",
        common=True,
    )
    long: str = of_data(
        "refuse",
        "chats and questions longer than --ctx: refuse ends the run, drop leaves such rows out, "
        "cut leaves out first rounds of chats and the beginning of prompts",
        *one_of(_LONG),
        common=True,
        brief="rows longer than --ctx: refuse, drop or cut",
    )
    columns: tuple[str, ...] | None = of_data(
        None,
        "which columns of the file are the fields of rows: question=q,choices=options,answer=right",
        "field=column, no field twice",
        columns_fit,
    )
    chat_template: str | None = of_data(
        None,
        "chat template (default: as an adapter was trained, else the model's); where it is given, "
        "questions are asked with it, too, as a user's message: "
        f"{MODEL} is the one in the model's file; {', '.join(BUILT_IN)}; or a file",
        "a name or a file",
        lambda name: name is None or bool(name.strip()),
    )
    chat_template_kwargs: str | None = of_data(
        None, 'further inputs of the chat template, a JSON object: {"enable_thinking": false}'
    )
    delimiter: str | None = of_data(
        None, "text between a question's prompt and choice, \\n is a new line (default: a space)"
    )
    # -- how questions are put --------------------------------------------------------------------

    letters: bool = of_data(
        False,
        "list the choices below the question, each with its letter, and take a letter for the "
        "answer, as MMLU does",
    )
    ask: str | None = of_data(
        None,
        "text that a question is put in, where {} stands for it, \\n is a new line: "
        "'Question: {}\\nAnswer:' (default: the question alone)",
        "a text with one {}",
        lambda text: text is None or text.count("{}") == 1,
    )
    shots: int = of_data(
        0,
        "few-shot: so many questions with their answers before each, the first ones of its "
        "category",
        "0 to 100",
        common=True,
        brief="questions with answers before each (few-shot)",
    )
    shots_file: str | None = of_data(
        None,
        "where --shots come from, such as a set's dev split; hub:OWNER/NAME too (default: the "
        "questions' own file, without the one that is asked)",
    )
    match: str | None = of_data(
        None,
        "let the model write its answers, and find them in the text by this regular expression "
        "(its first group, if it has one); right is what the expression finds in the row's answer: "
        "'#### (-?[0-9.,]+)'",
        "a regular expression",
        _is_pattern,
        common=True,
        brief="have answers written; a regular expression finds them",
    )
    match_last: bool = of_data(
        False, "with --match, take the last that the expression finds, not the first"
    )
    answer_tokens: int = of_data(256, "with --match, the most tokens of an answer", "1 or more")
    stop: tuple[str, ...] = of_data(
        (),
        "with --match, a text that an answer ends before, such as 'Question:'; may be given "
        "several times",
        "texts that are not empty",
        lambda texts: all(isinstance(text, str) and text for text in texts),
        repeated=True,
    )
    special_tokens: str = of_data(
        "auto",
        "special tokens in the text, such as <|im_start|>: parse reads each as one token, plain as "
        "its characters; auto parses rows and questions, and reads plain text as plain",
        *one_of(SPECIAL_TOKENS),
    )

    def _faults(self) -> list[Fault]:
        faults = super()._faults()
        for name in ("match_last", "answer_tokens", "stop"):
            if self.match is None and getattr(self, name) != getattr(EvalConfig, name):
                faults.append((name, "does nothing without match"))
        if self.shots_file is not None and not self.shots:
            faults.append(("shots_file", "does nothing without shots"))
        return faults

    def rows(self, n_ctx: int, chat_template: str = MODEL) -> DataConfig:
        """The settings for texts and rows, of a model with a context of n_ctx tokens.

        chat_template: the template of chats where the settings name none
        """
        return DataConfig(
            ctx=self.ctx or min(_CTX, n_ctx),
            columns=self.columns,
            chat_template=self.chat_template or chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            special_tokens=self.special_tokens,
            long_chats=self.long,
        )
