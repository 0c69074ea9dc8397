"""`pyggml tokenizer`: a text → a vocabulary, as a GGUF file without weights."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from pyggml import gguf
from pyggml.cli.terminal.data_files import data_files, data_option
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.kinds import MODEL_FILE
from pyggml.cli.terminal.options import output_option
from pyggml.cli.terminal.show import note, say, with_size
from pyggml.fresh import KINDS, vocabulary_fields
from pyggml.lora.data import Row, TextRow, read_rows
from pyggml.lora.data.formats.source import blocks
from pyggml.lora.data.reading.files import format_of
from pyggml.lora.data.records import TRAINING
from pyggml.lora.data.records.rows import ChatRow, CompletionRow
from pyggml.tokenizer import Tokenizer, from_metadata

_LONGEST_LINE = 1 << 20  # characters


@grouped_command(
    "tokenizer",
    "pyggml tokenizer -f book.txt --vocab-size 8192 -o tok.gguf",
    "pyggml tokenizer -f book.txt --kind characters -o characters.gguf",
    "pyggml new --vocab tok.gguf --params 10M -o base.gguf",
)
@data_option("UTF-8 text, or rows as for finetune")
@output_option(MODEL_FILE, "GGUF file to write, without weights")
@grouped_option(
    "output",
    "--kind",
    "bpe: bytes, and the pairs that are most frequent in words; characters: bytes, and the "
    "text's characters; bytes: these alone",
    type=click.Choice(KINDS),
    default=KINDS[0],
    brief="bpe, characters or bytes",
)
@grouped_option(
    "output",
    "--vocab-size",
    "most tokens, special ones included",
    type=click.IntRange(min=1, max=1 << 20),
    default=8192,
)
@grouped_option(
    "output",
    "--special",
    "a token that no text gives, such as <|im_end|>; may be given several times",
    multiple=True,
    metavar="TOKEN",
)
def command(
    files: tuple[Path, ...], output: Path, kind: str, vocab_size: int, special: tuple[str, ...]
) -> None:
    """Make a vocabulary of a text, which llama.cpp reads.

    Every text has tokens, and comes back from them unchanged: all 256 bytes are tokens.
    """
    paths = data_files(files)
    fields = vocabulary_fields(_texts(paths), vocab_size, kind, special)
    n = len(fields["tokenizer.ggml.tokens"])
    if kind == "bpe" and n < vocab_size:
        note(f"{n:,} tokens of {vocab_size:,}: no more pairs of the text occur twice")
    n_bytes, n_tokens, characters, in_parts = _measure(from_metadata(fields), paths)
    if kind == "characters" and in_parts:
        note(
            f"{in_parts:,} of {characters:,} characters stay bytes: {vocab_size:,} tokens are full"
        )
    about = {"general.architecture": "llama", "general.type": "model"}
    gguf.write(output, about | fields, [])
    say(f"{n:,} tokens, {n_bytes / n_tokens:.2f} bytes of the text in each")
    say(with_size(output))


def _texts(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        if format_of(path, TRAINING) == "text":
            yield from _pieces(blocks(path))
        else:
            yield from (text for row in read_rows(path)[1] for text in _parts(row))


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """A text in pieces of whole lines, longer ones cut: one of any size is never held whole."""
    rest = ""
    for text in texts:
        whole, newline, rest = (rest + text).rpartition("\n")
        whole += newline
        if len(rest) > _LONGEST_LINE:
            whole, rest = whole + rest, ""
        yield whole
    yield rest


def _parts(row: Row) -> list[str]:
    """What a model would read of a row."""
    match row:
        case TextRow():
            return [row.text]
        case CompletionRow():
            return [row.prompt, row.completion]
        case ChatRow():
            contents = (message.get("content") for message in row.messages)
            return [content for content in contents if isinstance(content, str)]
    return []


def _measure(tokenizer: Tokenizer, paths: Iterable[Path]) -> tuple[int, int, int, int]:
    """Bytes, tokens and characters of the texts, and how many of these take several tokens."""
    n_bytes, n_tokens, characters = 0, 0, set[str]()
    for text in _texts(paths):
        n_bytes += len(text.encode())
        n_tokens += len(tokenizer.encode(text))
        characters |= {*text}
    in_parts = sum(len(tokenizer.encode(character)) > 1 for character in characters)
    return n_bytes, max(1, n_tokens), len(characters), in_parts
