"""The first training step of its kind is compiled by two processes: a helper begins at its end.

It plans the same graphs and compiles their kernels from the last to the first, running none. Both
keep what they compile in the cache's folder, where the other finds it. A note in that folder says
that a step of this kind has been taken, so that no later run asks for help.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyggml import load, threads
from pyggml._jit import CACHE, JIT
from pyggml.graph import Graph
from pyggml.lora import LoraConfig, TrainConfig, attach
from pyggml.lora.optim import AdamW
from pyggml.lora.passes import Passes


@contextmanager
def helped(
    model: Path, lora: LoraConfig | None, train: TrainConfig, ctx: int, graph: Graph, compute: str
) -> Iterator[Callable[[], None]]:
    """Inside, a helper compiles what the graph needs, if it may be the first of its kind; what this
    yields is to be called after the first step. lora: None where no adapter is trained."""
    note = None if CACHE is None else CACHE / f"{_kind(graph, compute)}.compiled"
    alone = (train.threads or threads.most()) == 1
    helper = None
    if lora is not None and note is not None and JIT and not alone and not note.exists():
        helper = _started([str(model), asdict(lora), asdict(train), ctx])
    if note is None or helper is None:
        yield lambda: None
        return
    pipe = helper.stdin
    assert pipe is not None

    def done() -> None:
        """Leave the note; the helper ends with the kernel under way."""
        if not pipe.closed:
            pipe.close()
            with suppress(OSError):
                note.touch()

    with helper:  # which closes the pipe and waits
        try:
            yield done
        finally:
            helper.terminate()


def _started(job: list[Any]) -> subprocess.Popen[bytes] | None:
    """A helper at work on a model and the settings of a run; None if there can be none."""
    try:
        helper = subprocess.Popen(
            [sys.executable, "-m", "pyggml.cli.ahead"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONSAFEPATH": "1", "NUMBA_CACHE_DIR": str(CACHE)},
            start_new_session=True,  # Ctrl-C is for the run
        )
    except OSError:
        return None
    assert helper.stdin is not None
    with suppress(BrokenPipeError):
        helper.stdin.write(json.dumps(job, default=str).encode() + b"\n")
    return helper


def _kind(graph: Graph, compute: str) -> str:
    """The same for graphs that need the same kernels."""
    nodes = graph.nodes
    kinds = {(t.op.name, *(s.dtype.name for s in t.src)) for t in nodes if t.op is not None}
    return hashlib.sha256(repr((compute, sorted(kinds))).encode()).hexdigest()[:12]


def main() -> None:
    """The helper: a job comes as a line of input, whose end is the helper's."""
    name, lora, train, ctx = json.loads(sys.stdin.readline())
    ended = threading.Event()

    def listen() -> None:
        os.read(0, 1)
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    lora["modules"] = lora["modules"] and tuple(lora["modules"])
    lora["init"] = "kaiming"  # another start needs time and the same kernels
    settings = TrainConfig(**train)
    model = load(name, compute=settings.compute)
    adapter = attach(model, LoraConfig(**lora))
    AdamW(adapter.parameters, settings).compile()
    for _ in Passes.of(adapter.model, adapter.parameters, settings, ctx).compile_backwards():
        if ended.is_set():
            return


if __name__ == "__main__":
    main()
