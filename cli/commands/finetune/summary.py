"""The plan of a fine-tune, printed line by line before it takes memory or time."""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from math import prod
from types import MappingProxyType

import numpy as np

from pyggml.cli.commands.finetune.job import OBJECTIVE_FLAGS
from pyggml.cli.terminal.exit import option
from pyggml.cli.terminal.show import count, plural, printable, row, size
from pyggml.errors import ConfigError
from pyggml.gguf import GGUFFile
from pyggml.granted import total_memory
from pyggml.jit.cores import n_cores
from pyggml.lora import (
    Adapter,
    Corpus,
    DataConfig,
    LoraConfig,
    RunMemory,
    TrainConfig,
    TrainedTensors,
    Trainer,
)
from pyggml.lora.data import FileSummary
from pyggml.lora.data.prompts import Prompts
from pyggml.lora.data.reading.files import UNREAD
from pyggml.lora.trainer.caps import caps
from pyggml.model import Model

_SHOWN = 5  # files that were left out


def n_parameters(file: GGUFFile) -> int:
    return sum(prod(t.shape) for t in file.tensors.values())


def weight_types(file: GGUFFile) -> str:
    """The weight types, by share of the file's tensor bytes: Q4_K 61 %, Q6_K 39 %."""
    n_bytes: Counter[str] = Counter()
    for t in file.tensors.values():
        n_bytes[t.dtype.name] += t.n_bytes
    whole = max(n_bytes.total(), 1)
    return ", ".join(
        f"{name} {100 * n / whole:.0f} %" for name, n in n_bytes.most_common() if n >= whole / 200
    )


def say_model(model: Model) -> None:
    c, file = model.config, model.file
    name = printable(str(file.get("general.name", file.path.name)))[:60]
    parts = [
        f"{name} ({c.architecture}), {count(n_parameters(file))} parameters",
        f"{plural(c.n_layer, 'block')}, context {c.n_ctx:,}",
    ]
    row("model", ", ".join(parts))
    row("", f"{weight_types(file)}; {size(file.n_bytes)}")


def say_trained(
    trained: Adapter | TrainedTensors, modules: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> None:
    """What is trained, and what kind of file will hold it.

    modules: names of target modules in transformers, and what they are in the file
    """
    n, whole = trained.parameters.n_trained, n_parameters(trained.model.file)
    percent = "100" if n == whole else f"{100 * n / whole:.2g}"
    share = f"{n:,} parameters trained, {percent} % of the model's"
    if isinstance(trained, TrainedTensors):
        first, *more = trained.words
        row("trained", f"{first}: {share}")
        for line in more:
            row("", line)
        row("", "an adapter cannot hold them, so the output is the whole model")
        return
    c = trained.config
    matrices = plural(len(trained.pairs), "matrix", "matrices")
    row("adapter", f"rank {c.rank}, alpha {c.alpha:g}, on {matrices}: {share}")
    if modules:
        row("", "; ".join(f"{n} is {', '.join(ours)}" for n, ours in modules.items()))
    kinds = _kinds(c, len(trained.model.adapters) - 1 - bool(trained.fixed))
    if kinds:
        row("", ", ".join(kinds))
    if c.dora:
        row("", "an adapter cannot hold DoRA, so the output is the whole model, merged")


def _kinds(c: LoraConfig, n_below: int) -> list[str]:
    """The differences of an adapter from plain LoRA."""
    patterns = (c.rank_pattern, c.alpha_pattern)
    n_patterns = sum(len(p) for p in patterns if p)
    kinds = {
        "rsLoRA": c.rslora,
        f"{plural(n_patterns, 'pattern')} of ranks and alphas": n_patterns,
        f"dropout {c.dropout:g}": c.dropout,
        "PiSSA, so the file has twice the rank": c.init == "pissa",
        f"LoRA+ {c.plus_ratio:g}": c.plus_ratio != 1,
        "DoRA": c.dora,
        f"on top of {plural(n_below, 'adapter')}": n_below,
    }
    return [kind for kind, is_on in kinds.items() if is_on]


def say_data(corpus: Corpus, config: DataConfig) -> None:
    """What was read, file by file if there are several, what is held out, and what was skipped."""
    if len(corpus.files) == 1:
        (read,) = corpus.files
        kind = f" ({read.kind})" if read.kind != "text" else ""
        named = f"{read.source.path.name}{kind}: "
    else:
        for i, read in enumerate(corpus.files):
            row("" if i else "data", _source_line(read))
        named = "together "
    parts = _amounts(corpus)
    row("" if len(corpus.files) > 1 else "data", named + ", ".join(parts))
    _say_left_out(corpus)
    for read in corpus.files:
        _say_unread(read)
        if read.skipped.total:
            what = plural(read.skipped.total, "bad row")
            row("skipped", f"{read.source.path.name}: {what}: {read.skipped}")
        if read.not_kept:
            row("", f"its tokens are not kept for the next run: {read.not_kept}")
    if config.val_split and corpus.validation is None:
        row("", f"nothing is held out: {_why_none(corpus, config.val_split)}")


def _amounts(corpus: Corpus) -> list[str]:
    """How much there is to learn, in how many windows, and what is held out."""
    train, held_out = corpus.train, corpus.validation
    n_windows = f"{len(held_out) if held_out else 0:,} held out"
    if isinstance(train, Prompts):
        most = int(np.count_nonzero(train.documents >= 0, axis=1).max())
        return [f"{plural(len(train), 'prompt')} of up to {plural(most, 'token')}", n_windows]
    n, n_out = train.n_targets(), held_out.n_targets() if held_out else 0
    parts = [
        f"{n:,} tokens to learn",
        f"{plural(len(train), 'window')} of {_lengths(corpus)}",
        n_windows,
    ]
    if train.repeats is not None:
        parts[1] += f", {train.n_read:,} read in an epoch"
    if corpus.n_documents > 1:
        parts[0] += f" in {plural(corpus.n_documents - corpus.n_held_out, 'document')}"
        share = f", {100 * n_out / (n + n_out):.2g} % of the tokens" * (n_out > 0)
        parts[2] = f"{plural(corpus.n_held_out, 'document')} held out{share}"
    return parts


def _say_unread(read: FileSummary) -> None:
    """The columns of a file that rows were not made of."""
    names = [note.removeprefix(UNREAD) for note in read.notes if note.startswith(UNREAD)]
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        shown = ", ".join(name[:40] for name in names[:_SHOWN])
        row("not read", f"{read.source.path.name}: {plural(len(names), 'column')}: {shown}{more}")


def _say_left_out(corpus: Corpus) -> None:
    """Files of folders that were not read, and why."""
    left_out = corpus.left_out
    for i, (path, reason) in enumerate(left_out[:_SHOWN]):
        row("" if i else "left out", f"{path.name} {reason}")
    if len(left_out) > _SHOWN:
        row("", f"and {plural(len(left_out) - _SHOWN, 'file')} more")


def _lengths(corpus: Corpus) -> str:
    """256; or 32, 80 or 256."""
    *shorter, longest = map(str, corpus.lengths)
    return f"{', '.join(shorter)} or {longest}" if shorter else longest


def _source_line(read: FileSummary) -> str:
    """A file among several."""
    weight = f", read {read.source.weight:g} times an epoch" * (read.source.weight != 1)
    several = f" in {plural(read.n_documents, 'document')}" * (read.kind != "text")
    out = ", held out" * (read.n_held_out == read.n_documents)
    return f"{read.source.path.name} ({read.kind}): {read.n_tokens:,} tokens{several}{weight}{out}"


def _why_none(corpus: Corpus, val_split: float) -> str:
    if corpus.n_documents > 1:
        return (
            f"each document has more than twice the {100 * val_split:.2g} % that --val-split "
            "asks for"
        )
    return "there is one window" if len(corpus.train) == 1 else "there is one document"


def say_places(trainer: Trainer) -> None:
    """Print which device computes which blocks, if several do, and what streams to it."""
    model = trainer.model
    if model.placement is not None:
        row("layers", str(model.placement))
        if (overlap := trainer.passes.overlap) is not None:
            row("", overlap)
    if (streaming := model.streaming) is not None:
        row("streamed", str(streaming))
        training = trainer.passes.training
        row("", f"a pass there and back: {streaming.copies(training.n_streamed)}")
        if training.n_parked:
            text = "of what blocks give wait in the host's memory for the way back"
            row("", f"{streaming.copies(training.n_parked)}, {text}")
    texts = trainer.ranks.texts(str(streaming or ""))
    for rank, text in enumerate(texts):
        if text != texts[0] and trainer.ranks.is_first:
            row("streamed", f"rank {rank}: {text or 'nothing'}")


def say_memory(reserved: RunMemory, config: TrainConfig) -> None:
    """Print the memory of a run; ConfigError if there is less than its unmapped part."""
    checkpointing = config.grad_checkpointing
    own = reserved.arena + reserved.parameters
    stay = f"; {size(reserved.weights)} of weights stay in the file" if reserved.weights else ""
    graph = f"{size(reserved.arena)} for the graph" + ", gradient checkpointing" * checkpointing
    row(
        "memory",
        f"{size(own)}: {graph}, {size(reserved.parameters)} for trained parameters, gradients and "
        f"optimizer state{stay}",
    )
    if config.step_in_backward:
        clip = f"clipped to {config.clip:g} by the gradient's norm of the step before"
        clip += ", the first one not at all"
        row(
            "", f"each tensor's step follows its gradient: {clip if config.clip else 'not clipped'}"
        )
    there = total_memory()
    if own > there:
        less = "a smaller --batch or --ctx" + " or --grad-checkpointing" * (not checkpointing)
        raise ConfigError(
            f"the run needs {size(own)} of memory and this machine has {size(there)}: {less} "
            "needs less"
        )


def say_steps(trainer: Trainer, fixed: Collection[str]) -> None:
    """Print the length and the rate of a run, which of these are defaults, and which settings do
    less than they say.

    fixed: parameters that the user gave
    """
    c, done, rate = trainer.config, trainer.progress.step, trainer.learning_rate
    start = f", {done:,} of them done" if done else ""
    n_windows = min(c.windows_per_step, trainer.corpus.train.n_read)
    last = trainer.n_in_last_step
    short = f", {last:,} in an epoch's last (--drop-last leaves it out)" if last < n_windows else ""
    word = "prompt" if trainer.objective.rows == "prompts" else "window"
    warm = f" after {plural(rate.n_warmup, 'step')} of warm-up" if rate.n_warmup else ""
    row(
        "steps",
        f"{trainer.n_steps:,}{start}, {plural(n_windows, word)} each{short}; learning rate "
        f"{c.lr:g}, {c.lr_scheduler}{warm}; {plural(trainer.n_threads, 'thread')}",
    )
    usual = _defaults_of(trainer, fixed)
    if usual:
        row("", f"by default, as for {trainer.objective.name}: {', '.join(usual)}")
    capped = [(name, reason) for name, reason in caps(trainer) if name in fixed]
    for i, (name, reason) in enumerate(capped):
        row("" if i else "settings", f"{option(name)} {reason}")


def _defaults_of(trainer: Trainer, fixed: Collection[str]) -> list[str]:
    """The objective's own defaults that this run has, as options."""
    objective, config, rate = trainer.objective, trainer.config, trainer.learning_rate
    of_run = {n: value for n, value in objective.defaults.items() if getattr(config, n) == value}
    own = {f.name: getattr(objective, f.name) for f in fields(objective)}
    own = {name: value for name, value in own.items() if type(value) in (int, float)}
    is_short = rate.n_warmup < rate.n_warmup_set
    here = {"warmup_steps": f" (here {rate.n_warmup})"} if is_short else {}
    return [
        f"{option(name)} {value:g}{here.get(name, '')}"
        for name, value in (of_run | own).items()
        if OBJECTIVE_FLAGS.get(name, name) not in fixed
    ]


def say_ranks(trainer: Trainer, device: str, is_given: bool) -> None:
    """Print how many ranks share a step, and the device of each that has one. All ranks call it.

    is_given: whether the user gave the number of passes
    """
    ranks = trainer.ranks
    if ranks.size == 1:
        return
    passes = plural(trainer.config.grad_accum, "pass", "passes")
    why = "" if is_given else f", as for --grad-accum {trainer.config.grad_accum}"
    row("ranks", f"{ranks.size} processes share the {passes} of a step{why}")
    devices = ranks.texts(device)
    if any(d != "cpu" for d in devices):
        row("", ", ".join(f"rank {i} on {d}" for i, d in enumerate(devices)))
        if "mpiexec" in ranks.launcher and n_cores() == 1 < (every := os.cpu_count() or 1):
            few = f"a rank may use one of {every} cores, where kernels compile one after the other"
            row("", f"{few}: mpiexec --bind-to none leaves it all")
