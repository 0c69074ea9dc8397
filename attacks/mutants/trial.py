"""What a fork does: trace a test, or run tests with a mutant in place."""

import dataclasses
import functools
import gc
import importlib.machinery
import multiprocessing
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol

from attacks.mutants.changes import ROOT, Mutant, compile_mutant
from attacks.mutants.fork import Ended, Tell, Told, in_fork
from attacks.mutants.reach import codes, importers, reach, watch_cache
from attacks.mutants.tests import Plan, Runner, run_pytest

Lines = dict[str, set[int]]
_COLLECT, _TEST, _COMPILE = 120.0, 20.0, 120.0  # seconds of computing
_FIRST = 8  # tests whose files are collected before those of the others


class Job(Protocol):
    """What is done in a fork of the process that has collected the tests."""

    def run(self, runner: Runner, tell: Tell) -> None: ...
    def limit(self, told: Told) -> float: ...


class Collected:
    """A process that has collected the tests, and forks for each job.

    `imported` are the lines of the rooms that ran before any test did, where they were watched.
    """

    def __init__(self, plan: Plan, watched: Sequence[str] = ()) -> None:
        self.plan = plan
        ours, theirs = multiprocessing.Pipe()
        self._child = os.fork()
        if self._child == 0:
            ours.close()
            try:
                _serve(plan, watched, theirs)
            finally:
                os._exit(1)
        theirs.close()
        self._connection = ours
        try:
            self.imported, self.tests = ours.recv()
        except EOFError:
            raise SystemExit("the tests cannot be collected") from None

    def do(self, job: Job) -> Ended:
        self._connection.send(job)
        return self._connection.recv()

    def end(self) -> None:
        self._connection.send(None)
        os.waitpid(self._child, 0)


def _serve(plan: Plan, watched: Sequence[str], connection: Connection) -> None:
    lines = watch_lines(watched)

    def serve(runner: Runner) -> None:
        unwatch_lines()
        connection.send((lines, list(runner.tests)))
        live_functions()
        while (job := connection.recv()) is not None:
            connection.send(in_fork(lambda tell: job.run(runner, tell), job.limit))
        os._exit(0)

    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    run_pytest(plan, serve)


def watch_lines(files: Iterable[str]) -> Lines:
    """Lines of these files, named from the checkout's root, are noted from now on as they run."""
    lines: Lines = {file: set() for file in files}
    adders = {str(ROOT / file): noted.add for file, noted in lines.items()}

    def on_call(frame: FrameType, event: str, arg: Any) -> Callable | None:
        add = adders.get(frame.f_code.co_filename)
        if add is None:
            return None

        def on_line(frame: FrameType, event: str, arg: Any) -> Callable:
            if event == "line":
                add(frame.f_lineno)
            return on_line

        return on_line

    if adders:
        threading.settrace(on_call)
        sys.settrace(on_call)
    return lines


def seconds_used() -> float:
    """Of computing, by this process and those that it has waited for."""
    return sum(os.times()[:4])


def unwatch_lines() -> None:
    threading.settrace(None)
    sys.settrace(None)


@dataclass(slots=True)
class Trace:
    """Run a test and tell which lines ran, and of which the kernels are made that it loads."""

    test: str
    files: Sequence[str]

    def run(self, runner: Runner, tell: Tell) -> None:
        kernels: set[FunctionType] = set()

        def note(kernel: FunctionType) -> bool:
            kernels.add(kernel)
            return True

        watch_cache(note, saves=True)
        start, lines = seconds_used(), watch_lines(self.files)
        runner.run_test(self.test)
        unwatch_lines()
        seconds = seconds_used() - start
        for function in {f for kernel in kernels for f in reach(kernel)}:
            noted = lines.get(os.path.relpath(function.__code__.co_filename, ROOT))
            if noted is not None:
                noted.update(lines_of(function.__code__))
        ran = {file: sorted(noted) for file, noted in lines.items() if noted}
        tell({"seconds": seconds, "lines": ran, "failed": runner.failed})

    def limit(self, told: Told) -> float:
        return 120.0


def files_of(tests: Iterable[str]) -> frozenset[str]:
    return frozenset(name.partition("::")[0] for name in tests)


def lines_of(code: CodeType) -> Iterator[int]:
    """The lines of a function, the functions in it included."""
    for part in codes(code):
        yield from (line for _, _, line in part.co_lines() if line)


@dataclass(slots=True)
class Trial:
    """Run tests with a mutant in place, until one fails or `seconds` are over.

    It tells each test before it runs, then what failed.
    """

    mutant: Mutant
    tests: dict[str, float]  # name -> seconds that it takes, in the order to be run
    seconds: float
    compiles: bool  # whether kernels are made of the file

    def run(self, runner: Runner, tell: Tell) -> None:
        """With the functions' code changed in place."""
        changed = change_functions(self.mutant)
        if changed is None:
            tell({"cannot": True})
            return
        watch_cache(lambda kernel: changed.isdisjoint(map(id, reach(kernel))))
        self.run_tests(runner, list(self.tests), tell, seconds_used())

    def run_anew(self, plan: Plan, tell: Tell) -> None:
        """In a process that has imported nothing yet: the changed file is imported."""
        change_import(self.mutant)
        files = importers(self.mutant.file) if self.compiles else {self.mutant.file}
        watch_cache(lambda kernel: all(f.__code__.co_filename not in files for f in reach(kernel)))
        start, names = seconds_used(), list(self.tests)
        for some in (names[:_FIRST], names[_FIRST:]):
            these = dataclasses.replace(plan, only_files=files_of(some))
            run = functools.partial(self.run_tests, names=some, tell=tell, start=start)
            ran = run_pytest(these, run) if some else None
            if ran and (ran.failed or not ran.tests):
                tell({"failed": ran.failed or "the import"})
                return

    def run_tests(self, runner: Runner, names: Iterable[str], tell: Tell, start: float) -> None:
        """Run these until one fails."""
        for name in names:
            if seconds_used() - start > self.seconds:
                tell({"late": True})
                return
            tell({"test": name})
            runner.run_test(name)
            if runner.failed:
                tell({"failed": runner.failed})
                return

    def limit(self, told: Told) -> float:
        usual = 10 * self.tests.get(told.get("test", ""), _COLLECT / 10)
        return usual + _TEST + _COMPILE * self.compiles


_live: dict[CodeType, list[FunctionType]] = defaultdict(list)


def live_functions() -> dict[CodeType, list[FunctionType]]:
    """code -> the functions of this checkout that have it now."""
    if not _live:
        gc.unfreeze()
        for thing in gc.get_objects():
            if type(thing) is FunctionType and thing.__code__.co_filename.startswith(str(ROOT)):
                _live[thing.__code__].append(thing)
        gc.freeze()
    return _live


def change_functions(mutant: Mutant) -> set[int] | None:
    """Put the mutant's code into the functions that are there; their ids, or None if it cannot."""
    path = ROOT / mutant.file
    before = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    changed = [(old, new) for old, new in _pairs(before, compile_mutant(mutant)) if old != new]
    functions = {id(f): (f, new) for old, new in changed for f in live_functions().get(old, ())}
    try:
        for function, new in functions.values():
            function.__code__ = new
    except ValueError:  # it has other free variables
        return None
    return set(functions) or None


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The functions in a code object, each with what it has become; those that went with what was
    deleted are left out."""
    inside: dict[tuple[str, int], tuple[list[CodeType], list[CodeType]]] = {}
    for i, code in enumerate((old, new)):
        for part in code.co_consts:
            if isinstance(part, CodeType):
                inside.setdefault((part.co_name, part.co_firstlineno), ([], []))[i].append(part)
    for olds, news in inside.values():
        if len(olds) == len(news):
            for pair in zip(olds, news, strict=True):
                yield pair
                yield from _pairs(*pair)


def change_import(mutant: Mutant) -> None:
    """Have Python import the mutant in place of its file."""
    code, path = compile_mutant(mutant), str(ROOT / mutant.file)
    loader = importlib.machinery.SourceFileLoader
    get_code = loader.get_code

    def get(self: Any, fullname: str) -> CodeType | None:
        return code if self.path == path else get_code(self, fullname)

    # importlib asks the loader for the code: it gets the mutant's, and the file stays as it is.
    loader.get_code = get  # type: ignore[method-assign]
