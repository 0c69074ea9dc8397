"""Runs a command and turns whatever ends it into an exit code and at most one sentence.

0 done    2 an error that input or the machine caused    130 stopped by Ctrl-C, a signal or a reader
of standard output that closed it

A fault of the program itself keeps its traceback.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

import click

from pyggml.cli.terminal.show import printable
from pyggml.errors import PyggmlError

FAILED, STOPPED = 2, 130
# Settings whose option has another name than --SETTING.
_OPTIONS = {
    "alpha": "--lora-alpha",
    "beta": "--preference-beta",
    "dropout": "--lora-dropout",
    "init": "--lora-init",
    "modules": "--lora-modules",
    "rank": "--lora-rank",
    "model": "-m",
    "n_ctx": "--ctx",
    "n_tokens": "-n",
    "plus_ratio": "--lora-plus-ratio",
    "temperature": "--temp",
    "text": "-f",
}


def run(command: Callable[[], click.Command], name: str, args: Sequence[str] | None) -> int:
    """The exit code of the command that `command` imports; args None are those of the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character the terminal lacks is no error
            stream.reconfigure(errors="replace")
    output = sys.stdout
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return _call(command, name, args)
        except SystemExit as stop:
            if sys.stdout is not output:  # click puts another there when a reader went away
                silence(output)
                return STOPPED
            return stop.code if isinstance(stop.code, int) else FAILED
        except (KeyboardInterrupt, click.Abort):
            return _report("stopped", name, STOPPED)
        except click.ClickException as error:
            return _report(error.format_message(), name, FAILED)
        except PyggmlError as error:
            return _report(error.said(option), name, FAILED)
        except MemoryError as error:
            return _report(f"there is not enough memory: {error}", name, FAILED)
        except OSError as error:
            return _lost_output(error, name)


def option(setting: str) -> str:
    """The option that gives a setting: settings.val_split -> --val-split, adapter.rank ->
    --lora-rank."""
    name = setting.rsplit(".", 1)[-1]
    return _OPTIONS.get(name, "--" + name.replace("_", "-"))


def _call(command: Callable[[], click.Command], name: str, args: Sequence[str] | None) -> int:
    given = None if args is None else list(args)
    code = command().main(given, prog_name=name, standalone_mode=False)
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _report(reason: str, name: str, code: int) -> int:
    with suppress(OSError):  # standard error may be closed as well
        print(f"{name}: {printable(' '.join(reason.split()))}", file=sys.stderr)
    return code


def _lost_output(error: OSError, name: str) -> int:
    """Standard output is full or closed (`| head`): nothing more goes there, not even at exit."""
    if error.filename is None:
        silence(sys.stdout)
    if error.errno == errno.EPIPE:
        return STOPPED
    where = error.filename or "standard output"
    return _report(f"{where}: {error.strerror or error}", name, FAILED)


def silence(stream: TextIO) -> None:
    """From now on what is written to a standard stream, or waits in its buffer, goes nowhere."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:  # noqa: PTH123  # a device
        os.dup2(nowhere.fileno(), stream.fileno())


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"note: {printable(str(message))}", file=sys.stderr)
