"""Rewards: what functions of the user's own say of an answer, and what that is worth in its group.

A function takes, by name, what it asks for: `completion`, the answer, and `prompt`, texts or lists
of messages, and any column of the row; **others takes all that is left. It returns a number, or
None for an answer that it does not judge. One with a parameter `completions` is called as TRL calls
it, with lists, each of one item.

A function of a file is the user's program: it runs as that, with all that it may do.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from pyggml.errors import ConfigError, PyggmlError
from pyggml.lora.data.records.rows import PromptRow

_WORD = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)(?::(?P<weight>[-+.\deE]+))?")
_LEAST_SPREAD = 1e-4  # TRL's, added to a standard deviation
Function = Callable[..., Any]


def is_reward(word: object) -> bool:
    """Whether a value names a function, as FILE.py:FUNCTION or FILE.py:FUNCTION:WEIGHT, or is
    one."""
    if not isinstance(word, str):
        return callable(word)
    match = _WORD.fullmatch(word)
    try:
        return match is not None and 0 < abs(float(match["weight"] or 1)) < np.inf
    except ValueError:
        return False


class RewardFault(PyggmlError):
    """A function that gives no reward."""


class _NoNumber(Exception):
    """What a function returns is no reward; in words."""


class _TimeOver(BaseException):
    """The time of a call has ended; functions that catch what they raise let it pass."""


@dataclass(frozen=True, slots=True, eq=False)
class Reward:
    """A function, its name in reports, the weight of what it returns, and the SHA-256 of its file,
    if it is of one."""

    name: str
    function: Function
    weight: float = 1.0
    digest: str = ""

    @classmethod
    def of(cls, word: str | Function) -> Reward:
        """Raises ConfigError for a file that cannot be run or lacks the function."""
        if not isinstance(word, str):
            return cls(getattr(word, "__name__", type(word).__name__), word)
        match = _WORD.fullmatch(word)
        assert match is not None, "settings are checked"
        (module, digest), name = _run_file(Path(match["file"])), match["name"]
        function = getattr(module, name, None)
        if not callable(function):
            functions = [n for n, f in vars(module).items() if inspect.isfunction(f)]
            fault = f"is {word}, but the file has no function {name}"
            there = f": it has {', '.join(functions[:5])}" if functions else ""
            raise ConfigError([("reward", fault + there)])
        return cls(name, function, float(match["weight"] or 1), digest)

    def __call__(self, row: PromptRow, text: str, seconds: float = 0) -> float:
        """The reward of an answer without its weight; NaN for one that is not judged.

        seconds: the most that it may take; 0: any. Raises RewardFault, naming the row.
        """
        where = f"{row.place.file}: {row.place}: reward {self.name}"
        began = time.monotonic()
        try:
            with _at_most(seconds):
                number = self._call(row, text)
        except _TimeOver:
            raise RewardFault(f"{where} took longer than {seconds:g} s") from None
        except _NoNumber as fault:
            raise RewardFault(f"{where} returned {fault}") from None
        except (Exception, SystemExit) as error:  # whatever another's program raises
            raise RewardFault(f"{where} raised {_words(error)}") from error
        if seconds and time.monotonic() - began > seconds:  # where no alarm could end it
            raise RewardFault(f"{where} took longer than {seconds:g} s")
        return number

    def _call(self, row: PromptRow, text: str) -> float:
        parameters = inspect.signature(self.function).parameters
        as_trl = "completions" in parameters
        completion: Any = text
        if as_trl and not isinstance(row.prompt, str):
            completion = [{"role": "assistant", "content": text}]
        arguments = {**row.columns, "prompt": row.prompt, "completion": completion}
        if as_trl:
            arguments["completions"], arguments["prompts"] = (
                arguments.pop("completion"),
                arguments.pop("prompt"),
            )
            arguments = {name: [value] for name, value in arguments.items()}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            arguments = {name: value for name, value in arguments.items() if name in parameters}
        value = self.function(**arguments)
        return _number(_only(value) if as_trl else value)


def _only(values: Any) -> Any:
    """The reward of a list for the one answer that was given."""
    try:
        each = [*values]
    except TypeError:
        raise _NoNumber(f"a {type(values).__name__}, wanted a list with one reward") from None
    if len(each) != 1:
        raise _NoNumber(f"{len(each)} rewards of 1 answer, wanted one")
    return each[0]


def _number(value: Any) -> float:
    """A reward as a number, NaN for None."""
    if value is None:
        return float("nan")
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except OverflowError:
        raise _NoNumber("a number above all floats, wanted a finite number or None") from None
    except (TypeError, ValueError):
        raise _NoNumber(f"a {type(value).__name__}, wanted a number or None") from None
    if not np.isfinite(number):
        raise _NoNumber(f"{number}, wanted a finite number or None")
    return number


def _words(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def _run_file(path: Path) -> tuple[Any, str]:
    """The module of a file, and the file's SHA-256."""
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "its name ends in .py"
    module = importlib.util.module_from_spec(spec)
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever another's program raises
        fault = f"{path} cannot be run: {_words(error)}"
        raise ConfigError([("reward", fault)]) from error
    return module, digest


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raise _TimeOver inside after so many seconds, where the system has alarms and this is the
    main thread: Python then ends what it runs between two of its steps."""
    is_main = threading.current_thread() is threading.main_thread()
    if not (seconds and is_main and hasattr(signal, "SIGALRM")):
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise _TimeOver

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- in a group ---------------------------------------------------------------------------------


def totals(rewards: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """(n,) each answer's weighted sum of its rewards (n, functions); NaN where none judges it."""
    sums = np.nansum(rewards * np.asarray(weights), axis=1)
    return np.where(np.isnan(rewards).all(axis=1), np.nan, sums)


def advantages(rewards: np.ndarray, scaled: bool) -> np.ndarray:
    """(n,) how much better each answer of a group is than their mean, float64; scaled: in standard
    deviations (n − 1). 0 where there is no reward."""
    judged = ~np.isnan(rewards)
    above, n = np.zeros(len(rewards)), np.count_nonzero(judged)
    if n:
        above[judged] = rewards[judged] - rewards[judged].mean()
    if scaled and n > 1:
        above /= np.sqrt(above @ above / (n - 1)) + _LEAST_SPREAD
    return above
