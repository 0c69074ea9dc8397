"""What commands that write a model again have in common: progress, what was lost, sizes."""

from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType

from pyggml.cli.terminal.exit import end_if_signalled
from pyggml.cli.terminal.help import grouped_option
from pyggml.cli.terminal.places import PATH
from pyggml.cli.terminal.progress import ChangingLine
from pyggml.cli.terminal.show import percent, plural, printable, row, say, size
from pyggml.gguf import GGUFFile
from pyggml.graph.dtypes import DType
from pyggml.quants import QUANTS, NoFit
from pyggml.requantize import PackingLosses
from pyggml.requantize.imatrix import ImportanceMatrix
from pyggml.requantize.losses import TensorLoss

IMATRIX = grouped_option(
    "output",
    "--imatrix",
    "importance matrix, by pyggml imatrix or llama.cpp (Q4 to Q5, K-quants and IQ types use it)",
    type=PATH,
)
TENSORS = grouped_option(
    "output", "--tensors", "print a line for each tensor as well", is_flag=True
)


class RewriteProgress:
    """The `progress` of `rewrite`: one line that changes on a terminal, nothing elsewhere."""

    def __init__(self, file: GGUFFile) -> None:
        self._n, self._done = len(file.tensors), 0
        self._line = ChangingLine()

    def __call__(self, name: str, old: DType, new: DType) -> None:
        end_if_signalled()
        self._done += 1
        said = old.name if old is new else f"{old.name} → {new.name}"
        self._line.show(f"{self._done} of {self._n} tensors: {printable(name)}, {said}")
        if self._done == self._n:
            self._line.show("")


def say_tensors(
    file: GGUFFile,
    target: GGUFFile,
    losses: PackingLosses,
    n_updates: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """A line for each tensor: types, sizes, updates, and what packing lost."""
    lost = {loss.name: loss for loss in losses.tensors}
    for i, (name, info) in enumerate(file.tensors.items(), 1):
        old, new = info.dtype, target.tensors[name].dtype
        after = prod(info.shape[:-1]) * new.row_bytes(info.shape[-1])
        words = [f"{old.name} kept"]
        if old is not new:
            words = [f"{old.name} → {new.name}, {size(info.n_bytes)} → {size(after)}"]
        words += [plural(n_updates[name], "update")] if n_updates.get(name) else []
        words += _loss_words(lost[name]) if name in lost else []
        say(
            f"[{i:4}/{len(file.tensors)}] {printable(name):<32} {info.shape!s:<16} "
            f"{', '.join(words)}"
        )


def _loss_words(loss: TensorLoss) -> list[str]:
    share, error = loss.sums.share, loss.sums.error
    words = [] if share is None else [f"{percent(share)} of it written"]
    return [*words, f"error {percent(error)}"] if error else words


def say_losses(losses: PackingLosses, hint: str = "") -> None:
    """What packing lost in all: of the update, of the numbers, and a warning if much of the update
    is not in the file, with a type that keeps it and a hint at what else does."""
    if not losses.tensors:
        return
    sums = losses.sums
    if sums.share is not None:
        least = _label("least", losses.least.sums.share, losses.least)
        row("update", f"{percent(sums.share)} of it is in the file; {least}")
    if sums.error:
        most = _label("most", losses.worst.sums.error, losses.worst)
        row("rounding", f"an error of {percent(sums.error)}, root mean square; {most}")
    if losses.is_lost:
        advice = f": {losses.better} keeps it{hint}" if losses.better else ""
        row("warning", f"much of what was learned is lost in {losses.least.dtype}{advice}")


def say_unweighted(losses: PackingLosses, importance: ImportanceMatrix | None) -> None:
    """Of the tensors whose importance is known, those of types in which it changes nothing."""
    names = importance.sums if importance else {}
    kinds = Counter(loss.dtype.name for loss in losses.tensors if loss.name in names)
    for kind, n in kinds.items():
        fit = QUANTS[kind].fit
        if isinstance(fit, NoFit):
            row("importance", f"changes nothing in {plural(n, 'tensor')} of {kind}: {fit.reason}")


def _label(what: str, share: float | None, loss: TensorLoss) -> str:
    return f"{what} {percent(share)}, {loss.name} ({loss.dtype})"


def say_sizes(file: GGUFFile, target: Path) -> None:
    """The sizes of the file that was read and of that written."""
    n_before, n_after = file.n_bytes, target.stat().st_size
    share = f"{100 * n_after / n_before:.0f} %"
    say(f"{file.path}: {size(n_before)}\n{target}: {size(n_after)}, {share}")
