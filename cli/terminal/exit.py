"""Runs a command and turns whatever ends it into an exit code and at most one sentence.

0 done    2 an error that input or the machine caused    130 stopped by Ctrl-C, a closed terminal or
a reader of standard output that closed it    143 stopped by SIGTERM

SIGTERM and a closed terminal (SIGHUP) end any command so that no half-written file is left.

A fault of the program itself keeps its traceback.
"""

import errno
import io
import os
import re
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import Any, TextIO

import click

from pyggml.cli.terminal.show import note, printable, set_quiet, wrap
from pyggml.errors import PyggmlError, cause_of

FAILED, STOPPED, TERMINATED = 2, 130, 143
# How the system says that a library does not fit into memory.
_NO_ROOM = ("failed to map segment", "annot allocate memory")
_SOON = 0.01  # seconds
_last: list[Callable[[], None]] = []  # what is done when a command ends
_line: list[str] = []  # the words of the command that runs
_signals: set[int] = set()  # that asked for an end
# What other trainers have for a setting of ours, with another meaning: aliases have the same.
ELSEWHERE = {
    "adapter_path": "output",
    "batch_size": "batch",
    "bf16": "compute",
    "c": "ctx",
    "data": "file",
    "dataset": "file",
    "dataset_name": "file",
    "datasets": "file",
    "fp16": "compute",
    "init_lora_weights": "lora_init",
    "iters": "max_steps",
    "logging_dir": "log_to",
    "num_layers": "skip_layers",
    "output_dir": "output",
    "rl": "objective",
    "stage": "objective",
    "t": "threads",
    "val_set_size": "val_split",
}
# Options of llama.cpp, of several letters behind one dash.
OF_LLAMA_CPP = {
    "ctk": "cache_type_k",
    "ctv": "cache_type_v",
    "hf": "model",
    "ngl": "gpu_layers",
    "np": "parallel",
    "sys": "system",
}
# What other trainers must be told, and a fine-tune here need not.
NEEDLESS = {
    "adapter": "what is trained is an adapter",
    "load_in_4bit": "the base has the types of its file",
    "load_in_8bit": "the base has the types of its file",
    "logging_steps": "each step is in the metrics beside the output",
    "lora_target_linear": "all linear modules are the default",
    "use_peft": "what is trained is an adapter",
}
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
    _prepare_process()
    output, given = sys.stdout, None if args is None else list(args)
    _line[:] = [name, *(sys.argv[1:] if given is None else given)]
    with warnings.catch_warnings(), _ended_by_signals(), _sent_again():
        warnings.showwarning = _show_warning
        try:
            code = command().main(
                given, prog_name=name, standalone_mode=False, windows_expand_args=False
            )  # a pattern, $HOME or ~ in an argument means the same on every system
            sys.stdout.flush()
            return _code_of(code) if isinstance(code, int) else 0
        except SystemExit as stop:
            if sys.stdout is not output:  # click puts another there when a reader went away
                silence(output)
                return STOPPED
            return _code_of(stop.code if isinstance(stop.code, int) else FAILED)
        except (KeyboardInterrupt, click.Abort):
            return _report("stopped", name, STOPPED)
        except click.NoSuchOption as error:
            return _report(_suggestion(error) or error.format_message(), name, FAILED)
        except click.ClickException as error:
            return _report(_message_of(error), name, FAILED)
        except PyggmlError as error:
            return _report(error.message(option), name, FAILED)
        except MemoryError as error:
            return _report(_no_memory(error), name, FAILED)
        except ImportError as error:
            if not any(reason in str(error) for reason in _NO_ROOM):
                raise
            return _report(_no_memory(error), name, FAILED)
        except OSError as error:
            return _lost_output(error, name)
        finally:
            while _last:
                _last.pop()()


def command_line() -> str:
    """The command that runs, or ran last, as a shell reads it."""
    return shlex.join(_line)


def words_again() -> list[str]:
    """The words that start the command that runs once more, as a process of this Python."""
    name, *arguments = _line
    command = [] if name == "pyggml" else [name.removeprefix("pyggml-")]
    return [sys.executable, "-P", "-m", "pyggml", *command, *arguments]


def at_end(act: Callable[[], None]) -> None:
    """Do this when the command ends, however that is."""
    _last.append(act)


def option(setting: str) -> str:
    """The option that gives a setting: settings.val_split -> --val-split, adapter.rank ->
    --lora-rank."""
    name = setting.rsplit(".", 1)[-1]
    return _OPTIONS.get(name, "--" + name.replace("_", "-"))


def _prepare_process() -> None:
    """Streams that print every character, no signal noted, nothing quiet."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal lacks is no error. Files and pipes get every character,
            # whatever the system's code page has.
            encoding = None if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="replace")
    _signals.clear()
    set_quiet(False)
    # Else Numba, where colorama is installed, sends a terminal its escape to reset colours at exit.
    os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")


def note_signal(number: int) -> None:
    """Have the command's exit code say that this signal ended it."""
    _signals.add(number)


def end_if_signalled() -> None:
    """End here if a signal asked for it: what it raised is lost where Python was in a finaliser."""
    if _signals:
        raise SystemExit(STOPPED)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end a command as Ctrl-C does: what it was writing is removed.

    Commands that go on for a while after a signal have handlers of their own over these.
    """

    def end(number: int, frame: FrameType | None) -> None:
        note_signal(number)
        raise SystemExit(STOPPED)

    numbers = [getattr(signal, n) for n in ("SIGTERM", "SIGHUP") if hasattr(signal, n)]
    if threading.current_thread() is not threading.main_thread():  # others hear no signals
        numbers = []
    heard = [n for n in numbers if signal.getsignal(n) is signal.SIG_DFL]  # not ignored: nohup
    for number in heard:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _sent_again() -> Iterator[None]:
    """Inside, a signal is sent again if Python lost what its handler raised: a finaliser and a
    function that C calls, such as LLVM while kernels are compiled, can raise nothing."""
    before, timers = sys.unraisablehook, list[threading.Timer]()

    def look(lost: "sys.UnraisableHookArgs") -> None:
        if not isinstance(lost.exc_value, SystemExit | KeyboardInterrupt):
            before(lost)
            return
        number = signal.SIGINT if isinstance(lost.exc_value, KeyboardInterrupt) else None
        for again in (number,) if number else tuple(_signals):
            timers.append(threading.Timer(_SOON, _send, (again, look.__code__)))
            timers[-1].daemon = True
            timers[-1].start()

    sys.unraisablehook = look
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in timers:
            timer.cancel()
            timer.join()


def _frames(thread: int | None) -> Iterator[FrameType]:
    """What a thread is doing: the function that runs, its caller, and so on."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _send(number: int, hook: CodeType) -> None:
    """A signal to the main thread, which a call of the system then wakes for; once it has left the
    hook, in which Python would lose it again."""
    main = threading.main_thread().ident
    while any(frame.f_code is hook for frame in _frames(main)):
        time.sleep(_SOON)
    if hasattr(signal, "pthread_kill") and main is not None:
        signal.pthread_kill(main, number)
    else:
        signal.raise_signal(number)


def _code_of(code: int) -> int:
    """SIGTERM has a code of its own, so that a supervisor knows its own signal."""
    return TERMINATED if code == STOPPED and signal.SIGTERM in _signals else code


# Options of other commands and of llama.cpp for files that a command takes without any.
_FILES = ("m", "model", "o", "output", "out", "outfile")


def _suggestion(error: click.NoSuchOption) -> str:
    """The error with our option beside another trainer's, or why there is none; "" if neither is
    known."""
    key = error.option_name.lstrip("-").replace("-", "_")
    ours = "--" + (ELSEWHERE | OF_LLAMA_CPP).get(key, "").replace("_", "-")
    options = [] if error.ctx is None else error.ctx.command.params
    names = {name for option in options for name in option.opts}
    places = [p.metavar or p.human_readable_name for p in options if isinstance(p, click.Argument)]
    if key in _FILES and len(places) > 1:
        return f"No such option '{error.option_name}': name files in turn, {' '.join(places)}."
    if key in NEEDLESS and "--lora-rank" in names:
        return f"No such option '{error.option_name}', nor need of it: {NEEDLESS[key]}."
    if ours not in names:
        return ""
    return f"No such option '{error.option_name}'. Did you mean '{ours}'?"


def _message_of(error: click.ClickException) -> str:
    """The error; where a fine-tune is given several values of a setting, with what takes them."""
    if error.message.startswith("Got unexpected extra argument"):
        return error.message + _how_files_are_named(getattr(error, "ctx", None))
    context = error.ctx if isinstance(error, click.BadParameter) else None
    value = re.search("'[^']*'", error.message)  # the first word in quotes, ours and click's
    if context is None or context.command.name != "finetune" or not value or "," not in value[0]:
        return error.format_message()
    sentence = error.format_message().removesuffix(".")
    return f"{sentence}. `pyggml sweep` makes a run for each of several values."


def _how_files_are_named(context: click.Context | None) -> str:
    """The options for files of a command, as the end of a sentence; "" without a model's."""
    options = [] if context is None else context.command.params
    names = [name for name in ("-m", "-f", "-o") if any(name in o.opts for o in options)]
    return f": files are named by options, {', '.join(names)}" if "-m" in names else ""


def _report(reason: str, name: str, code: int) -> int:
    with suppress(OSError):  # standard error may be closed as well
        line = f"{name}: {printable(' '.join(reason.split()))}"
        print(wrap(line, sys.stderr), file=sys.stderr)
    return code


def _no_memory(error: Exception) -> str:
    return ": ".join(["there is not enough memory", *filter(None, [str(error)])])


def _lost_output(error: OSError, name: str) -> int:
    """Standard output is full or closed (`| head`): nothing more goes there, not even at exit."""
    if error.filename is None and error.errno is not None:
        silence(sys.stdout)
    if error.errno == errno.EPIPE:
        return STOPPED
    if error.errno is None:  # no call of the system failed: a library was not loaded, say
        return _report(str(error), name, FAILED)
    where = error.filename or "standard output"
    return _report(f"{where}: {cause_of(error)}", name, FAILED)


def silence(stream: TextIO) -> None:
    """From now on what is written to a standard stream, or waits in its buffer, goes nowhere."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:  # noqa: PTH123  # a device
        os.dup2(nowhere.fileno(), stream.fileno())


def _show_warning(message: Warning | str, *where: Any, **how: Any) -> None:
    note(str(message))
