"""Settings as a YAML file: one `name: value` a line, named like the long options.

Words without quotes have their YAML 1.2 meaning: 2e-4 is a number, `yes` is text. A file is hostile
until checked: its size and depth are bounded, and it can make no objects and no copies of parts.
"""

import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import yaml

from pyggml.cli.terminal.devices import LayerCount, Shares
from pyggml.cli.terminal.exit import ELSEWHERE, NEEDLESS
from pyggml.cli.terminal.help import TITLES, GroupedOption
from pyggml.cli.terminal.hints import program
from pyggml.cli.terminal.kinds import written_kind
from pyggml.cli.terminal.options import ListType, Names, Patterns, Size
from pyggml.cli.terminal.places import Reads
from pyggml.errors import ConfigError, cause_of, suggestion
from pyggml.files import open_regular, replacing

_MOST_BYTES, _DEEPEST = 256 << 10, 5


@dataclass(frozen=True, slots=True)
class FileSettings:
    """Settings, some of a file: values by parameter, the place of the file's, and its faults."""

    values: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)  # rank -> "run.yaml: line 3: lora_rank"
    faults: tuple[str, ...] = ()


def key_of(option: click.Parameter) -> str:
    """The name of an option in a file: --lora-rank -> lora_rank."""
    return next(o for o in option.opts if o.startswith("--"))[2:].replace("-", "_")


def of_command_line(
    given: Mapping[str, Any], command: click.Command, path: Path | None
) -> FileSettings:
    """The parameters of a command line, and from the file, if there is one, those that are not
    given. Raises ConfigError as `read` does."""
    options = [o for o in command.params if o.expose_value and o.name != "config"]
    file = FileSettings() if path is None else read(path, options)
    values = {name: file.values.get(name) if v is None else v for name, v in given.items()}
    places = {name: place for name, place in file.places.items() if given[name] is None}
    return FileSettings(values, places, file.faults)


def read(path: Path, options: Iterable[click.Parameter]) -> FileSettings:
    """The settings in a file for these options.

    Raises ConfigError for a file that cannot be read or is not YAML; the result lists faulty
    settings.
    """
    by_key = {key_of(option): option for option in options}
    grouped = [option for option in by_key.values() if isinstance(option, GroupedOption)]
    by_key |= {alias.replace("-", "_"): o for o in grouped for alias in o.aliases}
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    lines: dict[str, int] = {}
    faults = []
    for line, name, value in _pairs(path):
        key, place = name.replace("-", "_"), f"{path}: line {line}: {name}"
        option = by_key.get(key)
        if option is None:
            faults.append(f"{place} is no setting{_suggestion(key, by_key)}")
            continue
        key = key_of(option)
        if key in lines:
            faults.append(f"{place} stands on line {lines[key]} already")
        lines[key] = line
        if value is None:  # as if it were not there
            continue
        assert option.name is not None
        try:
            values[option.name] = _convert(value, option)
            places[option.name] = place
        except ValueError as error:
            faults.append(f"{place} is {value!r}, wanted {error}")
    return FileSettings(values, places, tuple(faults))


def _suggestion(key: str, by_key: Mapping[str, Any]) -> str:
    if key in NEEDLESS:
        return f", nor need be: {NEEDLESS[key]}"
    ours = ELSEWHERE.get(key)
    return f": did you mean {ours!r}?" if ours else suggestion(key, by_key)


def _convert(value: Any, option: click.Parameter) -> Any:
    """The value as the command line would give it; ValueError says what was wanted.

    Ranges and the types of numbers are checked by the settings themselves.
    """
    if isinstance(option.type, Reads | click.Path):
        value = _at_home(value)
    if isinstance(option.type, click.Path):
        if not isinstance(value, str) or not value:
            raise ValueError("a path")
        return Path(value)
    if isinstance(option, click.Option) and option.multiple:
        several = value if isinstance(value, list) else [value]
        if not several or not all(isinstance(item, str) and item for item in several):
            raise ValueError("a file or a list of files")
        return tuple(option.type.convert(item, None, None) for item in several)
    if isinstance(option, click.Option) and option.is_flag:
        if not isinstance(value, bool):
            raise ValueError("true or false")
        return value
    if isinstance(option.type, Patterns):
        try:
            return option.type.convert(value, None, None)
        except click.BadParameter as error:
            raise ValueError("patterns and their numbers, such as {ffn_*: 16}") from error
    if isinstance(option.type, Names):
        return _words(value, option.type)
    if isinstance(option.type, ListType):
        one = option.type.one
        return _list(value, option.type) if isinstance(value, list) else _scalar(value, one)
    if isinstance(option.type, LayerCount | Shares):
        try:
            return option.type.convert(value, None, None)
        except click.BadParameter as error:
            raise ValueError(error.message.partition("wanted ")[2]) from None
    return _scalar(value, option.type)


def _at_home(value: Any) -> Any:
    """The paths in a value, with ~ as a shell reads it."""
    if isinstance(value, list):
        return [*map(_at_home, value)]
    # Path.expanduser would raise RuntimeError for a user that there is none of, ~nobody/m.gguf.
    return os.path.expanduser(value) if isinstance(value, str) else value  # noqa: PTH111


def _words(value: Any, kind: Names) -> tuple[str, ...]:
    """Words in a list or with commas between them; a mapping is words with = in them."""
    if isinstance(value, dict) and value:
        value = [f"{name}={of}" for name, of in value.items()]
    if isinstance(value, str):
        return kind.read(value)
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ValueError("words, such as [a, b]")
    return tuple(value)


def _list(values: Sequence[Any], kind: ListType) -> Any:
    """Several values of a setting, of which a sweep tries each."""
    if not values:
        raise ValueError("a value, or a list of values")
    try:
        return kind.convert([_scalar(value, kind.one) for value in values], None, None)
    except click.BadParameter:
        raise ValueError("numbers") from None


def _scalar(value: Any, kind: click.ParamType) -> Any:
    """A size, a number or a word."""
    if isinstance(kind, Size):
        try:
            return kind.convert(value, None, None)
        except click.BadParameter:
            raise ValueError("a size such as 4GB or 800MB") from None
    if isinstance(kind, click.IntRange):
        value = _whole(value)
        if type(value) is not int or value < (kind.min or 0):
            raise ValueError(f"a whole number, {kind.min or 0} or more")
    if kind is click.INT:
        return _whole(value)
    if isinstance(kind, click.types.StringParamType) and not isinstance(value, str):
        is_many = isinstance(value, list | dict)
        raise ValueError("one word" if is_many else "a word; put it in quotes")
    return value


def _whole(value: Any) -> Any:
    """A whole number that is written with .0, as transformers has epochs, without it."""
    if isinstance(value, float) and not value.is_integer():
        raise ValueError("a whole number")
    return int(value) if isinstance(value, float) else value


# -- YAML ---------------------------------------------------------------------------------------

# What a word without quotes is, by the first of these that it matches whole; else it is text.
_WORDS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    (r"|~|null", lambda word: None),
    (r"true|false", lambda word: word.lower() == "true"),
    (r"[-+]?[0-9]{1,30}", int),
    (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)(e[-+]?[0-9]+)?", float),
)
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}


def _pairs(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Line, name and value of every setting. ConfigError if the file is not a list of settings."""
    text = _text(path)
    try:
        _check_events(path, yaml.parse(text, yaml.BaseLoader))
        root = yaml.compose(text, yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise ConfigError(f"{path}: {line}is no YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is no YAML: {error}") from None
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: wanted lines of `name: value`, such as `lr: 1e-4`")
    for key, value in root.value:
        assert key.start_mark is not None
        yield key.start_mark.line + 1, str(_plain(key)), _plain(value)


def _text(path: Path) -> str:
    try:
        with open_regular(path) as file:
            raw = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise ConfigError(f"{path}: cannot be read: {cause_of(error)}") from None
    if len(raw) > _MOST_BYTES:
        raise ConfigError(f"{path}: has more than {_MOST_BYTES >> 10} KiB, wanted settings")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}: line {line}: is not UTF-8") from None


def _check_events(path: Path, events: Iterable[yaml.Event]) -> None:
    """ConfigError for YAML that settings never need.

    Deep nesting would exhaust the stack; anchors, aliases and tags could make a small file huge.
    """
    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        assert event.start_mark is not None
        place = f"{path}: line {event.start_mark.line + 1}:"
        if depth > _DEEPEST:
            raise ConfigError(f"{place} lies more than {_DEEPEST} levels deep")
        if getattr(event, "anchor", None) is not None:
            raise ConfigError(f"{place} has an anchor or alias, which settings cannot have")
        if getattr(event, "tag", None) not in (None, "!", *_PLAIN_TAGS):
            raise ConfigError(f"{place} has a tag, which settings cannot have")


def _plain(node: yaml.Node) -> Any:
    """A YAML node as numbers, words, lists and dictionaries."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {str(_plain(key)): _plain(value) for key, value in node.value}
    assert isinstance(node, yaml.ScalarNode)
    word = node.value
    if node.style is None:  # no quotes
        for pattern, kind in _WORDS:
            if re.fullmatch(pattern, word, re.IGNORECASE):
                return kind(word)
    return word


# -- the settled settings, beside the adapter ---------------------------------------------------

_FIRST_WORDS = "# Written by pyggml-finetune"
SETTINGS_FILE = written_kind("settings of pyggml-finetune", _FIRST_WORDS)


def write(path: Path, values: Mapping[str, Any], options: Iterable[click.Parameter]) -> None:
    """Write the values of these options, by parameter. `--config PATH` gives the same ones again.

    Raises PyggmlError if the disk refuses.
    """
    again = shlex.join([*program("finetune"), "--config", str(path)])
    lines = [f"{_FIRST_WORDS}: the settings of a run, which this repeats:", f"# {again}"]
    group = ""
    for option in options:
        value = values.get(option.name or "")
        if not isinstance(option, GroupedOption) or value is None:
            continue
        if option.group != group:
            group = option.group
            lines += ["", f"# {TITLES[group]}"]
        lines.append(f"{key_of(option)}: {_format(value)}")
    with replacing(path) as out:
        out.write(("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))


def _format(value: Any) -> str:
    """The text that `_plain` reads back as this value: only words are in quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_format(k)}: {_format(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_format, value)) + "]"
    if isinstance(value, str | Path):
        quoted = yaml.dump(str(value), default_style='"', allow_unicode=True, width=math.inf)
        return str(quoted).rstrip("\n")
    return repr(value).lower() if isinstance(value, bool) else repr(value)
