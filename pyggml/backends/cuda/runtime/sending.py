"""Pieces of files and of memory to a card, by a loop that the interpreter does not run.

A piece of two megabytes takes a core 0.4 ms. A loop of Python would hold the other threads up with
every call that it makes between two of them, so this one is a few machine instructions.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding as llvm

from pyggml.backends.cuda.runtime.simulator import on_card

# A row has: handle of a file, below 0 for none; first byte in the file, or address; address on the
# card; bytes. Threads share the number of the next row. One half of a thread's memory is filled
# while the other is copied.
_CODE = """
define i64 @send(ptr %rows, i64 %n_rows, ptr %shared, i64 %memory, i64 %half, i64 %stream,
                 ptr %events) {{
entry:
  %read = inttoptr i64 {read} to ptr
  %move = inttoptr i64 {move} to ptr
  %copy = inttoptr i64 {copy} to ptr
  %wait = inttoptr i64 {wait} to ptr
  %mark = inttoptr i64 {mark} to ptr
  br label %next
next:
  %turn = phi i64 [ 0, %entry ], [ %turn_next, %sent ]
  %i = atomicrmw add ptr %shared, i64 1 monotonic
  %is_row = icmp ult i64 %i, %n_rows
  br i1 %is_row, label %row, label %end
row:
  %fields = getelementptr [4 x i64], ptr %rows, i64 %i
  %start_field = getelementptr i64, ptr %fields, i64 1
  %target_field = getelementptr i64, ptr %fields, i64 2
  %n_field = getelementptr i64, ptr %fields, i64 3
  %handle = load i64, ptr %fields
  %start = load i64, ptr %start_field
  %target = load i64, ptr %target_field
  %n = load i64, ptr %n_field
  %is_second = and i64 %turn, 1
  %offset = mul i64 %is_second, %half
  %at = add i64 %memory, %offset
  %event_field = getelementptr i64, ptr %events, i64 %is_second
  %event = load i64, ptr %event_field
  %waited = call i32 %wait(i64 %event)
  %is_free = icmp eq i32 %waited, 0
  br i1 %is_free, label %free, label %refused
free:
  %is_memory = icmp slt i64 %handle, 0
  br i1 %is_memory, label %from_memory, label %from_file
from_memory:
  %moved = call i64 %move(i64 %at, i64 %start, i64 %n)
  br label %filled
from_file:
  %done = phi i64 [ 0, %free ], [ %done_next, %more ]
  %left = sub i64 %n, %done
  %is_filled = icmp eq i64 %left, 0
  br i1 %is_filled, label %filled, label %fill
fill:
  %to = add i64 %at, %done
  %from = add i64 %start, %done
  %number = trunc i64 %handle to i32
  %n_read = call i64 %read(i32 %number, i64 %to, i64 %left, i64 %from)
  %is_read = icmp sgt i64 %n_read, 0
  br i1 %is_read, label %more, label %short
more:
  %done_next = add i64 %done, %n_read
  br label %from_file
short:
  %error = sub i64 %n_read, 1
  ret i64 %error
filled:
  %given = call i32 %copy(i64 %target, i64 %at, i64 %n, i64 %stream)
  %is_given = icmp eq i32 %given, 0
  br i1 %is_given, label %given_it, label %refused
given_it:
  %marked = call i32 %mark(i64 %event, i64 %stream)
  %is_marked = icmp eq i32 %marked, 0
  br i1 %is_marked, label %sent, label %refused
sent:
  %turn_next = add i64 %turn, 1
  br label %next
refused:
  %code = phi i32 [ %waited, %row ], [ %given, %filled ], [ %marked, %given_it ]
  %as_long = zext i32 %code to i64
  ret i64 %as_long
end:
  ret i64 0
}}
"""
READS_FILES = sys.platform.startswith("linux")


def send(
    rows: np.ndarray, shared: np.ndarray, memory: np.ndarray, stream: int, events: np.ndarray
) -> int:
    """Begin to copy pieces to the current card, one after the other, until there are no more.

    rows: int64 (n, 4), as above; shared: int64 (1,), the next row, 0 before the first thread
    begins; memory: page-locked, twice the largest piece; events: int64 (2,), handles of those that
    mark when each half is copied. Returns 0, what a call of the driver returned instead, or a
    number below 0 if a file ends before its piece does.
    """
    place, half = memory.ctypes.data, memory.nbytes // 2
    arrays = rows.ctypes.data, shared.ctypes.data, events.ctypes.data
    return int(loop()(arrays[0], len(rows), arrays[1], place, half, stream, arrays[2]))


@cache
def loop() -> Callable[..., int]:
    """The loop, which is compiled at the first call."""
    copy, wait, mark = _driver_calls()
    read = ctypes.CDLL(None).pread if READS_FILES else 0
    move = ctypes.memmove
    names = {"read": read, "move": move, "copy": copy, "wait": wait, "mark": mark}
    code = _CODE.format(**{name: _address(f) for name, f in names.items()})
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(code), machine)
    engine.finalize_object()
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int64,
        *[ctypes.c_void_p, ctypes.c_int64] * 2,
        *[ctypes.c_int64] * 2,
        ctypes.c_void_p,
    )
    loop: Any = kind(engine.get_function_address("send"))
    loop.kept = engine, names
    return loop


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0 if function else 0


@on_card
def _driver_calls() -> tuple[Any, Any, Any]:
    """The driver's copy to a card, its wait for an event, and its mark of one in a stream."""
    if sys.platform == "win32":
        library = ctypes.WinDLL("nvcuda.dll")
    else:
        library = ctypes.CDLL("libcuda.so.1")
    return library.cuMemcpyHtoDAsync_v2, library.cuEventSynchronize, library.cuEventRecord
