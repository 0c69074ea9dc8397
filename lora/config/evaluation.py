"""What is evaluated, and how it is asked."""

from dataclasses import dataclass

from pyggml.chat import BUILT_IN, MODEL
from pyggml.lora.config.data import SPECIAL_TOKENS, DataConfig, columns_fit
from pyggml.settings import Settings, one_of, setting

_CTX = 512  # llama.cpp's
_LONG = ("refuse", "drop", "cut")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Settings):
    """How texts, rows and questions are read for evaluation. See `pyggml.lora.evaluate`."""

    ctx: int | None = setting(
        None,
        f"tokens of a chunk of text or a window of rows (default: {_CTX}), and the most that are "
        "read of a question (default: the model's context)",
        "4 to 2^20",
        lambda n: n is None or 4 <= n <= 1 << 20,
        group="data",
        aliases=("ctx-size", "max-length"),
        common=True,
        brief=f"tokens of a chunk of text or a window of rows [{_CTX}]",
    )
    limit: int | None = setting(
        None,
        "evaluate the first N questions, rows or chunks of text alone",
        "1 or more",
        lambda n: n is None or n >= 1,
        group="data",
        common=True,
    )
    long: str = setting(
        "refuse",
        "chats and questions longer than --ctx: refuse ends the run, drop leaves such rows out, "
        "cut leaves out first rounds of chats and the beginning of prompts",
        *one_of(_LONG),
        group="data",
        common=True,
        brief="rows longer than --ctx: refuse, drop or cut",
    )
    columns: tuple[str, ...] | None = setting(
        None,
        "which columns of the file are the fields of rows: question=q,choices=options,answer=right",
        "field=column, no field twice",
        columns_fit,
        group="data",
    )
    chat_template: str | None = setting(
        None,
        "chat template (default: as an adapter was trained, else the model's); where it is given, "
        "questions are asked with it, too, as a user's message: "
        f"{MODEL} is the one in the model's file; {', '.join(BUILT_IN)}; or a file",
        "a name or a file",
        lambda name: name is None or bool(name.strip()),
        group="data",
    )
    chat_template_kwargs: str | None = setting(
        None,
        'further inputs of the chat template, a JSON object: {"enable_thinking": false}',
        group="data",
    )
    delimiter: str | None = setting(
        None,
        "text between a question's prompt and choice, \\n is a new line (default: a space)",
        group="data",
    )
    special_tokens: str = setting(
        "auto",
        "special tokens in the text, such as <|im_start|>: parse reads each as one token, plain as "
        "its characters; auto parses rows and questions, and reads plain text as plain",
        *one_of(SPECIAL_TOKENS),
        group="data",
    )

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
