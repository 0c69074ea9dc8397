"""Other programs beside device.py: PEFT and Unsloth by card_step.py, and llama.cpp's bench."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

HERE = Path(__file__).parent


class Side:
    """Another program's steps (card_step.py), in a process that waits for its turns."""

    def __init__(self, flags: str, options: Any) -> None:
        path = options.unsloth_path if "--unsloth" in flags else ""
        paths = [path, os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": ":".join(filter(None, paths))}
        common = ["--rank", str(options.rank), "--steps", str(options.steps), "--in-turns"]
        if "--sizes" not in flags:
            common += ["--sizes", options.sizes]
        command = [options.peft_python, str(HERE / "card_step.py"), *flags.split(), *common]
        self.flags = flags
        self._process = Popen(command, env=env, stdin=PIPE, stdout=PIPE, text=True)

    def is_ready(self) -> bool:
        """Waits until it is warm; False when it has ended."""
        assert self._process.stdout
        for line in self._process.stdout:
            if line == "ready\n":
                return True
            if line.startswith("{"):
                print(line, end="", flush=True)
        if code := self._process.wait():
            print(json.dumps({"side": self.flags, "exit_code": code}), flush=True)
        return False

    def take_turn(self) -> bool:
        """Let it measure one size; whether there is another."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.is_ready()


def take_turns(sides: list[Side]) -> None:
    """All are warm before the first is measured, one at a time."""
    waiting = [side for side in sides if side.is_ready()]
    while waiting:
        waiting = [side for side in waiting if side.take_turn()]


def llama_bench(options: Any, file: str) -> None:
    """Prompts and tokens of llama.cpp's CUDA backend."""
    given = (
        f"-ngl 99 -fa 1 -ub 512 -r 5 -o json -p {options.past} -n {options.new} -d 0,{options.past}"
    )
    command = [options.llama_bench, "-m", file, *given.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(json.dumps({"benchmark": "llama-bench", "error": done.stderr[-500:]}), flush=True)
        return
    for test in json.loads(done.stdout):
        fields = {name: test[name] for name in ("n_prompt", "n_gen", "n_depth", "avg_ts")}
        print(
            json.dumps({"benchmark": "llama-bench", "model": Path(file).name, **fields}), flush=True
        )
