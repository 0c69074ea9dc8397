"""`pyggml control-vector`: texts of two kinds → a control vector, as llama.cpp's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from pyggml import Model
from pyggml.chat.messages import BadValue, checked_text
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.kinds import CONTROL_VECTOR
from pyggml.cli.terminal.options import ModelSource, model_options, output_option
from pyggml.cli.terminal.places import PATH
from pyggml.cli.terminal.show import plural, row, say_progress, unescape, with_size
from pyggml.errors import ConfigError, DataError
from pyggml.look.control import AFTER_FIRST, ControlVector, control_vector
from pyggml.lora.data.formats.json_rows import json_lines
from pyggml.lora.data.formats.source import lines

Kinds = tuple[list[str], list[str]]  # texts to lead towards, and those to lead away from
_KEYS = "positive", "negative"
_POSITIONS = {"rest": AFTER_FIRST, "all": slice(None), "last": slice(-1, None)}
_ABOUT = {
    "rest": "all positions but the first",
    "all": "all positions",
    "last": "the last position",
}


@grouped_command(
    "control-vector",
    "pyggml control-vector -m model.gguf -f pairs.jsonl -o happy.gguf",
    "pyggml control-vector -m m.gguf --positive-file a --negative-file b -o v.gguf",
    'pyggml generate -m model.gguf --control-vector happy.gguf:1.5 -p "Today"',
)
@model_options
@grouped_option(
    "data",
    "-f --file pairs",
    'JSON Lines of pairs: {"positive": TEXT, "negative": TEXT}',
    type=PATH,
)
@grouped_option(
    "data",
    "--positive-file",
    "texts to lead towards, one a line; \\n in it is a new line",
    type=PATH,
)
@grouped_option(
    "data",
    "--negative-file",
    "texts to lead away from; with --method pca line by line the others of pairs",
    type=PATH,
)
@output_option(CONTROL_VECTOR, "control vector to write")
@grouped_option(
    "output",
    "--method",
    "mean: the mean of one kind less that of the other; pca: the direction in which pairs "
    "differ most",
    type=click.Choice(["mean", "pca"]),
    default="mean",
    brief="mean or pca",
)
@grouped_option(
    "output",
    "--positions",
    "whose activations count: the rest of a text after its first position, all, or the last",
    type=click.Choice([*_POSITIONS]),
    default="rest",
    brief="whose activations count: rest, all, last",
)
@grouped_option(
    "output",
    "--layers",
    "blocks that get a direction, both counted (default: all but block 0, which has none)",
    type=click.IntRange(min=1),
    nargs=2,
    metavar="FIRST LAST",
)
def command(
    source: ModelSource,
    pairs: Path | None,
    positive_file: Path | None,
    negative_file: Path | None,
    output: Path,
    method: Any,
    positions: str,
    layers: tuple[int, int] | None,
) -> None:
    """Make a control vector, which leads what a model writes from texts of one kind to another."""
    texts = _read(pairs, positive_file, negative_file)
    if layers and layers[0] > layers[1]:
        first, last = layers
        raise ConfigError(f"--layers is {first} {last}, wanted the first block before the last")
    model = source.load()
    towards, unwanted = ([_tokens(model, text) for text in kind] for kind in texts)
    counts = f"{len(towards)} positive, {len(unwanted)} negative"
    say_progress(f"{counts} texts, {_ABOUT[positions]}")
    blocks = None if layers is None else range(layers[0], layers[1] + 1)
    vector = control_vector(model, towards, unwanted, method, _POSITIONS[positions], blocks)
    vector.save(output)
    _say(vector, output)


def _tokens(model: Model, text: str) -> list[int]:
    ids = model.tokenizer.encode_prompt(text)
    if len(ids) > model.config.n_ctx:
        raise DataError(
            f"the text {text[:40]!r}… has {len(ids)} tokens, wanted at most the "
            f"{model.config.n_ctx} of the model's context"
        )
    return ids


def _say(vector: ControlVector, output: Path) -> None:
    lengths = {i: float(np.linalg.norm(d)) for i, d in vector.directions.items()}
    most = max(lengths, key=lambda i: lengths[i])
    least = min(lengths, key=lambda i: lengths[i])
    blocks = plural(len(lengths), "block")
    row("directions", f"of {blocks}, {min(lengths)} to {max(lengths)}")
    row("lengths", f"{lengths[least]:.3g} (block {least}) to {lengths[most]:.3g} (block {most})")
    row("vector", with_size(output))


# -- texts ----------------------------------------------------------------------------------------


def _read(pairs: Path | None, positive: Path | None, negative: Path | None) -> Kinds:
    if pairs is not None and positive is None and negative is None:
        return _of_pairs(pairs)
    if pairs is not None or positive is None or negative is None:
        raise ConfigError("wanted -f PAIRS, or --positive-file FILE and --negative-file FILE")
    return [*_of_lines(positive)], [*_of_lines(negative)]


def _of_lines(path: Path) -> Iterator[str]:
    """A text for each line that is not blank."""
    n = 0
    for number, line in enumerate(lines(path), 1):
        if isinstance(line, BadValue):
            raise DataError(f"{path}: line {number} {line}")
        if text := line.rstrip("\r\n"):
            n += 1
            yield unescape(text)
    if not n:
        raise DataError(f"{path}: has no texts, wanted one a line")


def _of_pairs(path: Path) -> Kinds:
    kinds: Kinds = [], []
    for place, record in json_lines(path):
        try:
            for kind, text in zip(kinds, _pair(record), strict=True):
                kind.append(text)
        except BadValue as bad:
            raise DataError(f"{path}: {place} {bad}") from None
    if not kinds[0]:
        raise DataError(f"{path}: has no pairs, wanted one a line")
    return kinds


def _pair(record: Any) -> list[str]:
    """The texts of a record. BadValue if it is no pair of texts."""
    if isinstance(record, BadValue):
        raise record
    if not isinstance(record, dict) or {*record} != {*_KEYS}:
        shape = '{"positive": TEXT, "negative": TEXT}'
        raise BadValue(f"is {record!r:.60}, wanted {shape}")
    return [_text(record, key) for key in _KEYS]


def _text(record: dict[str, Any], key: str) -> str:
    try:
        return checked_text(record[key], may_be_empty=False)
    except BadValue as bad:
        raise BadValue(f'has a "{key}" that {bad}') from None
