"""What is read, and how it becomes windows."""

from dataclasses import dataclass
from datetime import date

from pyggml.chat import BUILT_IN, MODEL, TRAIN_ON
from pyggml.errors import Fault
from pyggml.settings import Settings, one_of, setting

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

    ctx: int = setting(
        256,
        "tokens in a window",
        "2 to 2^20",
        lambda n: 2 <= n <= 1 << 20,
        group="data",
        common=True,
    )
    val_split: float = setting(
        0.05,
        "share of the text, from its end, held out; of rows (JSON Lines, JSON, CSV) whole ones",
        "0 to 0.5",
        lambda x: 0 <= x <= 0.5,
        group="data",
        common=True,
    )
    val_file: tuple[str, ...] | None = setting(
        None,
        "rows or text held out in place of a share, as -f takes them; may be given several times",
        group="data",
        repeated=True,
    )
    columns: tuple[str, ...] | None = setting(
        None,
        "names of the file for those of rows: prompt=question,completion=answer",
        "name=column, no name twice",
        columns_fit,
        group="data",
    )
    skip_bad_rows: bool = setting(
        False,
        "leave rows out that are not as wanted, and tell them; else any of them ends the run",
        group="data",
    )
    cache_dir: str | None = setting(
        None,
        "folder where tokens are kept for the next run (default: beside that of checkpoints, else "
        "the user's cache folder)",
        group="data",
        may_change=True,
    )
    end_of_text: bool = setting(
        True,
        "rows of text end in the model's end of text; answers always do",
        group="data",
    )
    val_shuffle: bool = setting(
        True,
        "rows that are held out stand anywhere in their file, as if it were shuffled; without it, "
        "at its end",
        group="data",
    )
    special_tokens: str = setting(
        "auto",
        "what <|im_start|> and the like are in the text: parse makes each one token, plain leaves "
        "it a few characters, auto parses rows (JSON Lines, JSON, CSV) and leaves plain text and "
        "messages of chats plain",
        *one_of(SPECIAL_TOKENS),
        group="data",
    )

    # -- chats ----------------------------------------------------------------------------------

    chat_template: str = setting(
        MODEL,
        f"template of chats: model is the one in its file; {', '.join(BUILT_IN)}; or a file",
        "a name or a file",
        lambda name: bool(name.strip()),
        group="data",
        common=True,
    )
    chat_template_kwargs: str | None = setting(
        None,
        'further inputs of the chat template, a JSON object: {"enable_thinking": false}',
        group="data",
    )
    train_on: str = setting(
        "assistant",
        "what of a chat is learned: assistant takes its answers and the end of each, all takes "
        "every token",
        *one_of(TRAIN_ON),
        group="data",
    )
    long_chats: str = setting(
        "refuse",
        "chats, answers and pairs that are longer than a window: refuse ends the run, drop leaves "
        "them out, cut leaves first rounds of chats out, but not the system's turn, and what is "
        "longer then; truncate takes the first tokens that fit, and learns the answers in them",
        *one_of(LONG_CHATS),
        group="data",
    )
    chat_date: str = setting(
        "2025-01-01",
        "the date for chat templates that ask for today's, so that a run can be repeated",
        "YYYY-MM-DD",
        _is_date,
        group="data",
    )
    packing: bool = setting(
        True,
        "rows share windows, without seeing each other; without it each has a window of its own, "
        "computed no further than it is filled",
        group="data",
    )

    def _faults(self) -> list[Fault]:
        faults = super()._faults()
        if self.val_file is not None and self.val_split not in (0, DataConfig.val_split):
            faults.append(("val_split", "does nothing beside val_file: leave one of them out"))
        if not self.val_shuffle and (self.val_file is not None or self.val_split == 0):
            fault = "is False, but no share of the rows is held out: leave it out"
            faults.append(("val_shuffle", fault))
        return faults
