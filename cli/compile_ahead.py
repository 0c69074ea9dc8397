"""A helper process for the first training step: it compiles kernels, starting from the last.

The run compiles the same kernels from the first, as it meets them. Both keep their results in the
cache's folder, where the other finds them. A note in that folder has the kinds of nodes that steps
have computed: a run of these alone starts no helper, and of no others is memory set aside for the
compiler.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pyggml import load, threads
from pyggml.graph import Graph
from pyggml.graph.op import has_kernel
from pyggml.jit import CACHE, JIT
from pyggml.lora import LoraConfig, TrainConfig, attach
from pyggml.lora.optim import FlatAdamW
from pyggml.lora.trainer.passes import Passes


def share_to_compile(graph: Graph, compute: str) -> float:
    """Of the kinds of nodes of a graph, the share that no earlier run has computed, so that their
    kernels are not in the cache."""
    kinds = _kinds(graph, compute)
    return len(kinds - _compiled_kinds(_note())) / max(len(kinds), 1)


def _note() -> Path | None:
    return CACHE / "nodes.compiled" if CACHE is not None and JIT else None


def _compiled_kinds(note: Path | None) -> set[str]:
    """The kinds of nodes whose kernels are in the cache."""
    try:
        return set(note.read_text(errors="replace").split()) if note is not None else set()
    except OSError:
        return set()


@contextmanager
def run_helper(
    model: Path, lora: LoraConfig | None, train: TrainConfig, ctx: int, graph: Graph, compute: str
) -> Iterator[Callable[[], None]]:
    """A context with a helper, if the graph may have nodes of a new kind.

    Yields a function to call after each step. lora: None for no helper.
    """
    note, kinds = _note(), _kinds(graph, compute)
    new = kinds - _compiled_kinds(note)
    if note is None or not new:
        yield lambda: None
        return
    alone = lora is None or (train.threads or threads.most()) == 1
    helper = None
    if lora is not None and not alone:
        helper = _start_helper([str(model), asdict(lora), asdict(train), ctx])
    if helper is None:
        yield partial(_leave, note, new)
        return
    pipe = helper.stdin
    assert pipe is not None

    def leave_note() -> None:
        """Leave the note; the helper ends with the kernel under way."""
        if not pipe.closed:
            pipe.close()
            _leave(note, new)

    with helper:  # which closes the pipe and waits
        try:
            yield leave_note
        finally:
            helper.terminate()


def _leave(note: Path, kinds: set[str]) -> None:
    """Add these to the note, once. Another run may do so at the same time."""
    if kinds:
        with suppress(OSError), note.open("a") as file:
            file.write("".join(f"{kind}\n" for kind in sorted(kinds)))
        kinds.clear()


def _start_helper(job: list[Any]) -> subprocess.Popen[bytes] | None:
    """A helper at work on a model and the settings of a run; None if there can be none."""
    assert CACHE is not None
    try:
        helper = subprocess.Popen(
            [sys.executable, "-m", "pyggml.cli.compile_ahead"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONSAFEPATH": "1", "NUMBA_CACHE_DIR": str(CACHE.parent)},
            start_new_session=True,  # Ctrl-C is for the run
        )
    except OSError:
        return None
    assert helper.stdin is not None
    with suppress(BrokenPipeError):
        helper.stdin.write(json.dumps(job, default=str).encode() + b"\n")
    return helper


def _kinds(graph: Graph, compute: str) -> set[str]:
    """Digests, equal for nodes with the same kernel."""
    nodes = (t for t in graph.nodes if t.op is not None and has_kernel(t))
    kinds = {(compute, t.op.name, *(s.dtype.name for s in t.src)) for t in nodes if t.op}
    return {hashlib.sha256(repr(kind).encode()).hexdigest()[:12] for kind in kinds}


def main() -> None:
    """The helper. Its job is one line of standard input; the end of that input ends the helper."""
    name, lora, train, ctx = json.loads(sys.stdin.readline())
    is_over = threading.Event()

    def listen() -> None:
        os.read(0, 1)
        is_over.set()

    threading.Thread(target=listen, daemon=True).start()
    lora["modules"] = lora["modules"] and tuple(lora["modules"])
    lora["init"] = "kaiming"  # another start needs time and the same kernels
    settings = TrainConfig(**train)
    model = load(name, compute=settings.compute)
    adapter = attach(model, LoraConfig(**lora))
    FlatAdamW(adapter.parameters, settings).compile()
    for _ in Passes.of(adapter.model, adapter.parameters, settings, ctx).compile_backwards():
        if is_over.is_set():
            return


if __name__ == "__main__":
    main()
