"""`pyggml embed`: texts → vectors, their cosines, or scores of a reranker."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.kinds import EMBEDDINGS
from pyggml.cli.terminal.options import ModelSource, model_options, pooling_option
from pyggml.cli.terminal.places import PATH, OutputPath
from pyggml.cli.terminal.show import note, plural, say, say_progress
from pyggml.errors import ConfigError, DataError
from pyggml.files import read_bytes, replacing

_MOST_BYTES = 1 << 30  # of a file of texts
_FORMATS = (".npy", ".jsonl", ".txt")


@grouped_command(
    "embed",
    'pyggml embed -m model.gguf -p "a cat" -p "a kitten" --cosine',
    "pyggml embed -m model.gguf -f texts.txt -o vectors.npy",
    'pyggml embed -m reranker.gguf --rerank "what is a cat?" -f documents.txt',
)
@model_options
@grouped_option("text", "-p --prompt", "a text; again for another", multiple=True)
@grouped_option("text", "-f --file", "UTF-8 file of a text a line; - is standard input", type=PATH)
@pooling_option("text", True, "none")
@grouped_option("text", "--no-normalise", "vectors of any length", is_flag=True)
@grouped_option("output", "--cosine", "print the cosine of every pair", is_flag=True)
@grouped_option("output", "--rerank", "print how well texts answer", metavar="QUERY")
@grouped_option(
    "output",
    "-o --output",
    ".npy, .jsonl or .txt file to write (default: print lines of JSON)",
    type=OutputPath(EMBEDDINGS),
)
def command(
    source: ModelSource,
    prompt: tuple[str, ...],
    file: Path | None,
    pooling: str | None,
    no_normalise: bool,
    cosine: bool,
    rerank: str | None,
    output: Path | None,
) -> None:
    """Embed texts as vectors, or score them as answers to a question."""
    _check(pooling, no_normalise, cosine, rerank, output)
    texts = [*prompt, *(_lines(file) if file else [])]
    if not texts:
        raise ConfigError("no texts, wanted -p TEXT or -f FILE")
    model = source.load()
    if rerank is not None:
        scores = model.rerank(rerank, texts)
        for i in np.argsort(-scores, kind="stable"):
            say(f"{scores[i]:.6f}\t{texts[i]}")
        return
    vectors = model.embed(texts, pooling, not no_normalise)
    how = model.embedder(pooling).pooling
    what = f"pooled by {how}" if how != "none" else "a vector for each token"
    say_progress(f"{plural(len(texts), 'text')}, {vectors[0].shape[-1]} numbers, {what}")
    if cosine:
        for row in np.asarray(vectors) @ np.asarray(vectors).T:
            say(" ".join(f"{value:6.3f}" for value in row))
    elif output is not None:
        _write(output, texts, vectors)
    else:
        for text, vector in zip(texts, vectors, strict=True):
            say(_line(text, vector), as_is=True)


def _check(
    pooling: str | None, no_normalise: bool, cosine: bool, rerank: str | None, output: Path | None
) -> None:
    """ConfigError for options that have nothing to say to each other."""
    if cosine and (pooling == "none" or no_normalise):
        raise ConfigError("--cosine compares normalised vectors of texts, wanted no other option")
    if rerank is not None and (pooling or no_normalise or cosine or output):
        raise ConfigError("--rerank prints scores, wanted neither --pooling, --cosine nor --output")
    if cosine and output:
        raise ConfigError("--cosine prints, wanted no --output")
    if output is not None and output.suffix not in _FORMATS:
        raise ConfigError(f"--output ends in {output.suffix!r}, wanted {', '.join(_FORMATS)}")
    if output is not None and output.suffix == ".npy" and pooling == "none":
        raise ConfigError("--pooling none gives texts of unlike shapes, wanted .jsonl or .txt")


def _lines(path: Path) -> list[str]:
    """The texts of a file; empty lines are left out, which is said."""
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else read_bytes(path, _MOST_BYTES)
        lines = raw.decode().splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is no UTF-8") from None
    texts = [line for line in lines if line.strip()]
    if len(texts) < len(lines):
        note(f"{path}: {plural(len(lines) - len(texts), 'empty line')} left out")
    return texts


def _line(text: str, vector: np.ndarray) -> str:
    return json.dumps({"text": text, "embedding": vector.tolist()}, ensure_ascii=False)


def _write(path: Path, texts: Sequence[str], vectors: Sequence[np.ndarray] | np.ndarray) -> None:
    with replacing(path) as file:
        if path.suffix == ".npy":
            np.save(file, np.asarray(vectors), allow_pickle=False)
            return
        for text, vector in zip(texts, vectors, strict=True):
            if path.suffix == ".jsonl":
                file.write(f"{_line(text, vector)}\n".encode())
            else:
                np.savetxt(file, np.atleast_2d(vector), "%.9g")
