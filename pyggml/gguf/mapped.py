"""Files that are read through memory: they must stay as they were when they were opened.

A file that is cut short meanwhile has no pages behind its new end. Whoever reads there is ended by
the system with SIGBUS, in the middle of a kernel, and without a word. So on Linux a handler of a
few machine instructions says which file it was, and ends the process with exit code 2. What is
written over, or cut within a page, reads as other numbers: `check` sees that by size and time.
"""

import ctypes
import mmap
import os
import sys
import weakref
from functools import cache
from pathlib import Path
from time import perf_counter

import numpy as np

from pyggml.errors import FileChangedError, GGUFError
from pyggml.files import in_characters, open_regular

_SIGBUS, _SA_SIGINFO, _FAILED = 7, 4, 2  # of Linux; an exit code
_MOST_FILES = 1024  # that the handler knows
_ADDRESS = 16  # of the faulting byte in siginfo_t, of Linux on 64 bits
# The rows of the table are: first address, end, address of the sentence, its length.
_HANDLER = """
define void @on_bus_error(i32 %signal, ptr %info, ptr %context) {{
entry:
  %field = getelementptr i8, ptr %info, i64 {address}
  %at = load i64, ptr %field
  %table = inttoptr i64 {table} to ptr
  br label %look
look:
  %i = phi i64 [ 0, %entry ], [ %next, %other ]
  %row = getelementptr [4 x i64], ptr %table, i64 %i
  %end_field = getelementptr i64, ptr %row, i64 1
  %start = load i64, ptr %row
  %end = load i64, ptr %end_field
  %is_behind = icmp uge i64 %at, %start
  %is_before = icmp ult i64 %at, %end
  %is_inside = and i1 %is_behind, %is_before
  br i1 %is_inside, label %say, label %other
other:
  %next = add i64 %i, 1
  %is_row = icmp ult i64 %next, {most}
  br i1 %is_row, label %look, label %pass_on
say:
  %text_field = getelementptr i64, ptr %row, i64 2
  %length_field = getelementptr i64, ptr %row, i64 3
  %text = load ptr, ptr %text_field
  %length = load i64, ptr %length_field
  %write = inttoptr i64 {write} to ptr
  %written = call i64 %write(i32 2, ptr %text, i64 %length)
  %exit = inttoptr i64 {exit} to ptr
  call void %exit(i32 {failed})
  unreachable
pass_on:
  %sigaction = inttoptr i64 {sigaction} to ptr
  %before = inttoptr i64 {before} to ptr
  %done = call i32 %sigaction(i32 {signal}, ptr %before, ptr null)
  ret void
}}
"""


class MappedFile(mmap.mmap):
    """A file's bytes, read-only. handle: of the open file."""

    path: Path
    handle: int
    _state: tuple[int, int]

    def disk_rate(self, n_bytes: int) -> float:
        """Bytes a second at which the file's first n_bytes come from the disk, which the system is
        asked to forget; from its memory if it does not."""
        n_bytes = min(n_bytes, len(self))
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.handle, 0, n_bytes, os.POSIX_FADV_DONTNEED)
        began = perf_counter()
        os.lseek(self.handle, 0, os.SEEK_SET)
        n_read = len(os.read(self.handle, n_bytes))
        return n_read / max(perf_counter() - began, 1e-9)

    def check(self) -> None:
        """FileChangedError if the file has another size or time than when it was opened."""
        if (now := _state(self.handle)) != self._state:
            before, size = self._state[0], now[0]
            how = f"has {size} bytes, {before} when it was opened" if size != before else "is newer"
            raise FileChangedError(
                f"{self.path}: was changed while it was in use: it {how}; a model is replaced by "
                "renaming a new file to its name"
            )


def map_file(path: Path) -> MappedFile:
    """GGUFError for an empty file; OSError, in words, for a folder, a pipe and a device."""
    with open_regular(path) as file:
        state = _state(file.fileno())
        if not state[0]:
            raise GGUFError("is empty, wanted a GGUF file")
        mapped = MappedFile(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.path, mapped._state = path, state
        mapped.handle = os.dup(file.fileno())
    weakref.finalize(mapped, os.close, mapped.handle)
    if sys.platform.startswith("linux") and sys.maxsize > 1 << 32:
        _watch(mapped)
    return mapped


def _state(handle: int) -> tuple[int, int]:
    about = os.fstat(handle)
    return about.st_size, about.st_mtime_ns


# -- the handler --------------------------------------------------------------------------------


class _Action(ctypes.Structure):
    """Linux' struct sigaction, as glibc and musl have it."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_TABLE = (ctypes.c_int64 * 4 * _MOST_FILES)()
_BEFORE = _Action()
_FREE = [*range(_MOST_FILES)]


def _watch(mapped: MappedFile) -> None:
    """Let the handler know this file, as long as it is mapped."""
    if not _FREE:
        return
    _install()
    characters = in_characters(mapped.path)
    name = "".join(c if c.isprintable() else repr(c)[1:-1] for c in characters)
    text = ctypes.create_string_buffer(
        f"pyggml: {name}: was cut short while it was in use\n".encode(errors="backslashreplace")
    )
    start = np.frombuffer(mapped, np.uint8).ctypes.data
    i = _FREE.pop()
    _TABLE[i][:] = [start, start + len(mapped), ctypes.addressof(text), len(text) - 1]
    weakref.finalize(mapped, _forget, i, text)


def _forget(i: int, text: object) -> None:
    """text: kept until then."""
    _TABLE[i][:] = [0, 0, 0, 0]
    _FREE.append(i)


@cache
def _install() -> object:
    """Compile the handler, and have the system call it; what must stay alive."""
    from llvmlite import binding

    libc = ctypes.CDLL(None)

    def address(name: str) -> int | None:
        return ctypes.cast(getattr(libc, name), ctypes.c_void_p).value

    code = _HANDLER.format(
        address=_ADDRESS,
        table=ctypes.addressof(_TABLE),
        most=_MOST_FILES,
        write=address("write"),
        exit=address("_exit"),
        failed=_FAILED,
        sigaction=address("sigaction"),
        before=ctypes.addressof(_BEFORE),
        signal=_SIGBUS,
    )
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(code), machine)
    engine.finalize_object()
    action = _Action(engine.get_function_address("on_bus_error"), flags=_SA_SIGINFO)
    libc.sigaction(_SIGBUS, ctypes.byref(action), ctypes.byref(_BEFORE))
    return engine
