"""Benchmarks in processes of their own that take turns, so that a slow minute is slow for all."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Runner:
    """A benchmark script started with --in-turns, which waits for a line before each step."""

    def __init__(self, python: str, script: Path, *arguments: str) -> None:
        command = [python, str(script), *arguments, "--in-turns"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.wait()

    def wait(self) -> str:
        """Until it is ready for its next step or, at the end, prints its result."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("ready", "{")):
                return line
        raise SystemExit(f"{self.process.args} ended without a result")

    def turn(self) -> str:
        """Let it make one step; the line that it prints then."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.wait()

    def last(self, n: int) -> str:
        """Let it make its n steps, and end; the result that it prints."""
        *_, result = (self.turn() for _ in range(n))
        self.process.wait()
        return result
