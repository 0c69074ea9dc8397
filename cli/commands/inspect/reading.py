"""A text as a model reads it: the loss of every token, and the gradients of one step over it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import numpy as np

from pyggml import load
from pyggml.cli.commands.inspect.sections import CellTable, ReportSection
from pyggml.cli.terminal.show import plural
from pyggml.errors import ConfigError, PyggmlError, cause_of
from pyggml.files import open_regular
from pyggml.graph.arrays import read
from pyggml.look.draw import heat
from pyggml.look.draw import tokens as coloured
from pyggml.look.gradients import loss_and_grads
from pyggml.look.lens import TokenTable
from pyggml.look.overview import Overview, findings, measure, overview
from pyggml.lora import LoraConfig, attach, unfreeze
from pyggml.model import Model
from pyggml.models.adapter import AdapterFile

_MOST_BYTES = 1 << 20  # of a text of which the beginning is read
_SURPRISING = 10


@dataclass(frozen=True, slots=True)
class TextReading:
    """A text's tokens: ids, bytes of each, and how many of the text's there were."""

    model: Model
    ids: np.ndarray
    pieces: Sequence[bytes]
    n_all: int


def read_text(path: Path, adapters: Sequence[AdapterFile], text: Path, ctx: int) -> TextReading:
    """The first `ctx` tokens of a text. Raises ConfigError for a text that cannot be read or has
    fewer than two tokens."""
    model = load(path, list(adapters))
    try:
        with open_regular(text) as file:
            words = file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"{text}: cannot be opened: {cause_of(error)}") from None
    ids = model.tokenizer.encode(words, add_special=True)
    most = min(ctx, model.config.n_ctx)
    if len(ids) < 2:
        raise ConfigError(f"{text}: has {plural(len(ids), 'token')}, wanted 2 or more")
    first = model.check_tokens(ids[:most])
    pieces = [model.tokenizer.token_bytes(int(i), special=True) for i in first]
    return TextReading(model, first, pieces, len(ids))


# -- losses ---------------------------------------------------------------------------------------


def token_facts(r: TextReading, table: TokenTable) -> dict[str, Any]:
    """Of every token: id, text, loss, rank; the first has no loss."""
    rows = zip(r.ids.tolist(), r.pieces, table.losses.tolist(), table.ranks.tolist(), strict=True)
    tokens = [
        {"id": id, "text": piece.decode("utf-8", "replace"), "loss": loss, "rank": rank + 1}
        for id, piece, loss, rank in rows
    ]
    tokens[0] |= {"loss": None, "rank": None}
    return {"loss": table.loss, "n_tokens": len(r.ids), "tokens": tokens}


def token_section(r: TextReading, table: TokenTable) -> ReportSection:
    """The mean, and the tokens with the greatest loss; the picture is the whole text."""
    shown = [coloured.signs(text) for text in coloured.texts(r.pieces)]
    levels = [coloured.level(x) if x == x else -1 for x in table.losses.tolist()]
    order = np.argsort(-np.nan_to_num(table.losses, nan=-1.0), kind="stable")[:_SURPRISING]
    rows = [
        (
            f"{i:,}",
            shown[i].replace("\n", ""),
            str(r.ids[i]),
            f"{table.losses[i]:.3f}",
            f"{exp(-table.losses[i]):.2g}",
            f"{table.ranks[i] + 1:,}",
        )
        for i in order.tolist()
        if i > 0
    ]
    names = ("position", "token", "id", "loss", "probability", "rank")
    cut = f"; the text has {r.n_all:,}" if r.n_all > len(r.ids) else ""
    mean = f"{table.loss:.4f} a token, perplexity {exp(min(table.loss, 700)):.4g}"
    of = f"the {len(r.ids) - 1:,} after the first{cut}"
    fragment = f'<figure class="text">{coloured.fragment(table, r.pieces)}</figure>'
    return ReportSection(
        "tokens",
        [("loss", mean), ("of", of)],
        CellTable(names, rows, frozenset({0, 2, 3, 4, 5})),
        notes=["The tokens that were most surprising come first."],
        words=list(zip(shown, levels, strict=True)),
        pictures=[fragment],
    )


# -- gradients ------------------------------------------------------------------------------------


def gradients(r: TextReading, rank: int) -> Overview:
    """The gradients of the text's loss by the model's adapter, else by a fresh one of this rank."""
    model = r.model
    try:
        adapter = unfreeze(model) if model.adapters else attach(model, LoraConfig(rank=rank))
    except PyggmlError as error:
        raise ConfigError(f"{r.model.file.path}: {error}") from None
    _, grads = loss_and_grads(adapter.model, r.ids, parameters=adapter.parameters.tensors)
    values = adapter.parameters.tensors
    return overview({0: {n: measure(g, read(values[n])) for n, g in grads.items()}})


def gradient_section(o: Overview) -> ReportSection:
    """The norms by layer and module. A factor whose other factor is 0 has no gradient."""
    is_fresh = all(
        np.all(o.norms[0][:, c] == 0) for c, k in enumerate(o.columns) if k.factor == "A"
    )
    columns = [i for i, k in enumerate(o.columns) if not (is_fresh and k.factor == "A")]
    rows = [
        (layer, *(_cell(o, i, c) for c in columns), f"{o.layer_norms[0, i]:.2g}")
        for i, layer in enumerate(o.layers)
    ]
    names = ("layer", *(str(o.columns[c]) for c in columns), "all")
    notes = ["‖g‖ of the mean loss over the text's tokens."]
    notes += ["A's gradients are 0 while B is 0, as in a fresh adapter."] * is_fresh
    notes += findings(o)[:8]
    pictures = [heat.heat_map(o, kind) for kind in heat.kinds_of(o)]
    table = CellTable(names, rows, frozenset(range(1, len(names))))
    return ReportSection("gradients", table=table, notes=notes, pictures=pictures)


def _cell(o: Overview, i: int, c: int) -> str:
    return f"{o.norms[0, i, c]:.2g}" if o.there[i, c] else ""
