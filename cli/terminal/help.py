"""Help in groups: a screen at `--help`, a line an option; all options, in full, at `--help-all`."""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import click

from pyggml.cli.terminal.exit import OF_LLAMA_CPP
from pyggml.cli.terminal.places import (
    InputPath,
    OutputFolder,
    OutputPath,
    check_places,
    inputs_of,
    outputs_of,
    replacements,
)
from pyggml.cli.terminal.show import say_progress, set_quiet

F = TypeVar("F", bound=Callable[..., Any])

# In the order of the help; the settings' own groups (pyggml.settings.GROUPS) are among them.
TITLES = {
    "model": "Model",
    "data": "Data",
    "text": "Text",
    "sampling": "Sampling",
    "adapter": "Adapter",
    "optimiser": "Training",
    "memory": "Memory and speed",
    "server": "Server",
    "output": "Output",
    "help": "Settings and help",
}
_TRUTHS = {"true": True, "yes": True, "false": False, "no": False}
# Names may have _ for -, as in TRL.
SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "token_normalize_func": lambda name: name.replace("_", "-"),
}
_METAVARS = {click.Choice: "WORD", click.IntRange: "N", click.FloatRange: "X", InputPath: "FILE"}
_HALF = re.compile("[\ud800-\udfff]")
_FORCE = "pyggml.force"
_SCREEN = 30  # lines of a short help, above which it has its first paragraph alone


class GroupedOption(click.Option):
    """An option that help lists in a group, short help only if it is common. What it takes is named
    by its type, and its default is told, unless its help does so.

    aliases   other names that it has, without dashes; help does not list them
    brief     what short help says of it (default: the first clause of its help)
    """

    def __init__(
        self,
        *args: Any,
        group: str,
        common: bool = False,
        aliases: Sequence[str] = (),
        brief: str = "",
        **kwargs: Any,
    ) -> None:
        names = (name for kind, name in _METAVARS.items() if isinstance(kwargs.get("type"), kind))
        kwargs.setdefault("metavar", next(names, None))
        kwargs.setdefault("show_default", "default: " not in (kwargs.get("help") or ""))
        super().__init__(*args, **kwargs)
        self.group, self.common, self.brief = group, common, brief
        self.aliases = tuple(aliases)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """As click's, with the aliases."""
        own = self.opts, self.secondary_opts
        self.opts = [*self.opts, *(f"--{alias}" for alias in self.aliases)]
        if self.secondary_opts:
            no = (f"--no-{alias}" for alias in self.aliases)
            self.secondary_opts = [*self.secondary_opts, *no]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts, self.secondary_opts = own

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """As click's; BadParameter for words that are no UTF-8. Names of files may be any bytes."""
        words = value if isinstance(value, tuple | list) else [value]
        if self.type is click.STRING and any(isinstance(w, str) and _HALF.search(w) for w in words):
            fault = "has half of a surrogate pair, a byte that is no text, wanted UTF-8"
            raise click.BadParameter(fault, ctx, self)
        return super().type_cast_value(ctx, value)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """As click's; a switch is written --[no-]name."""
        record = super().get_help_record(ctx)
        if record is None or not self.secondary_opts:
            return record
        return self.opts[-1].replace("--", "--[no-]", 1), record[1]

    def brief_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """The same of a line: the first clause, and of the notes the default."""
        record = self.get_help_record(ctx)
        if record is None:
            return None
        text, *brackets = record[1].split("  [")
        about = self.brief or re.split(r"; | \(", text, maxsplit=1)[0]
        notes = [note for each in brackets for note in each.removesuffix("]").split("; ")]
        kept = [n.removeprefix("default: ") for n in notes if n.startswith(("default: ", "req"))]
        first, comma, _ = kept[0].partition(", ") if kept else ("", "", "")  # of each objective's
        return record[0], f"{about} [{first}{', …' * bool(comma)}]" if kept else about


class GroupedCommand(click.Command):
    """A command of grouped options, with `--help`, `--help-all` and `--quiet`.

    examples   what its help ends with, three lines of a shell
    quiet      what `--quiet` leaves out
    asks       whether what it writes and reads is checked here, before it is called; else it asks
               `check_places` itself
    """

    def __init__(
        self,
        *args: Any,
        examples: Sequence[str] = (),
        quiet: str = "progress",
        asks: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **{"context_settings": SETTINGS} | kwargs)
        self.examples, self._asks = examples, asks
        if any(isinstance(p.type, OutputPath | OutputFolder) for p in self.params):
            about = "replace a file that is there, whatever it is; never one that is read"
            self.params.append(_acting_option("--force", act=_force, about=about, group="output"))
        page, all_of_it = (partial(_show_help, whole=whole) for whole in (False, True))
        self.params += [
            _acting_option(*names, act=act, about=about)
            for names, act, about in (
                (("-q", "--quiet"), lambda ctx, value: set_quiet(value), f"print no {quiet}"),
                (("-h", "--help"), page, "this page, with defaults in brackets"),
                (("--help-all",), all_of_it, "every option, with what it takes"),
            )
        ]
        self.add_help_option = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's; a switch may also be given a value, as other trainers write it: --packing
        false is --no-packing. An option of llama.cpp that is none here is refused, whatever its
        first letter is: -np is no -n."""
        own = {name for option in self.params for name in option.opts}
        if strange := [a for a in args if a[:1] == "-" and a[1:] in OF_LLAMA_CPP and a not in own]:
            raise click.NoSuchOption(strange[0], ctx=ctx)
        if sum(a.partition("=")[0] == "--config" for a in args) > 1:
            raise click.UsageError("--config is given twice, wanted one file of settings", ctx)
        return super().parse_args(ctx, [*self._plain_switches(ctx, args)])

    def _plain_switches(self, ctx: click.Context, args: Sequence[str]) -> Iterator[str]:
        normal = ctx.token_normalize_func or str
        switches = {
            normal(name): (option.opts[-1], option.secondary_opts[-1])
            for option in self.params
            if isinstance(option, GroupedOption) and option.secondary_opts
            for name in (*option.opts, *(f"--{alias}" for alias in option.aliases))
        }
        words = [word for arg in args for word in _split_switch(arg, normal, switches)]
        skip = False
        for word, after in zip(words, [*words[1:], ""], strict=False):
            if not skip and normal(word) in switches and after.lower() in _TRUTHS:
                yield switches[normal(word)][not _TRUTHS[after.lower()]]
                skip = True
            elif not skip:
                yield word
            else:
                skip = False

    def invoke(self, ctx: click.Context) -> Any:
        """As click's, once it is clear that no file is lost by what the command writes."""
        if self._asks:
            outputs = outputs_of(self.params, ctx.params)
            check_places(outputs, inputs_of(self.params, ctx.params), is_forced(ctx))
            if said := replacements(outputs):
                say_progress(said)
        return super().invoke(ctx)

    def help_text(self, ctx: click.Context, whole: bool) -> str:
        """The help; whole: every option in full, else a line of each common one."""
        paragraphs = (self.help or "").split("\n\n")
        text = self._text(ctx, paragraphs, whole)
        if whole or text.count("\n") < _SCREEN:
            return text
        return self._text(ctx, paragraphs[:1], whole)

    def _text(self, ctx: click.Context, paragraphs: Sequence[str], whole: bool) -> str:
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        for paragraph in paragraphs:
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(" ".join(paragraph.split()))
        groups = {title: self._records(ctx, group, whole) for group, title in TITLES.items()}
        width = max(len(option) for records in groups.values() for option, _ in records)
        formatter.write_paragraph()
        for title, records in groups.items():
            if records:  # padded, so that the texts of all groups align
                formatter.write_heading(title)
                with formatter.indentation():
                    rows = [(o.ljust(width), text) for o, text in records]
                    formatter.write_dl(rows, col_max=40)
        if self.examples:
            formatter.write_heading("Examples")
            formatter.write("".join(f"  {example}\n" for example in self.examples))
        return formatter.getvalue().rstrip("\n")

    def _records(self, ctx: click.Context, group: str, whole: bool) -> list[tuple[str, str]]:
        """The options of a group and what each is for, or of these the common ones."""
        return [
            record
            for option in self.params
            if isinstance(option, GroupedOption) and option.group == group
            if (whole or option.common)
            and (record := option.get_help_record(ctx) if whole else option.brief_record(ctx))
        ]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(self.help_text(ctx, whole=False) + "\n")


def grouped_command(name: str, *examples: str, **about: Any) -> Callable[..., GroupedCommand]:
    """A function as such a command."""
    return click.command(name, cls=GroupedCommand, examples=examples, **about)


def grouped_option(
    group: str, names: str, help: str, common: bool = True, **about: Any
) -> Callable[[F], F]:
    """A function's parameter as such an option. names: "-f --file text", as click takes them."""
    about |= {"group": group, "common": common, "help": help}
    return click.option(*names.split(), cls=GroupedOption, **about)


def _split_switch(arg: str, normal: Callable[[str], str], switches: Container[str]) -> list[str]:
    """--packing=false as two words; any other argument as it is."""
    name, equals, value = arg.partition("=")
    is_switch = equals and normal(name) in switches and value.lower() in _TRUTHS
    return [name, value] if is_switch else [arg]


def is_forced(ctx: click.Context) -> bool:
    """Whether --force was given."""
    return bool(ctx.meta.get(_FORCE))


def by_group(options: Iterable[click.Parameter]) -> list[click.Parameter]:
    """The options in the order of the help's groups, in which a file of settings has them too."""
    grouped = [option for option in options if isinstance(option, GroupedOption)]
    return [option for group in TITLES for option in grouped if option.group == group]


def _acting_option(
    *names: str, act: Callable[[click.Context, bool], None], about: str, group: str = "help"
) -> GroupedOption:
    """A flag that acts as it is read, those of help before all others: a model's name may print
    while it is read."""
    is_first = group == "help"
    return GroupedOption(
        [*names],
        is_flag=True,
        is_eager=is_first,
        expose_value=False,
        callback=lambda ctx, param, value: act(ctx, value),
        help=about,
        group=group,
        common=is_first,
    )


def _force(ctx: click.Context, value: bool) -> None:
    ctx.meta[_FORCE] = value


def _show_help(ctx: click.Context, asked: bool, whole: bool) -> None:
    if asked and not ctx.resilient_parsing:
        assert isinstance(ctx.command, GroupedCommand)
        click.echo(ctx.command.help_text(ctx, whole))
        ctx.exit()
