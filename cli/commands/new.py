"""`pyggml new`: a vocabulary and a size → a model of random weights, to be trained from scratch."""

from pathlib import Path
from typing import Any

import click
import numpy as np

from pyggml import gguf
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.hub import MODEL
from pyggml.cli.terminal.kinds import MODEL_FILE
from pyggml.cli.terminal.options import Size, output_option
from pyggml.cli.terminal.paths import check_space
from pyggml.cli.terminal.places import PATH
from pyggml.cli.terminal.show import row, say, with_size
from pyggml.errors import ConfigError, DataError, cause_of
from pyggml.files import read_bytes
from pyggml.files.json_text import DECODER, reason_of
from pyggml.fresh import Fresh, count, hyperparameters, write
from pyggml.gguf import StringArray
from pyggml.graph.dtypes import dtype
from pyggml.models.config import short

_TOKENS = "tokenizer.ggml.tokens"
_ARCHITECTURE = "general.architecture"
_MOST_BYTES = 1 << 20  # of a file of hyperparameters


@grouped_command(
    "new",
    "pyggml new --vocab tok.gguf --params 10M -o base.gguf",
    "pyggml new --arch qwen3 --vocab model.gguf --params 50M -c 2048 -o base.gguf",
    "pyggml new --vocab tok.gguf --keys keys.json -o base.gguf",
)
@grouped_option(
    "model",
    "--vocab",
    "GGUF file whose vocabulary it has, of `pyggml tokenizer` or of a model",
    type=MODEL,
    required=True,
)
@grouped_option(
    "model", "--arch", "architecture, by llama.cpp's name", default="llama", metavar="NAME"
)
@grouped_option(
    "model",
    "--params",
    "about so many parameters: 10M, 1.5M",
    type=Size("10M or 1.5M"),
    default="10M",
    metavar="N",
)
@grouped_option(
    "model", "-c --ctx", "tokens of its context", type=click.IntRange(1, 1 << 24), default=1024
)
@grouped_option(
    "model",
    "--keys",
    'JSON object of hyperparameters by GGUF\'s keys, {"llama.block_count": 4, …}; they '
    "stand, the others follow from --params",
    type=PATH,
)
@grouped_option(
    "model",
    "--tied/--untied",
    "whether the embedding is the output matrix too, where the architecture lets it be "
    "(default: tied)",
    default=True,
)
@grouped_option(
    "output",
    "--type type_name",
    "of matrices; vectors are F32",
    type=click.Choice(["F32", "F16", "BF16"], case_sensitive=False),
    default="F32",
    metavar="TYPE",
)
@grouped_option("output", "--seed", "seed", type=int, default=0, metavar="N")
@output_option(MODEL_FILE, "GGUF file to write")
def command(
    vocab: Path,
    arch: str,
    params: int,
    ctx: int,
    keys: Path | None,
    tied: bool,
    type_name: str,
    seed: int,
    output: Path,
) -> None:
    """Write a model of random weights, with the first numbers that its architecture is given."""
    vocabulary, n_vocab = _vocabulary(vocab)
    own = _keys(keys) if keys else {}
    arch, n_each = str(own.pop(_ARCHITECTURE, arch)), dtype(type_name).numpy.itemsize
    if (
        not own
    ):  # half of them is the least that is near enough; the search for a size takes a while
        check_space(output, params // 2 * n_each)
    metadata = hyperparameters(arch, params, n_vocab, ctx, tied, own)
    check_space(output, count(metadata, n_vocab, tied) * n_each)
    write(output, Fresh(metadata, n_vocab, vocabulary, tied), dtype(type_name), seed)
    for key, value in metadata.items():
        row(key, str(value))
    say(f"{count(metadata, n_vocab, tied):,} parameters, {n_vocab:,} tokens")
    say(with_size(output))


def _vocabulary(path: Path) -> tuple[dict[str, Any], int]:
    """The fields of a file's vocabulary, and its number of tokens."""
    with gguf.open(path) as file:
        tokens = file.get(_TOKENS)
        if not isinstance(tokens, StringArray):
            raise ConfigError(f"{path}: has no vocabulary ({_TOKENS})")
        fields = {k: v for k, v in file.metadata.items() if k.startswith("tokenizer.")}
        return fields, len(tokens)


def _keys(path: Path) -> dict[str, Any]:
    """Hyperparameters of a JSON file. DataError for what is none."""
    try:
        keys = DECODER.decode(read_bytes(path, _MOST_BYTES).decode())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {cause_of(error)}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is no JSON: {reason_of(error, (1, 1))}") from None
    if not isinstance(keys, dict) or any("." not in key for key in keys):
        raise DataError(f'{path}: wanted a JSON object of GGUF keys, {{"llama.block_count": 4}}')
    for key, value in keys.items():
        is_list = isinstance(value, list) and all(isinstance(v, int | float) for v in value)
        if not (is_list or isinstance(value, int | float | str)):
            raise DataError(
                f"{path}: {key} is {short(value)}, wanted a number, text or a list of numbers"
            )
    return {key: np.array(v) if isinstance(v, list) else v for key, v in keys.items()}
