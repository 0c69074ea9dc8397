"""`pyggml compare`: a model with an adapter of it, or with itself in other types → what changed."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

import pyggml.threads
from pyggml import Model, lab, load
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.hub import MODEL
from pyggml.cli.terminal.kinds import ADAPTER
from pyggml.cli.terminal.options import Adapter, AdapterFile, threads_option
from pyggml.cli.terminal.places import PATH
from pyggml.cli.terminal.show import note, percent, printable, say
from pyggml.errors import ConfigError, DataError
from pyggml.files.json_text import finite
from pyggml.lab.comparison import HeadDifference, RunDifference, UpdateSize, WeightError
from pyggml.lora.data.formats.source import blocks

_MOST = 512  # tokens of the text, by default


@grouped_command(
    "compare",
    "pyggml compare model.gguf adapter.gguf",
    "pyggml compare model.gguf adapter.gguf:0.5 -f text.txt",
    "pyggml compare model-Q8_0.gguf model-Q4_K_M.gguf -f text.txt --json",
)
@click.argument("base", type=MODEL, metavar="MODEL")
@click.argument("other", type=AdapterFile(), metavar="ADAPTER[:WEIGHT]|MODEL")
@grouped_option(
    "data",
    "-f --file text",
    "UTF-8 text that both read: how activations, heads and predictions differ",
    type=PATH,
)
@grouped_option(
    "data",
    "--ctx",
    f"most tokens of the text that are read (default: the context, at most {_MOST})",
    type=click.IntRange(min=2),
)
@grouped_option("output", "--json as_json", "print all numbers as JSON", is_flag=True)
@threads_option
def command(
    base: Path, other: Adapter, text: Path | None, ctx: int | None, as_json: bool, threads: int
) -> None:
    """What an adapter changes of a model, or what packing it in other types has changed.

    Of weights by layer and module; with a text, of activations, heads and predictions, whose
    products are exact.
    """
    pyggml.threads.set(threads)
    if ctx is not None and text is None:
        raise ConfigError("--ctx: for a text, wanted -f FILE beside it")
    one = load(base)
    two = _other(one, other)
    changed = lab.update_sizes(two) if two.adapters else lab.weight_errors(one, two)
    run = heads = None
    if text is not None:
        ids = _tokens(one, text, ctx)
        run = lab.compare_runs(one, two, ids)
        has_heads = any(".attn_head." in name for name in one.activations)
        heads = lab.compare_heads(one, two, ids) if has_heads else None
    if as_json:
        say(json.dumps(_record(changed, run, heads), indent=1))
        return
    _say_weights(changed)
    if run is not None:
        _say_run(run, heads)


def _other(base: Model, other: Adapter) -> Model:
    """The base with an adapter, or another file of it."""
    path, weight = other
    if ADAPTER.is_one(path):
        return base.with_adapter_files(other)
    if weight != 1:
        raise ConfigError(f"{path}: is no adapter, wanted no weight: those are for adapters")
    return load(path)


def _tokens(model: Model, path: Path, ctx: int | None) -> list[int]:
    """The first tokens of a text; how many are left out is said."""
    most = min(ctx or _MOST, model.config.n_ctx)
    start, whole = "", True
    for part in blocks(path):
        start += part
        if len(start) > 64 * most:
            whole = False
            break
    ids = model.tokenizer.encode_prompt(start)
    if len(ids) < 2:
        raise DataError(f"{path}: has {len(ids)} tokens, wanted 2 at least")
    if not whole or len(ids) > most:
        note(f"{path}: its first {min(most, len(ids))} tokens are read")
    return ids[:most]


# -- what is printed ------------------------------------------------------------------------------


def _say_weights(changed: Sequence[UpdateSize] | Sequence[WeightError]) -> None:
    """A table of layers and modules, and what lies outside layers; of an adapter each module's
    effective rank."""
    sizes = [c for c in changed if isinstance(c, UpdateSize)]
    shares = {c.name: c.ratio if isinstance(c, UpdateSize) else c.error for c in changed}
    said = "‖ΔW‖ / ‖W‖" if sizes else "‖W − W′‖ / ‖W‖"
    table, outside = dict[str, dict[str, float]](), dict[str, float]()
    for name, share in shares.items():
        if share:
            words = name.removesuffix(".weight").split(".")
            is_layer = words[0] == "blk" and len(words) > 2
            of = table.setdefault(f"blk.{words[1]}", {}) if is_layer else outside
            of[".".join(words[2:]) if is_layer else name] = share
    say(said)
    _say_table(table)
    for name, share in outside.items():
        say(f"{name}  {percent(share)}")
    if n := sum(not share for share in shares.values()):
        say(f"{n} of {len(shares)} tensors are the same")
    if sizes:
        say("\nsingular values")
        for s in sizes:
            about = f"effective rank {s.effective_rank:.1f} of {len(s.values)}"
            first = ", ".join(f"{v:.3g}" for v in s.values[:4])
            say(f"{s.name:<28} {about}; {first}{', …' * (len(s.values) > 4)}")


def _say_run(run: RunDifference, heads: HeadDifference | None) -> None:
    say(f"\nactivations\n{run}")
    if heads is not None:
        say("\nheads: what they give, ‖z − z′‖ / ‖z‖")
        rows = {f"blk.{i}": _row(row) for i, row in enumerate(heads.results)}
        _say_table({name: row for name, row in rows.items() if row})
        say("heads: part of the attention that is elsewhere")
        rows = {f"blk.{i}": _row(row) for i, row in enumerate(heads.patterns)}
        _say_table({name: row for name, row in rows.items() if row})


def _row(numbers: Iterable[float]) -> dict[str, float]:
    return {str(i): float(x) for i, x in enumerate(numbers) if not np.isnan(x)}


def _say_table(table: Mapping[str, Mapping[str, float]]) -> None:
    """Shares by row and column, as many columns side by side as a line of 100 has room for."""
    columns = [*dict.fromkeys(name for row in table.values() for name in row)]
    widths = [max(len(name), 7) + 1 for name in columns]
    while columns:
        n = max(1, sum(np.cumsum(widths) <= 92))
        say(
            " " * 8
            + "".join(f"{printable(c):>{w}}" for c, w in zip(columns[:n], widths, strict=False))
        )
        for name, row in table.items():
            cells = (f"{percent(row[c]) if c in row else '':>{w}}"
                     for c, w in zip(columns[:n], widths, strict=False))  # fmt: skip
            say(f"{name:<8}{''.join(cells)}".rstrip())
        columns, widths = columns[n:], widths[n:]


def _record(
    changed: Sequence[UpdateSize] | Sequence[WeightError],
    run: RunDifference | None,
    heads: HeadDifference | None,
) -> dict[str, Any]:
    """All numbers; NaN and infinity are null."""
    record: dict[str, Any] = {"weights": [_of_tensor(c) for c in changed]}
    if run is not None:
        means = dict(zip(run.names, map(finite, run.errors.mean(axis=1)), strict=True))
        agree = [bool(x) for x in run.agree]
        record["run"] = {"activations": means, "kl": [*map(finite, run.kl)], "agree": agree}
    if heads is not None:
        names = "results", "patterns"
        record["heads"] = {n: [[*map(finite, row)] for row in getattr(heads, n)] for n in names}
    return record


def _of_tensor(c: UpdateSize | WeightError) -> dict[str, Any]:
    if isinstance(c, WeightError):
        return {**asdict(c), "error": finite(c.error)}
    about = {"norm": c.norm, "weight_norm": c.weight_norm, "ratio": finite(c.ratio)}
    ranks = {"effective_rank": c.effective_rank, "singular_values": [*map(finite, c.values)]}
    return {"name": c.name, **about, **ranks}
