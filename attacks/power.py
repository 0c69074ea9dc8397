"""Power cuts: system calls of a command are recorded, and replayed with any of their ends lost.

python -m attacks.power              each command of attacks.kills
python -m attacks.power train

Needs strace (Linux). A disk keeps what was synced: a file's bytes by fsync of the file, its name by
fsync of its folder. Of names that were not synced it may keep the first few; of bytes, anything.
Whenever the power fails, the command's output must be whole or as it was, and so must some
checkpoint once there was one; after the command, no name of them may be lost.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from attacks.kills import COMMAND, SCENARIOS, Scenario, environment, fresh, write_inputs

TRACED = (
    "openat,creat,write,pwrite64,writev,pwritev,pwritev2,ftruncate,fallocate,sendfile,"
    "copy_file_range,mmap,fsync,fdatasync,rename,renameat,renameat2,link,linkat,unlink,unlinkat,"
    "rmdir"
)
_CALL = re.compile(r"^(?:\d+ +)?(\w+)\((.*)\) += (\S+)")
_NAMED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_OPENED = re.compile(r"\d+<(/[^<>]*)>")  # a descriptor, with -y
_WRITES = ("write", "pwrite")  # whose text is no name
_SHARED = re.compile("PROT_WRITE.*MAP_SHARED")


@dataclass(eq=False, slots=True)
class File:
    """The bytes behind a name: how often they were written, and how often they had been when they
    were last synced. shared: whether memory was mapped over them, whose writes are no calls."""

    written: int = 0
    synced: int = 0
    shared: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether a power cut would leave all that was written."""
        return self.written == self.synced and not self.shared


@dataclass(frozen=True, slots=True)
class Change:
    """Of names in a folder: what stands behind each, None if it is gone; or a folder's new name."""

    folder: str
    names: dict[str, File | None] = field(default_factory=dict)
    moved: tuple[str, str] | None = None

    def of(self, files: dict[str, File]) -> dict[str, File]:
        """The files after this change."""
        if self.moved is not None:
            old, new = (f"{name}/" for name in self.moved)
            return {
                new + name.removeprefix(old) if name.startswith(old) else name: file
                for name, file in files.items()
            }
        merged = {**files, **self.names}
        return {name: file for name, file in merged.items() if file is not None}


class Disk:
    """Names that were synced, with what stands behind them, and changes that may be lost."""

    def __init__(self, files: dict[str, File]) -> None:
        self.durable, self.changes = files, list[Change]()

    def left(self) -> list[dict[str, File]]:
        """What a power cut may leave: any number of the first changes. The last is what programs
        see."""
        states = [self.durable]
        for change in self.changes:
            states.append(change.of(states[-1]))
        return states

    def sync_folder(self, folder: str) -> None:
        """Keep the names in this folder; those in folders below it may still be lost."""
        for change in self.changes:
            if change.folder == folder:
                self.durable = change.of(self.durable)
        self.changes = [change for change in self.changes if change.folder != folder]


# -- calls ----------------------------------------------------------------------------------------


def record(scenario: Scenario, folder: Path) -> list[str]:
    """Run the command in this folder; its system calls, a line each."""
    with tempfile.TemporaryDirectory() as made:
        log = Path(made, "calls")
        strace = ["strace", "-f", "-qq", "-y", "-s", "0", "-e", f"trace={TRACED}", "-o", str(log)]
        command = [*strace, "-e", "signal=none", *COMMAND, *scenario.arguments]
        done = subprocess.run(
            command, cwd=folder, env=environment(), capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        return _join_lines(log.read_text(errors="replace").splitlines())


def _join_lines(lines: list[str]) -> list[str]:
    """The calls without their threads; one that another thread's line cut in two is whole again."""
    begun, whole = dict[str, str](), list[str]()
    for line in lines:
        thread, _, call = line.partition(" ")
        if call.endswith("<unfinished ...>"):
            begun[thread] = call.removesuffix("<unfinished ...>")
        elif "resumed>" in call:
            whole.append(begun.pop(thread, "") + call.partition("resumed>")[2])
        else:
            whole.append(call.lstrip())
    return whole


class Replay:
    """A disk to which calls happen one after the other."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        """names: those in the folder at first."""
        self._folder = folder
        self.disk = Disk({str(folder / name): File() for name in names})

    def make(self, call: str) -> bool:
        """Make this call; whether it changed what a power cut may leave."""
        match = _CALL.match(call)
        if match is None or match[3].startswith("-1"):
            return False
        name, arguments, result = match.groups()
        paths = [p for p in self._paths(name, arguments, result) if _is_in(p, str(self._folder))]
        if not paths:
            return False
        if name in ("openat", "creat"):
            return self._open(paths[-1], arguments)
        if name in ("fsync", "fdatasync"):
            return self._sync(paths[0])
        if name.startswith("rename"):
            return self._rename(*paths)
        if name in ("unlink", "unlinkat", "rmdir"):
            return self._change(paths[0], None)
        return self._write(paths, name, arguments)

    def _paths(self, name: str, arguments: str, result: str) -> list[str]:
        """The paths that a call names, and those of its descriptors; absolute."""
        texts = [] if name.startswith(_WRITES) else _NAMED.findall(arguments)
        named = [f"{self._folder / path}" for path in texts]
        opened = _OPENED.findall(f"{arguments} {result}")
        return [os.path.normpath(path) for path in named + opened]

    def _open(self, path: str, arguments: str) -> bool:
        file = self.disk.left()[-1].get(path)
        if file is not None:
            file.written += "O_TRUNC" in arguments
            return "O_TRUNC" in arguments
        return "O_CREAT" in arguments and self._change(path, File())

    def _change(self, path: str, file: File | None) -> bool:
        self.disk.changes.append(Change(_folder_of(path), {path: file}))
        return True

    def _rename(self, old: str, new: str) -> bool:
        file, folder = self.disk.left()[-1].get(old), _folder_of(new)
        named: dict[str, File | None] = {old: None, new: file}
        change = Change(folder, named) if file else Change(folder, moved=(old, new))
        self.disk.changes.append(change)
        return True

    def _sync(self, path: str) -> bool:
        file = self.disk.left()[-1].get(path)
        if file is None:
            self.disk.sync_folder(path)
        else:
            file.synced = file.written
        return True

    def _write(self, paths: list[str], name: str, arguments: str) -> bool:
        """A call that writes; of mmap, one whose memory is the file's."""
        file = self.disk.left()[-1].get(paths[0])
        if file is None or (name == "mmap" and not _SHARED.search(arguments)):
            return False
        file.written += 1
        file.shared |= name == "mmap"
        return True


# -- what must hold -------------------------------------------------------------------------------


def faults(
    scenario: Scenario, calls: Iterable[str], folder: Path, names: Iterable[str]
) -> tuple[int, list[str]]:
    """How many states a power cut may leave were looked at, and what is wrong with them.

    folder: where the command ran; names: of the files that it found there
    """
    replay = Replay(folder, names)
    output, points = str(folder / scenario.output), str(folder / "points")
    wanted = {str(p) for p in folder.rglob("*") if p.is_file() and _is_in(str(p), output)}
    n_states, wrong, had_point = 0, dict[str, None](), False
    for call in calls:
        if not replay.make(call):
            continue
        left = replay.disk.left()
        n_states += len(left)
        torn = [state for state in left if not _is_whole(state, output, wanted)]
        if torn:
            wrong[f"after {call[:150]}: the output may be torn"] = None
        has_point = all(any(_is_in(n, points) and f.is_whole for n, f in s.items()) for s in left)
        if had_point and not has_point:
            wrong[f"after {call[:150]}: no checkpoint may be left"] = None
        had_point |= has_point
    for state in replay.disk.left():
        if {name for name in state if _is_in(name, output)} != wanted:
            wrong["after the command: the output may be lost"] = None
    return n_states, [*wrong]


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def _is_in(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}/")


def _is_whole(state: dict[str, File], output: str, wanted: set[str]) -> bool:
    there = {name for name in state if _is_in(name, output)}
    return not there or (there == wanted and all(state[name].is_whole for name in there))


def attack(scenario: Scenario, inputs: Path) -> int:
    """Record a command, cut the power after each call, print what came of it; the faults."""
    names = [path.name for path in inputs.iterdir()]
    with fresh(inputs) as folder:
        n_states, wrong = faults(scenario, record(scenario, folder), folder, names)
    for fault in wrong:
        print(f"{scenario.name}: {fault}")
    print(f"{scenario.name:9} {n_states} states after power cuts: {len(wrong)} faults", flush=True)
    return len(wrong)


def main() -> int:
    """The exit code: 1 if a fault was met."""
    parser = argparse.ArgumentParser(prog="attacks.power", description=__doc__.partition("\n")[0])
    names = [s.name for s in SCENARIOS]
    parser.add_argument("scenarios", nargs="*", choices=[[], *names], help="commands; none: all")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        write_inputs(inputs := Path(made))
        wanted = [s for s in SCENARIOS if s.name in (given.scenarios or names)]
        return int(sum(attack(scenario, inputs) for scenario in wanted) > 0)


if __name__ == "__main__":
    sys.exit(main())
