"""The job that the command line describes, and whether its disks have room and a place for it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import click

from pyggml.cli import demo
from pyggml.cli.commands.finetune import config_file
from pyggml.cli.terminal.devices import WHERE
from pyggml.cli.terminal.exit import option
from pyggml.cli.terminal.hub import data_files, model_file
from pyggml.cli.terminal.kinds import ADAPTER, MODEL_FILE, FileKind
from pyggml.cli.terminal.options import adapter_word, given_settings
from pyggml.cli.terminal.paths import beside, check_output, check_space
from pyggml.cli.terminal.places import Output, inputs_of
from pyggml.cli.web import report
from pyggml.errors import CheckpointError, ConfigError, Fault
from pyggml.files import user_cache
from pyggml.hub import HELD_OUT
from pyggml.lora import DataConfig, LoraConfig, Objective, Parameters, TrainConfig
from pyggml.lora.data import Source, TokenCache
from pyggml.lora.data.reading.expand import STDIN
from pyggml.lora.data.unused import OF_TEXTS, unused_by_answers, unused_by_classes
from pyggml.lora.objectives.choice import ObjectiveConfig
from pyggml.lora.optim import kept_bytes
from pyggml.lora.ranks import Ranks
from pyggml.lora.ranks.device import EVERY_CARD, devices_of_ranks
from pyggml.lora.record import are_records, check_loggers, metrics_beside
from pyggml.lora.trainer.folder import existing, hold, newest

LORA_FLAGS = {
    name: f"lora_{name}" for name in ("rank", "alpha", "modules", "dropout", "init", "plus_ratio")
}
OBJECTIVE_FLAGS = {"beta": "preference_beta"}
SETTINGS_FLAGS: Mapping[type, Mapping[str, str]] = {
    DataConfig: {},
    LoraConfig: LORA_FLAGS,
    TrainConfig: {},
    ObjectiveConfig: OBJECTIVE_FLAGS,
}
_NEEDED = {"model": "-m MODEL.gguf", "data": "-f TEXT", "output": "-o ADAPTER.gguf"}
ADAPTERS, SCALES, FULL = WHAT = "adapter", "scales", "full"  # what --train names
_PLACEHOLDER = Path("adapter.gguf")  # of a job that writes nothing
# A job's own, no settings.
_OWN = (
    *_NEEDED,
    "init",
    "original",
    "below",
    "what",
    "train_tensors",
    "qat",
    "masters",
    "prompt",
    "answer_every",
    "log_to",
    "report",
)
_NOT_IN_FILES = ("seed", "dropout", "plus_ratio")  # of an adapter, so given again with --init
_CHECKPOINTS = ("checkpoint_dir", "checkpoint_every", "cache_dir")
AUTO = Path("auto")  # of --resume: the newest checkpoint, or a new run if there is none
METRICS = FileKind("metrics of a run", are_records)
_HEADER_BYTES = 64 << 10  # more than the header of an adapter takes


@dataclass(frozen=True, slots=True)
class Job:
    """A model, data, settings, and the paths of the results."""

    model: Path
    data: tuple[str | Path, ...]
    output: Path
    init: Path | None
    original: Path | None
    below: tuple[tuple[Path, float], ...] | None
    what: str | None
    train_tensors: tuple[str, ...] | None
    qat: str | None
    masters: str | None
    resume: Path | None
    prompt: str | None
    answer_every: int | None
    preview: int | None
    log_to: tuple[str, ...] | None
    report: bool | None
    lora: LoraConfig
    reading: DataConfig
    train: TrainConfig
    objective: Objective
    dry_run: bool
    max_memory: int | None
    device: str
    gpu_layers: int | str | None
    split: tuple[float, ...] | None
    ranks: int | None
    stream_weights: str | None
    fixed: frozenset[str]  # parameters that the user gave, which nothing overrides
    previews_only: bool  # without an output, which a preview does not need
    is_forced: bool = False  # whether outputs replace files of any kind

    @property
    def where(self) -> dict[str, Any]:
        """What computes, as `load` takes it."""
        return {name: getattr(self, name) for name in WHERE}

    @property
    def is_split(self) -> bool:
        """Whether devices compute some blocks of a model each; else each computes passes."""
        return self.gpu_layers is not None or self.split is not None

    @property
    def n_ranks(self) -> int:
        """Processes that share the run, where no launcher starts them."""
        named = 1 if self.is_split else len(devices_of_ranks(self.device))
        return self.ranks or named

    @property
    def writes_nothing(self) -> bool:
        """Whether there is no output, as of a dry run that names none."""
        return self.output is _PLACEHOLDER

    @property
    def tensors(self) -> tuple[str, ...] | None:
        """Patterns of the model's own tensors that are trained, all with --train full."""
        return ("*",) if self.what == FULL and self.train_tensors is None else self.train_tensors

    @property
    def trains_scales(self) -> bool:
        """Whether the scales of the model's blocks are trained, instead of an adapter."""
        return self.what == SCALES

    @property
    def outputs(self) -> list[Output]:
        """All files that are written."""
        whole = self.lora.dora or self.tensors is not None or self.trains_scales
        metrics = metrics_beside(self.output)
        outputs = [
            Output(self.output, MODEL_FILE if whole else ADAPTER),
            Output(beside(self.output, ".yaml"), config_file.SETTINGS_FILE),
            Output(metrics, METRICS, stays=True),
        ]
        if self.report is not False:
            outputs.append(Output(beside(self.output, ".html"), report.REPORT))
        if self.resume is None:  # an older run's are set aside
            old = metrics.with_suffix(".old.jsonl")
            outputs.append(Output(old, METRICS, stays=not metrics.exists()))
        return outputs

    @property
    def paths_read(self) -> dict[str, Any]:
        """The files and folders that are read, by parameter, as names of the hub were found."""
        data = [source.path for source in self.sources]
        named = {name: getattr(self, name) for name in ("model", "init", "original", "below")}
        points: Any = self.resume
        if self.resume is not None and self.resume.is_dir():
            points = existing(self.resume)
        return {**named, "resume": points, "data": data, "val_file": self.reading.val_file}

    @property
    def sources(self) -> tuple[Source, ...]:
        """The files to train on, each with its weight."""
        return tuple(Source.of(file) for file in self.data)

    @property
    def files(self) -> list[Path]:
        """All files and folders that are read."""
        held_out = self.reading.val_file or ()
        return [*(source.path for source in self.sources), *map(Path, held_out)]

    @property
    def cache(self) -> TokenCache | None:
        """The folder of kept tokens: beside the checkpoints, else the user's; None in a dry run."""
        if self.dry_run or self.previews_only:
            return None
        if self.reading.cache_dir is not None:
            return TokenCache(Path(self.reading.cache_dir))
        if self.train.checkpoint_dir is not None:
            folder = Path(self.train.checkpoint_dir).absolute()
            return TokenCache(folder.with_name(f"{folder.name}.tokens"))
        try:
            return TokenCache(user_cache() / "tokens")
        except RuntimeError:  # this user has no home
            return None

    def identity(self) -> dict[str, Any]:
        """The parameters that identify the run: a job with the same ones is the same run.

        The folder of checkpoints is not among them: it holds the run's own.
        """
        parameters: dict[str, Any] = {name: getattr(self, name) for name in _OWN}
        parameters["below"] = self.below and tuple(map(adapter_word, self.below))
        excluded = _ruled_out(parameters)[0]
        parameters["objective"] = self.objective.name
        for config in (self.reading, self.lora, self.train, self.objective):
            flags = SETTINGS_FLAGS.get(type(config), OBJECTIVE_FLAGS)
            names = {f.name: flags.get(f.name, f.name) for f in fields(config)}
            free = (n for n in names if config is not self.lora or names[n] not in excluded)
            parameters |= {names[n]: getattr(config, n) for n in free}
        return {name: value for name, value in parameters.items() if name not in _CHECKPOINTS}


def job_of(
    given: Mapping[str, Any], places: Mapping[str, str] | None = None, faults: Sequence[str] = ()
) -> Job:
    """The job that these parameters describe; None stands for a parameter that the user did not
    give.

    places   parameter -> its place in a settings file
    faults   what is wrong with that file

    Raises ConfigError with all faults.
    """
    fixed = frozenset(name for name, value in given.items() if value is not None)
    given = _complete(given)
    configs, wrong = _configs(given, places or {})
    if problems := [*faults, *_clashes(given), *wrong]:
        raise ConfigError(problems)
    reading, lora, train, objective = configs
    if idle := _idle_settings(reading, objective, bool(given["answer_every"])):
        raise ConfigError(idle)
    names = *_OWN, *WHERE, "resume", "preview", "max_memory", "ranks"
    own = {name: given[name] for name in names} | {"device": given["device"] or "cpu"}
    return Job(
        **own,
        reading=reading,
        lora=lora,
        train=objective.settle(train),
        objective=objective,
        dry_run=bool(given["dry_run"]),
        fixed=fixed,
        previews_only=given["output"] is _PLACEHOLDER and not given["dry_run"],
    )


def _configs(given: Mapping[str, Any], places: Mapping[str, str]) -> tuple[list[Any], list[Fault]]:
    """The settings of each kind; and their faults, without which there is one of each."""
    configs, faults = list[Any](), list[Fault]()
    for kind, flags in SETTINGS_FLAGS.items():
        try:
            config: Any = kind(**given_settings(kind, flags, given))
            configs.append(config.build() if kind is ObjectiveConfig else config)
        except ConfigError as error:
            named = [(flags.get(f[0], f[0]), f) for f in error.faults if not isinstance(f, str)]
            faults += [f"{places[name]} {f[1]}" if name in places else f for name, f in named]
    return configs, faults


def _idle_settings(reading: DataConfig, objective: Objective, answers: bool) -> list[Fault]:
    """Settings that do nothing with the objective. answers: whether a prompt is answered on the
    way."""
    if objective.rows == "training":
        return []
    if answers and objective.rows in OF_TEXTS:
        return [("answer_every", f"does nothing with {objective.name}, whose models write no text")]
    unused = unused_by_classes if objective.rows in OF_TEXTS else unused_by_answers
    return unused(reading, objective.name)


def _complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """With what the demo brings, and a resumed run's folder for its next checkpoints."""
    given = dict(given)
    if given["output"] is None and not given["demo"] and (given["dry_run"] or given["preview"]):
        given["output"] = _PLACEHOLDER
    if given["demo"]:
        demo.check()
        defaults: dict[str, Any] = {"model": demo.BASE, "output": demo.OUTPUT}
        defaults |= {"data": (demo.TEXT,), "prompt": demo.PROMPT, **demo.SETTINGS}
        excluded, _ = _ruled_out(given)
        if given["val_split"] == 0 and not given["val_file"]:
            excluded = [*excluded, "val_every", "val_windows"]
        for name, value in defaults.items():
            if given[name] is None and name not in excluded:
                given[name] = value
    if given["resume"] == AUTO and given["checkpoint_dir"] is not None:
        folder = Path(given["checkpoint_dir"])
        given["resume"] = folder if existing(folder) else None
    if given["checkpoint_dir"] is None and given["resume"] is not None and given["resume"].is_dir():
        given["checkpoint_dir"] = str(given["resume"])
    return given


def _clashes(given: Mapping[str, Any]) -> list[str]:
    """What is missing, or excludes each other."""
    clashes = []
    missing = [flag for name, flag in _NEEDED.items() if given[name] is None]
    if missing:
        clashes.append(f"wanted {', '.join(missing)}, or --demo, which needs nothing else")
    if given["qat"] is not None and given["what"] != FULL and given["train_tensors"] is None:
        clashes.append("--qat wants --train full: it trains what the blocks of a file hold")
    is_own = given["what"] == FULL or given["train_tensors"] is not None
    if given["masters"] is not None and not (is_own and not given["qat"] and not given["original"]):
        clashes.append(
            "--masters is for --train full or --train-tensors, without --qat and --original, whose "
            "blocks are packed of float32"
        )
    if given["what"] not in (None, *WHAT):
        clashes.append(f"--train is {given['what']!r}, wanted {', '.join(WHAT)}")
    clashes += _clash_of_devices(given)
    excluded, why = _ruled_out(given)
    clash = ["--" + name.replace("_", "-") for name in excluded if given[name] is not None]
    if clash:
        clashes.append(f"{why}: leave out {', '.join(clash)}")
    is_loftq, has_original = given["lora_init"] == "loftq", given["original"] is not None
    if is_loftq > has_original or (has_original and not is_loftq and given["what"] != FULL):
        clashes.append(
            "--lora-init loftq and --original, the model before quantising, want each other"
        )
    alone = ["--checkpoint-every"] if given["checkpoint_every"] is not None else []
    keeps = given["checkpoint_keep"] not in (None, TrainConfig.checkpoint_keep)
    alone += ["--checkpoint-keep"] if keeps else []
    alone += ["--resume auto"] if given["resume"] == AUTO else []
    if alone and given["checkpoint_dir"] is None:
        clashes.append(f"{' and '.join(alone)} wants --checkpoint-dir, a folder for checkpoints")
    return clashes


def _clash_of_devices(given: Mapping[str, Any]) -> Iterator[str]:
    """Devices that are to compute passes and blocks, or another number of them than processes."""
    device, n = given["device"] or "cpu", given["ranks"]
    of_blocks = [option(k) for k in ("gpu_layers", "split") if given[k] is not None]
    if device == EVERY_CARD and of_blocks:
        yield (
            f"--device {device} gives each card passes of a step, {' and '.join(of_blocks)} blocks "
            "of the model: wanted one of both, for blocks --device cuda:0,cuda:1"
        )
    n_named = device.count(",") + 1
    if n is not None and n_named > 1 and (of_blocks or n != n_named):
        yield f"--ranks is {n} and --device {device}: wanted one for each process"


def check_shared(job: Job, ranks: Ranks) -> None:
    """ConfigError for what several processes cannot share: a pipe, which each would read for
    itself; and for another number of them than a launcher has started."""
    if ranks.size > 1:
        if ranks.launcher and job.ranks not in (None, ranks.size):
            started = f"{ranks.size} processes are started by a launcher"
            raise ConfigError(f"--ranks is {job.ranks}, and {started}: leave it out")
        return
    pipe = next((path for path in job.files if path == STDIN or path.is_fifo()), None)
    if pipe is not None and job.n_ranks > 1:
        raise ConfigError(
            f"{pipe}: is a pipe, which is read once: wanted a file for {job.n_ranks} processes"
        )


def _ruled_out(given: Mapping[str, Any]) -> tuple[list[str], str]:
    """The parameters that --init, --train or --train-tensors rule out, and the reason."""
    names = [f.name for f in fields(LoraConfig) if f.name != "seed"]
    whole = [*(LORA_FLAGS.get(n, n) for n in names), "init"]
    if given["what"] == FULL:
        return whole, "--train full trains the model itself, no adapter"
    whole.append("original")
    if given["what"] == SCALES:
        return [*whole, "train_tensors"], "--train scales trains the model itself, no adapter"
    if given["train_tensors"] is not None:
        return whole, "--train-tensors trains the model itself, no adapter"
    if given["init"] is not None:
        excluded = [LORA_FLAGS.get(n, n) for n in names if n not in _NOT_IN_FILES]
        excluded.append("original")
        return excluded, "--init takes rank, alpha and modules from its file"
    return [], ""


def with_hub_files(job: Job) -> Job:
    """With the files of what the job names by its name on the hub, which are downloaded now."""
    data: list[str | Path] = []
    for given in job.data:
        source = Source.of(given)
        files = data_files(source.path)
        weight = "" if source.weight == 1 else f":{source.weight:g}"
        data += [given] if files == [source.path] else [f"{f}{weight}" for f in files]
    out = job.reading.val_file
    held_out = out and tuple(str(f) for path in out for f in data_files(Path(path), HELD_OUT))
    reading = replace(job.reading, val_file=held_out)
    model, init = model_file(job.model), job.init and model_file(job.init)
    original = job.original and model_file(job.original)
    named: dict[str, Any] = {"model": model, "init": init, "original": original}
    return replace(job, **named, data=tuple(data), reading=reading)


def files_read(
    job: Job, options: Iterable[click.Parameter], parameters: Mapping[str, Any], config: Path | None
) -> list[tuple[str, Path]]:
    """What a job of these parameters reads: a word for it, and a path."""
    read = {**parameters, **job.paths_read}
    if config is not None and not config_file.SETTINGS_FILE.is_one(config):
        read["config"] = config  # else it is what another run wrote, and this one may again
    return inputs_of(options, read)


def save_settings(job: Job, options: Iterable[click.Parameter]) -> None:
    """Write the settings of a job beside its adapter, with the keys of these options."""
    config_file.write(beside(job.output, ".yaml"), job.identity(), options)


def check_places(job: Job) -> None:
    """Check the outputs now, so that nothing fails after hours. A dry run takes no lock file."""
    if not job.writes_nothing:
        _check_apart(job)
    check_loggers(job.log_to or ())
    folder = job.train.checkpoint_dir
    if folder is not None and Path(folder).exists():
        if not Path(folder).is_dir():
            raise ConfigError(f"{folder}: is a file, wanted a folder for checkpoints")
        check_output(Path(folder, "step.gguf"))
        with (
            nullcontext() if job.dry_run else hold(Path(folder))
        ):  # the run takes it again; a refusal shall come before the work
            pass
    if job.resume is not None and not job.resume.exists():
        raise CheckpointError(f"{job.resume}: does not exist, wanted a checkpoint to resume from")


def _check_apart(job: Job) -> None:
    """ConfigError for what is written into a folder all of whose files are read."""
    written = [job.output, job.train.checkpoint_dir, job.reading.cache_dir]
    for path in (Path(each) for each in written if each is not None):
        above = path.resolve().parents
        around = next((f for f in job.files if f.is_dir() and f.resolve() in above), None)
        if around is not None:
            raise ConfigError(f"{path}: lies in {around}, all of which is read as data")


def check_room(job: Job, parameters: Parameters, n_output: int) -> None:
    """ConfigError if a disk lacks room for the output or for the checkpoints.

    n_output: bytes of the output
    """
    check_space(job.output, n_output + _HEADER_BYTES)
    folder = job.train.checkpoint_dir
    if folder is not None:  # one more than those that stay
        there = sum(path.stat().st_size for path in existing(Path(folder)))
        each = parameters.trained_bytes + kept_bytes(job.train, parameters) + _HEADER_BYTES
        n_bytes = each * (job.train.checkpoint_keep + 1)
        check_space(Path(folder), max(0, n_bytes - there))


def checkpoint_of(path: Path) -> Path:
    """A checkpoint, or the newest whole one in a folder."""
    return newest(path) if path.is_dir() else path
