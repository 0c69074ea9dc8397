"""What is read, and how it becomes windows."""

from dataclasses import dataclass
from datetime import date

from pyggml.chat import BUILT_IN, MODEL, TRAIN_ON
from pyggml.errors import Fault
from pyggml.settings import Settings, of_data, one_of

SPECIAL_TOKENS = ("auto", "plain", "parse")
LONG_CHATS = ("refuse", "drop", "cut", "truncate")


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def columns_fit(words: object) -> bool:
    """Whether each word is name=column, no name twice; None fits too."""
    if not isinstance(words, list | tuple):
        return words is None
    cut = [word.partition("=") for word in words if isinstance(word, str)]
    whole = [name for name, _, column in cut if name.strip() and column.strip()]
    return 0 < len(words) == len(whole) == len(set(whole))


@dataclass(frozen=True, kw_only=True)
class DataConfig(Settings):
    """What is read, and how it becomes windows of `ctx` tokens. See `pyggml.lora.data`."""

    ctx: int = of_data(
        256,
        "tokens of a training sequence (window)",
        "2 to 2^20",
        aliases=("max-seq-length", "max-length", "sequence-len", "cutoff-len", "ctx-size"),
        brief="tokens of a training sequence (window)",
        common=True,
    )
    val_split: float = of_data(
        0.05,
        "share that is held out for validation; of text its end, of rows (JSON Lines, JSON, CSV) "
        "whole ones",
        "0 to 0.5",
        common=True,
    )
    val_file: tuple[str, ...] | None = of_data(
        None,
        "validation data of its own, as -f takes it, instead of --val-split; may be given several "
        "times",
        repeated=True,
    )
    columns: tuple[str, ...] | None = of_data(
        None,
        "which columns of the file are the fields of rows: prompt=question,completion=answer",
        "field=column, no field twice",
        columns_fit,
    )
    skip_bad_rows: bool = of_data(
        False,
        "leave out rows that cannot be read, and say which; without it any such row ends the run",
    )
    cache_dir: str | None = of_data(
        None,
        "folder where the tokenized data is cached for the next run (default: beside that of "
        "checkpoints, else the user's cache folder)",
        may_change=True,
    )
    end_of_text: bool = of_data(
        True, "rows of text end in the model's end of text; answers always do"
    )
    val_shuffle: bool = of_data(
        True,
        "rows that are held out stand anywhere in their file, as if it were shuffled; without it, "
        "at its end",
    )
    special_tokens: str = of_data(
        "auto",
        "special tokens in the text, such as <|im_start|>: parse reads each as one token, plain as "
        "its characters; auto parses rows (JSON Lines, JSON, CSV), and reads plain text and "
        "messages of chats as plain",
        *one_of(SPECIAL_TOKENS),
    )

    # -- chats ----------------------------------------------------------------------------------

    chat_template: str = of_data(
        MODEL,
        f"chat template: model is the one in its file; {', '.join(BUILT_IN)}; or a file",
        "a name or a file",
        lambda name: bool(name.strip()),
        aliases=("chat-template-path",),
        common=True,
        brief="chat template, a name or a file",
    )
    chat_template_kwargs: str | None = of_data(
        None, 'further inputs of the chat template, a JSON object: {"enable_thinking": false}'
    )
    train_on: str = of_data(
        "assistant",
        "tokens of a chat that have a loss: assistant takes the assistant's answers and the end of "
        "each, all takes every token",
        *one_of(TRAIN_ON),
    )
    long_chats: str = of_data(
        "refuse",
        "chats, answers and pairs longer than --ctx: refuse ends the run, drop leaves them out, "
        "cut leaves out the first rounds of chats (a question with its answer), but not the "
        "system message, truncate learns the answers in the first tokens that fit",
        *one_of(LONG_CHATS),
    )
    chat_date: str = of_data(
        "2025-01-01",
        "today's date for chat templates that write it, fixed so that a run can be repeated",
        "YYYY-MM-DD",
        _is_date,
    )
    packing: bool = of_data(
        True,
        "packing: rows share windows, without attending to each other; without it each row has a "
        "window of its own, whose padding is not computed",
        aliases=("sample-packing",),
    )

    def _faults(self) -> list[Fault]:
        faults = super()._faults()
        if self.val_file is not None and self.val_split not in (0, DataConfig.val_split):
            faults.append(("val_split", "does nothing beside val_file: leave one of them out"))
        if not self.val_shuffle and (self.val_file is not None or self.val_split == 0):
            fault = "is False, but no share of the rows is held out: leave it out"
            faults.append(("val_shuffle", fault))
        return faults
