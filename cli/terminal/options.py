"""Options: those that commands share, and those that are made of a dataclass of settings.

A field `name: int = …` with metadata "help" and "range" becomes `--name N` with that help, range
and default; what the user does not give is None here, so that the dataclass alone has defaults.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import click

from pyggml.cli.terminal.devices import DEVICES, WHERE, say_placement
from pyggml.cli.terminal.help import F, GroupedOption, grouped_option
from pyggml.cli.terminal.hub import MODEL, model_file
from pyggml.cli.terminal.kinds import FileKind
from pyggml.cli.terminal.places import FileWord, OutputPath, Reads, WordType
from pyggml.errors import ConfigError

if TYPE_CHECKING:
    from pyggml.look.control import ControlVector
    from pyggml.model import Model

Adapter = tuple[Path, float]  # a file and its weight
_PLACES = {"dir": "FOLDER", "file": "FILE", "teacher": "FILE"}
# The last part of the names of settings that are read.
_FILE_WORDS = ("file", "teacher", "template")
_METAVARS = {int: "N", float: "X", str: "WORD", None: "A,B"}
# Parameters of commands that tell of a model's source under another name than it has there.
_PARAMETERS = {
    "path": "model",
    "adapters": "lora",
    "controls": "control_vector",
    "layers": "control_vector_layers",
}


class AdapterFile(Reads, WordType):
    """The path of an adapter, or its name on the hub, and a weight after a colon if it is not 1:
    a.gguf:0.5, OWNER/NAME:0.5."""

    name, of = "adapter", tuple

    def read(self, value: Any) -> Adapter:
        path, colon, weight = str(value).rpartition(":")
        if colon and not Path(value).exists():
            try:
                return model_file(Path(path)), float(weight)
            except ValueError:  # the colon is the path's own, or that of a type on the hub
                if path.endswith(".gguf"):
                    fault = f"{value}: the weight {weight!r} is no number, wanted one such as 0.5"
                    raise click.BadParameter(fault) from None
        return model_file(Path(value)), 1.0


class AdapterStack(Reads, WordType):
    """A file, or adapters that lie upon each other: a.gguf+b.gguf:0.5."""

    name, of = "adapters", tuple

    def read(self, value: Any) -> tuple[Adapter, ...]:
        path, _, weight = str(value).rpartition(":")
        names = [str(value), path] if path and "+" not in weight else [str(value)]
        is_one = "+" not in str(value) or any(Path(name).exists() for name in names)
        parts = [value] if is_one else str(value).split("+")
        return tuple(map(AdapterFile().read, parts))


def adapter_word(given: Adapter) -> str:
    """An adapter file as it is written: a.gguf, or a.gguf:0.5."""
    path, weight = given
    return str(path) if weight == 1 else f"{path}:{weight:g}"


ADAPTERS: dict[str, Any] = {
    "type": AdapterFile(),
    "multiple": True,
    "metavar": "ADAPTER[:WEIGHT]",
    "callback": lambda ctx, param, value: value or None,
}


CONTROL_ALIASES = ("control-vector-scaled",)
ONE_MODEL: dict[str, Any] = {
    "help": "GGUF model, or OWNER/NAME:TYPE of the hub",
    "aliases": ("model-name-or-path", "base-model"),
}
model_option = grouped_option("model", "-m --model", **ONE_MODEL, type=MODEL, required=True)
lora_option = grouped_option(
    "model", "--lora", "adapter to use with it; of several the updates add up", **ADAPTERS
)
control_option = grouped_option(
    "model",
    "--control-vector",
    "control vector, as llama.cpp's, to add after blocks; several add up",
    **{**ADAPTERS, "metavar": "FILE[:SCALE]"},
    common=False,
    aliases=CONTROL_ALIASES,
)
control_layers_option = grouped_option(
    "model",
    "--control-vector-layers",
    "blocks after which control vectors are added, both counted (default: all that have a "
    "direction)",
    type=click.IntRange(min=0),
    nargs=2,
    metavar="FIRST LAST",
    common=False,
    aliases=["control-vector-layer-range"],
)
draft_option = grouped_option(
    "model",
    "--draft",
    "smaller model of the same tokens that guesses some ahead, which the model checks in one "
    "pass where that is faster; the text stays the same",
    type=MODEL,
    common=False,
    aliases=["model-draft", "draft-model"],
)
threads_option = grouped_option(
    "memory",
    "--threads",
    "threads to use (0: all)",
    type=click.IntRange(min=0),
    default=0,
    show_default=False,
)
compute_option = grouped_option(
    "memory",
    "--compute",
    "precision of matrix products: int8, bf16, f32, which is exact, or auto, the fastest that "
    "this CPU has",
    type=click.Choice(["auto", "int8", "bf16", "f32"]),
    default="auto",
    brief="precision of products: int8, bf16, f32, auto",
)


def output_option(kind: FileKind, help: str) -> Callable[[F], F]:
    """-o, --output."""
    file = OutputPath(kind)
    return grouped_option("output", "-o --output", help, type=file, required=True)


def compute_options(function: F) -> F:
    """--threads, --compute, --device, --gpu-layers, --split and --stream-weights."""
    for name in reversed(WHERE):
        names, about = DEVICES[name]
        default = "cpu" if name == "device" else None
        option = click.option(*names, cls=GroupedOption, group="memory", default=default, **about)
        function = option(function)
    return threads_option(compute_option(function))


def pooling_option(group: str, common: bool = True, *more: str) -> Callable[[F], F]:
    """--pooling of embeddings; more: further words beside those that make one vector of a text."""
    return grouped_option(
        group,
        "--pooling",
        "a text's vector: the mean of its tokens', that of the first, of the last"
        + ("; none: all " if more else " ")
        + "(default: as the file says, else the last of a model that writes, else the mean)",
        type=click.Choice(["mean", "cls", "last", *more]),
        common=common,
    )


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model file, the adapters on top of it, what computes which of its blocks, and the control
    vectors that are added, files with their scales, after blocks `layers`, first and last; threads
    0: all."""

    path: Path
    adapters: tuple[Adapter, ...] = ()
    threads: int = 0
    compute: str = "auto"
    device: str = "cpu"
    controls: tuple[Adapter, ...] = ()
    layers: tuple[int, int] | None = None
    gpu_layers: int | str | None = None
    split: tuple[float, ...] | None = None
    stream_weights: str | None = None

    @classmethod
    def taken_from(cls, given: dict[str, Any]) -> ModelSource:
        """What parameters of a command tell of a model; they are taken out of these.

        ConfigError for --control-vector-layers as `check_control_layers` has it.
        """
        names = {f.name: _PARAMETERS.get(f.name, f.name) for f in fields(cls)}
        own = {name: given.pop(parameter, None) for name, parameter in names.items()}
        check_control_layers(own["layers"], own["controls"] or ())
        return cls(**{name: value for name, value in own.items() if value is not None})

    def load(self, n_rows: int = 512) -> Model:
        """The model, with the control vectors. Where it is larger than its card and nothing says
        what to do about that, the fastest is done. n_rows: tokens of most passes.

        Raises PyggmlError as `pyggml.load` does, and for vectors that are none of this model's.
        """
        from pyggml import load, threads  # which import Numba: not for a help text
        from pyggml.cli.terminal.placing import load_placed

        where: Any = {name: getattr(self, name) for name in WHERE}
        loaded = partial(load, self.path, [*self.adapters] or None, self.compute)
        model = load_placed(loaded, n_rows, **where)
        say_placement(model)
        threads.set(self.threads)
        for path, scale in self.controls:
            model = model.with_added(read_control(path, self.layers).addends(model, scale))
        return model

    def load_draft(self, path: Path | None) -> Model | None:
        """The model of --draft, computed as the other. Raises as `pyggml.load` does."""
        from pyggml import load

        return None if path is None else load(path, compute=self.compute, device=self.device)


def read_control(path: Path, layers: tuple[int, int] | None) -> ControlVector:
    """A control vector, or its directions for the blocks of --control-vector-layers. Raises as
    `ControlVector.read` does, and ConfigError if it has none for them."""
    from pyggml.look.control import ControlVector

    vector = ControlVector.read(path)
    if layers is None:
        return vector
    try:
        return vector.within(*layers)
    except ConfigError as error:
        raise ConfigError(f"{path}: --control-vector-layers: {error}") from None


def check_control_layers(layers: tuple[int, int] | None, controls: Sequence[Any]) -> None:
    """ConfigError for blocks in the wrong order, or without a control vector."""
    if layers and not controls:
        raise ConfigError("--control-vector-layers: wanted --control-vector FILE beside it")
    if layers and layers[0] > layers[1]:
        ends = f"{layers[0]} {layers[1]}"
        raise ConfigError(
            f"--control-vector-layers is {ends}, wanted the first block before the last"
        )


def _with_source(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command that gets what tells of a model as one argument, `source`."""

    @wraps(function)
    def command(**given: Any) -> Any:
        return function(source=ModelSource.taken_from(given), **given)

    return command


def model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--model, --lora, --control-vector and its layers, and what computes; the command gets them as
    `source`."""
    return model_option(lora_option(control_options(compute_options(_with_source(function)))))


def control_options(function: F) -> F:
    """--control-vector and --control-vector-layers."""
    return control_option(control_layers_option(function))


class Names(WordType):
    """Words separated by commas."""

    name, of = "names", tuple

    def read(self, value: Any) -> tuple[str, ...]:
        return tuple(word.strip() for word in value.split(","))


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


class Size(WordType):
    """Bytes: 4GB, 800 MB, 3.5GiB; or numbers, as in the examples that are given."""

    name = "size"

    def __init__(self, examples: str = "4GB or 800MB") -> None:
        self._examples = examples

    def read(self, value: Any) -> int:
        match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) *([kmgt]?i?)b?", str(value).lower())
        n = round(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
        if not n:
            raise click.BadParameter(f"is {value!r}, wanted a size such as {self._examples}")
        return n


class Patterns(WordType):
    """Words and their numbers, separated by commas: ffn_*=16,blk.0.*=4."""

    name, of = "patterns", dict

    def __init__(self, kind: type[int] | type[float]) -> None:
        self.kind = kind

    def read(self, value: Any) -> dict[str, Any]:
        numbers = {}
        for part in str(value).split(","):
            pattern, _, number = part.partition("=")
            try:
                numbers[pattern.strip()] = self.kind(number)
            except ValueError:
                fault = f"{part!r} is no PATTERN=NUMBER, such as ffn_*=16"
                raise click.BadParameter(fault) from None
        return numbers


class Pair(WordType):
    """A text and its number, 'the=-1.5'; as an option that is given for each, a mapping of them."""

    name, of = "pair", tuple

    def read(self, value: Any) -> tuple[str, float]:
        text, _, number = str(value).rpartition("=")
        try:
            return text, float(number)
        except ValueError:
            fault = f"{value!r} is no TEXT=NUMBER, such as the=-1.5"
            raise click.BadParameter(fault) from None


class ValueList(tuple[Any, ...]):
    """Several values of one setting, each of which is tried."""

    __slots__ = ()


class ListType(click.ParamType):
    """A value, or several with commas between them: 1e-4,3e-4; in a file a list."""

    name = "list"

    def __init__(self, one: click.ParamType) -> None:
        self.one = one

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, ValueList):
            return value
        parts = value if isinstance(value, list) else str(value).split(",")
        values = ValueList(
            dict.fromkeys(self.one.convert(str(part).strip(), param, ctx) for part in parts)
        )
        return values if len(values) > 1 else values[0]


def settings_options(
    config: type,
    flags: Mapping[str, str],
    without: Iterable[str] = (),
    defaults: Mapping[str, str] = MappingProxyType({}),
) -> list[GroupedOption]:
    """An option for every field.

    flags      renames some: field -> parameter, such as lora_rank
    defaults   what stands for the default None of some, in words
    """
    hints = get_type_hints(config)
    shown = [f for f in fields(config) if f.name not in set(without)]
    return [
        _option(f, hints[f.name], flags.get(f.name, f.name), defaults.get(f.name)) for f in shown
    ]


def _option(
    field: Field[Any], hint: Any, parameter: str, default: str | None = None
) -> GroupedOption:
    kind = next((k for k in (get_args(hint) or (hint,)) if k in (int, float, str)), None)
    file = FileWord() if parameter.split("_")[-1] in _FILE_WORDS else None
    many = next((m for m in get_args(hint) if get_origin(m) is Mapping), None)
    notes = []
    if field.metadata["range"]:
        notes.append(field.metadata["range"])
    default = default or field.metadata.get("default", field.default)
    if default not in (None, (), ""):
        notes.append(f"default: {default}")
    name = parameter.replace("_", "-")
    place = {n: field.metadata[n] for n in ("group", "common", "aliases", "brief")}
    if bool in (hint, *get_args(hint)):
        switch = f"--{name}/--no-{name}"
        about = field.metadata["help"] + "  [default: True]" * (field.default is True)
        return GroupedOption([switch, parameter], default=None, help=about, **place)
    about = field.metadata["help"] + (f"  [{'; '.join(notes)}]" if notes else "")
    if field.metadata["repeated"]:
        kinds: Any = Pair() if many is not None else file or str
        return _repeated_option([f"--{name}", parameter], kinds, help=about, **place)
    return GroupedOption(
        [f"--{name}", parameter],
        type=Patterns(get_args(many)[1]) if many else file or kind or Names(),
        metavar=_metavar(parameter, "A=N,B=N" if many else _METAVARS[kind]),
        help=about,
        **place,
    )


def _repeated_option(names: list[str], kind: Any, **about: Any) -> GroupedOption:
    """An option that is given once for every value: {text: number}, or a tuple of texts."""
    is_mapping = isinstance(kind, Pair)
    collected: type = dict if is_mapping else tuple
    return GroupedOption(
        names,
        type=kind,
        multiple=True,
        callback=lambda ctx, param, value: collected(value) if value else None,
        metavar="TEXT=X" if is_mapping else _metavar(names[1], "TEXT"),
        **about,
    )


def _metavar(parameter: str, of_kind: str) -> str:
    return _PLACES.get(parameter.split("_")[-1], of_kind)


def given_settings(
    config: type, flags: Mapping[str, str], given: Mapping[str, Any]
) -> dict[str, Any]:
    """field -> what the user gave for it, of this dataclass alone."""
    names = {f.name: flags.get(f.name, f.name) for f in fields(config)}
    return {name: given[p] for name, p in names.items() if given.get(p) is not None}


def words(options: Iterable[click.Parameter], given: Mapping[str, Any]) -> list[str]:
    """The arguments of a command line that gives these parameters; None is not given."""
    arguments: list[str] = []
    for option in options:
        value = given.get(option.name or "")
        if isinstance(value, bool):
            arguments += option.opts[-1:] if value else option.secondary_opts[-1:]
        elif isinstance(option, click.Option) and option.multiple:
            arguments += [word for one in value or () for word in (option.opts[0], _argument(one))]
        elif value is not None:
            arguments += [option.opts[0], _argument(value)]
    return arguments


def _argument(value: Any) -> str:
    """A parameter as it is written."""
    if isinstance(value, dict):
        return ",".join(f"{name}={number}" for name, number in value.items())
    if isinstance(value, tuple):
        return adapter_word(value) if isinstance(value[0], Path) else ",".join(map(str, value))
    return str(value)
