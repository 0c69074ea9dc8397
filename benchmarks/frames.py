"""The Python frames from a command to the first kernel that it runs: how deep the house is.

usage: frames.py [MODEL.gguf]        (default: the model of the demo)

Prints the stack of one step of training, of one token that is written at temperature 0, and of one
backward pass of a Value: functions of this project alone, from the call of the command inwards. The
frame below the last one is a kernel's.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

import numpy as np

import pyggml
from pyggml.cli import __main__ as commands
from pyggml.cli import demo
from pyggml.eager import tensor
from pyggml.eager.value import Value
from pyggml.lora.trainer.passes import Passes
from pyggml.runtime import Program

ROOT = Path(pyggml.__file__).parents[1]
OURS = tuple(str(ROOT / name) for name in ("pyggml", "lora", "cli"))


class Way:
    """The frames of this project from `first` to a program, whose next call is a kernel; of several
    ways the last one that leads through `within`."""

    def __init__(self, first: CodeType, within: CodeType) -> None:
        self.frames: list[FrameType] = []
        self._first, self._within = first, within

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is Program.__call__.__code__:
            frames = ours(frame, self._first)
            if any(f.f_code is self._within for f in frames):
                self.frames = frames


def ours(frame: FrameType | None, first: CodeType) -> list[FrameType]:
    """The frames of this project from that of `first` to this one."""
    frames = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(OURS):
            frames.append(frame)
        if frame.f_code is first:
            return frames[::-1]
        frame = frame.f_back
    return []


def show(what: str, run: Callable[[], Any], first: Any, within: Any) -> None:
    """Run this, and print the way to the last of its programs."""
    way = Way(first.__code__, within.__code__)
    sys.setprofile(way)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run()
    finally:
        sys.setprofile(None)
    files = {f.f_code.co_filename for f in way.frames}
    print(f"{what}: {len(way.frames)} frames in {len(files)} files")
    for f in way.frames:
        name = getattr(f.f_code, "co_qualname", f.f_code.co_name)
        print(f"    {Path(f.f_code.co_filename).relative_to(ROOT)}: {name}")


def main(model: str = str(demo.BASE)) -> None:
    with TemporaryDirectory() as folder:
        steps = ["-m", model, "-f", str(demo.TEXT), "--ctx", "32", "--max-steps", "2"]
        steps += ["--val-split", "0", "--no-report", "-o", f"{folder}/adapter.gguf"]
        show("a training step", lambda: commands.finetune(steps), commands.finetune, Passes.train)
    words = ["generate", "-m", model, "-p", "It was", "-n", "3", "--temp", "0"]
    show("a greedy token", lambda: commands.main(words), commands.main, Program.__call__)
    w = tensor(np.ones((600, 600), np.float32), requires_grad=True)  # small ones need no kernel
    loss = (w * w).sum()
    show("an eager backward pass", loss.backward, Value.backward, Program.__call__)


if __name__ == "__main__":
    main(*sys.argv[1:2])
