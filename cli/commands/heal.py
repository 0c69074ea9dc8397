"""`pyggml heal`: a fine-tune of a quantised model towards its original, measured before and after.

It is `finetune` with fewer options and other defaults: distillation from the original, LoftQ's
start and a rank by the model's size, or the scales of the blocks, or all numbers in them. The
measures are perplexities and divergences on what is held out.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from pyggml import Model, gguf, load
from pyggml.cli.commands.finetune import config_file
from pyggml.cli.commands.finetune.command import command as finetune
from pyggml.cli.commands.finetune.command import fine_tune
from pyggml.cli.commands.finetune.job import ADAPTERS, FULL, OBJECTIVE_FLAGS, SCALES
from pyggml.cli.commands.finetune.record import ReportTable
from pyggml.cli.terminal.help import GroupedCommand, GroupedOption, by_group
from pyggml.cli.terminal.hub import model_file
from pyggml.cli.terminal.places import PATH
from pyggml.cli.terminal.show import row, say
from pyggml.errors import ConfigError
from pyggml.look.intervals import Interval
from pyggml.lora import Report, Trainer
from pyggml.lora.data import Dataset
from pyggml.lora.evaluate.distance import Distance, closed, distances
from pyggml.lora.objectives.choice import USERS
from pyggml.lora.objectives.distill import Distill
from pyggml.lora.objectives.sft import SFT
from pyggml.lora.trainer.reports import Callback
from pyggml.tokenizer.same_tokens import check_same_tokens

_CHANCE = 0.98  # of ln n_vocab, the loss of a model that has learned nothing
_OBJECTIVES, _WHAT = (Distill.name, SFT.name), (ADAPTERS, SCALES, FULL)
_ELSEWHERE = {OBJECTIVE_FLAGS.get(n, n) for n in USERS if not {*USERS[n]} & {*_OBJECTIVES}}
_NOT_HERE = _ELSEWHERE | {"original", "lora_init", "init", "train_tensors", "qat", "masters"}
_NOT_HERE |= {"dora", "demo"}
_COMMON = (
    *("model", "data", "ctx", "val_file", "what", "lora_rank", "epochs", "max_steps"),
    *("batch", "lr", "grad_checkpointing", "max_memory", "device", "output"),
    *("checkpoint_dir", "resume", "config", "dry_run"),
)
_RANKS = (8, 64)  # the least and the most by size
_RATE = 1e-3  # of learning, of an adapter


@dataclass(frozen=True, slots=True, eq=False)
class Healing:
    """A run that is measured: the original model, what is held out, how far the quantised model
    was from the original before, and how far the healed one is once it is there."""

    original: Model
    held_out: Dataset
    trainer: Trainer
    before: Sequence[Distance]
    healed: Distance | None = None

    @classmethod
    def of(cls, original: Path, trainer: Trainer) -> "Healing":
        """Raises ConfigError where nothing is held out, and for an original that has learned
        nothing: it has nothing to give."""
        base, sample = trainer.reference, trainer.validation
        assert base is not None
        if sample is None:
            raise ConfigError("nothing is held out to measure by: wanted --val-split or --val-file")
        model = load(original, compute=base.compute)
        held_out = sample.dataset.part(np.asarray(sample.windows, np.int64))
        before = distances([model, base], held_out)
        loss, chance = before[0].losses.mean(), log(model.config.n_vocab)
        if loss >= _CHANCE * chance:
            raise ConfigError(
                f"{original}: predicts what is held out no better than chance (its loss is "
                f"{loss:.2f}, that of chance {chance:.2f}), as random weights do: to heal towards "
                "it is pointless"
            )
        return cls(model, held_out, trainer, before)

    def say_before(self) -> None:
        """Print how far the quantised model is from the original."""
        original, quantised = self.before
        row("original", _words(original, False))
        row("quantised", _words(quantised, True))

    def after(self) -> "Healing":
        """With how far the healed model is."""
        _, healed = distances([self.original, self.trainer.model], self.held_out)
        return replace(self, healed=healed)

    def say_after(self) -> None:
        """Print all three, and what is closed of the gap."""
        assert self.healed is not None
        say()
        row("held out", f"{len(self.healed.losses):,} tokens; [a, b]: 95 % confidence interval")
        self.say_before()
        row("healed", _words(self.healed, True))
        row("gap", self._gap())

    def table(self) -> ReportTable:
        """The same for the report."""
        assert self.healed is not None
        original, quantised = self.before
        rows = [("model", "perplexity", "KL from the original, nats")]
        rows.append(("original", _figures(original.perplexity, 2), ""))
        for name, d in (("quantised", quantised), ("healed", self.healed)):
            rows.append((name, _figures(d.perplexity, 2), _figures(d.divergence, 4)))
        title = f"Healing: {len(original.losses):,} held-out tokens, 95 % confidence intervals"
        return ReportTable(title, [*rows, ("gap", self._gap(), "")])

    def _gap(self) -> str:
        assert self.healed is not None
        original, quantised = self.before
        if quantised.losses.mean() <= original.losses.mean():
            return "none: the quantised model predicts this text as well as the original"
        x = closed(original, quantised, self.healed)
        share = f"{100 * x.value:.0f} % [{100 * x.low:.0f}, {100 * x.high:.0f}]"
        return f"{share} of that in perplexity is closed"


def _hear(report: Report) -> None:
    """Nothing is done with the reports of a run."""


def _words(d: Distance, is_apart: bool) -> str:
    words = f"perplexity {_figures(d.perplexity, 2)}"
    return words + f", {_figures(d.divergence, 4)} nats from the original (KL)" * is_apart


def _figures(x: Interval, digits: int) -> str:
    return f"{x.value:.{digits}f} [{x.low:.{digits}f}, {x.high:.{digits}f}]"


def _rank(path: Path) -> int:
    """A 16th of the model's width, as a power of two."""
    with gguf.open(path) as file:
        architecture = file.get("general.architecture")
        width = file.get(f"{architecture}.embedding_length", 0)
    rank = 1 << max(int(width) // 16, 1).bit_length() - 1
    return min(max(rank, _RANKS[0]), _RANKS[1])


def _check_choices(settings: Mapping[str, Any]) -> None:
    """ConfigError for what heals nothing."""
    for flag, value, choices in (
        ("--objective", settings["objective"], _OBJECTIVES),
        ("--train", settings["what"], _WHAT),
    ):
        if value not in (None, *choices):
            raise ConfigError(f"{flag} is {value!r}, heal wants {' or '.join(choices)}")


def _defaults(settings: Mapping[str, Any], original: Path) -> dict[str, Any]:
    """What holds where the user gave nothing, by the parameters of finetune."""
    defaults: dict[str, Any] = {}
    if settings["objective"] != SFT.name:
        defaults |= {"objective": Distill.name, "teacher": str(original), "hard_weight": 0.0}
    if settings["what"] == FULL:
        defaults["original"] = original
    elif settings["what"] != SCALES:
        rank = settings["lora_rank"]
        if rank is None and settings["model"] is not None:
            rank = _rank(model_file(settings["model"]))
        defaults |= {"original": original, "lora_init": "loftq", "lora_rank": rank}
        defaults |= {"lora_alpha": rank, "lr": _RATE}
    return {name: value for name, value in defaults.items() if settings.get(name) is None}


def _heal(config: Path | None, original: Path, **given: Any) -> int:
    """The exit code."""
    path = model_file(original)
    settings = config_file.of_command_line(given, command, config).values
    _check_choices(settings)
    if settings["model"] is not None:
        with gguf.open(path) as first, gguf.open(model_file(settings["model"])) as second:
            check_same_tokens(first, second)
    every = {p.name or "": given.get(p.name or "") for p in finetune.params if p.expose_value}
    every |= _defaults(settings, path)
    del every["config"]
    measured = list[Healing]()

    def watch(trainer: Trainer) -> Callback:
        measured.append(Healing.of(path, trainer))
        measured[0].say_before()
        say()
        return _hear

    def measure() -> ReportTable:
        measured[0] = measured[0].after()
        return measured[0].table()

    continued = command, {**given, "original": original}
    code = fine_tune(config, every, watch, measure, continued)
    for healing in measured if code == 0 else ():
        healing.say_after()
    return code


# Defaults of options that are others of finetune, in words; and words for short help.
_BY_SIZE = f"a 16th of the model's width, {_RANKS[0]} to {_RANKS[1]}"
_DEFAULTS = {name: f"{value}" for name, value in Distill.defaults.items()} | {
    "objective": Distill.name,
    "teacher": "that of --from",
    "hard_weight": "0.0",
    "lora_rank": _BY_SIZE,
    "lora_alpha": "the rank",
    "warmup_ratio": "none",
    "lr": f"{_RATE:g} of an adapter, else by the bits of a weight",
}
_HELP = {
    "what": "what is trained: an adapter; scales, those of the model's blocks; or full, all that "
    "they hold. The output of both is the whole model, of the same size and types  "
    "[default: adapter]",
    "objective": "what is learned: distill, the original's probabilities of each token; or sft, "
    "the text itself  [default: distill]",
}
_BRIEF = {"what": "adapter, scales of the blocks, or full", "objective": "distill or sft"}


def _own(option: GroupedOption) -> GroupedOption:
    """An option of finetune with heal's words."""
    mine, name = copy(option), option.name or ""
    mine.common = name in _COMMON
    mine.help, mine.brief = _HELP.get(name, mine.help or ""), _BRIEF.get(name, mine.brief)
    if name in _DEFAULTS:
        text, _, notes = mine.help.partition("  [")
        kept = re.sub(r"(; )?default: .*", "", notes.removesuffix("]"))
        more = [*filter(None, [kept]), f"default: {_DEFAULTS[name]}"]
        mine.help = f"{text}  [{'; '.join(more)}]"
    return mine


def _options() -> Iterator[GroupedOption]:
    """Those of finetune that make sense here."""
    for option in finetune.params:
        is_here = option.expose_value and option.name not in _NOT_HERE
        if is_here and isinstance(option, GroupedOption):
            yield _own(option)


_FROM = GroupedOption(
    ["--from", "original"],
    type=PATH,
    required=True,
    group="model",
    common=True,
    help="model that --model was quantised from: F32, F16, BF16 or Q8_0",
    brief="model that --model was quantised from",
)
command = GroupedCommand(
    "heal",
    callback=_heal,
    help="Give a quantised model back what quantising took, and measure it: by an adapter, or by "
    "--train scales or full in the model's own blocks.\n\n"
    "The adapter is on all linear modules and starts from the difference to the original. The "
    "original is the teacher; with --objective sft the text is. Perplexity and divergence from the "
    "original are measured on what is held out. The options are finetune's, those of other "
    "objectives apart.",
    quiet="plan, progress or samples",
    asks=False,
    examples=[
        "pyggml heal --from model-F16.gguf -m model-Q2_K.gguf -f text.txt -o heal.gguf",
        "pyggml heal --from F16.gguf -m Q2_K.gguf -f text.txt -o h.gguf --train scales",
        "pyggml heal --from F16.gguf -m Q2_K.gguf -f text.txt -o a.gguf --max-steps 300",
    ],
    params=by_group([_FROM, *_options()]),
)
