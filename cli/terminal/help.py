"""Help in groups: the common options of each at `--help`, all of them at `--help-all`."""

from typing import Any

import click

# In the order of the help; the settings' own groups (pyggml.settings.GROUPS) are among them.
TITLES = {
    "model": "Model",
    "data": "Data",
    "text": "Text",
    "sampling": "Sampling",
    "adapter": "Adapter",
    "optimiser": "Optimiser",
    "memory": "Memory and speed",
    "server": "Server",
    "output": "Output",
    "help": "Settings and help",
}


class GroupedOption(click.Option):
    """An option that help lists in a group, short help only if it is common."""

    def __init__(self, *args: Any, group: str, common: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group, self.common = group, common

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """As click's; a switch is written --[no-]name."""
        record = super().get_help_record(ctx)
        if record is None or not self.secondary_opts:
            return record
        return self.opts[-1].replace("--", "--[no-]", 1), record[1]


class GroupedCommand(click.Command):
    """A command of grouped options, with `--help` and `--help-all`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [
            _help_option(["-h", "--help"], "these options, and stop", whole=False),
            _help_option(["--help-all"], "every option, and stop", whole=True),
        ]
        self.add_help_option = False

    def help_text(self, ctx: click.Context, whole: bool) -> str:
        """The help, with every option if it is to be whole."""
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        groups = {title: self._records(ctx, group, whole) for group, title in TITLES.items()}
        width = max(len(option) for records in groups.values() for option, _ in records)
        for title, records in groups.items():
            if records:
                with formatter.section(title):  # padded, so that the texts of all groups align
                    formatter.write_dl([(o.ljust(width), about) for o, about in records])
        return formatter.getvalue().rstrip("\n")

    def _records(self, ctx: click.Context, group: str, whole: bool) -> list[tuple[str, str]]:
        """The options of a group and what each is for, or of these the common ones."""
        return [
            record
            for option in self.params
            if isinstance(option, GroupedOption) and option.group == group
            if (whole or option.common) and (record := option.get_help_record(ctx))
        ]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(self.help_text(ctx, whole=False) + "\n")


def _help_option(names: list[str], about: str, whole: bool) -> GroupedOption:
    def show(ctx: click.Context, param: click.Parameter, asked: bool) -> None:
        if asked and not ctx.resilient_parsing:
            assert isinstance(ctx.command, GroupedCommand)
            click.echo(ctx.command.help_text(ctx, whole))
            ctx.exit()

    return GroupedOption(
        names,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help=about,
        group="help",
        common=True,
    )
