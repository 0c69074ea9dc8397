"""What more cores would give: a training step's tasks, recorded on one thread and shared out again.

usage: schedule.py MODEL.gguf [--tokens 512] [--threads 1,2,4,8,16,64] [--steps 5]

For each number of threads a process of its own splits the work for that many, runs all tasks one
after the other and records when each began and ended, by the processor's cycle counter. The tasks
of a region then go, in order, to whichever of the threads is free first, as in
pyggml.jit.regions; a region ends with its last task, and what lies between regions runs on one
thread. Each task counts with the shortest time that it took in any step.

What cores share tells a second recording: that of as many processes as there are threads, or cores
of this machine, which run the same steps at the same time. So tasks share the clock, units of a
core, caches and memory as those of threads would. A thread of the forecast takes the times of one
of these processes, for each task the median of all steps: cores are not equally fast, and a region
ends with the slowest. What a region of tasks that do nothing costs is measured at the start, on
each of those numbers of threads that this machine has cores for; of more threads it costs more by
the logarithm, as they wake each other along a tree. Up to the cores of this machine the step is
also timed.

Prints a JSON line: for each number of threads what a region costs (`region_us`), the seconds of
one thread alone, those foretold from that recording (`unshared`) and from the second one
(`foretold`), those measured (the shortest and the median), the share of the time on one thread that
runs outside of regions, and the ops in which threads wait longest.
"""

import argparse
import heapq
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from math import log2
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NoReturn

import llvmlite.binding as llvm
import numpy as np
from batches import random_batch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from step import step

import pyggml
from pyggml import threads
from pyggml.jit import kernel, regions
from pyggml.jit.frames import Floats1, Frame
from pyggml.jit.llvm import I64, declare_intrinsic
from pyggml.jit.regions import run_all
from pyggml.jit.tasks import launch, stage, table_of, task_code
from pyggml.kernels.gemm import teams
from pyggml.kernels.gemm.amx import product as tile_product
from pyggml.lora import LoraConfig, Parameters, TrainConfig, attach
from pyggml.lora.data import WindowBatch
from pyggml.lora.optim import FlatAdamW
from pyggml.lora.trainer.passes import Passes

from machine import about

# A process that cuts its work for more threads than this machine has cores.
MORE_THREADS = """
import runpy, sys
from numba.core import config
config.NUMBA_DEFAULT_NUM_THREADS = config.NUMBA_NUM_THREADS
from pyggml import granted
granted.cores = lambda: config.NUMBA_NUM_THREADS
sys.path.insert(0, sys.argv[1])
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_WORDS, _MOST_TASKS, _SYMBOL = 3, 4 << 20, "pyggml_record"
_record = np.zeros(1 + _WORDS * _MOST_TASKS, np.int64)  # how many; a task, its begin, its end
_plain_call_task = regions.call_task


@intrinsic
def _cycles(typing: Any) -> Any:
    """The processor's cycle counter, whose rate is constant."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = declare_intrinsic(builder, "llvm.readcyclecounter", I64, [])
        return builder.call(counter, [])

    return types.int64(), codegen


@intrinsic
def _note(typing: Any, task: Any, begin: Any, end: Any) -> Any:
    """Add a task to the record."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory = builder.module.globals.get(_SYMBOL)
        if memory is None:
            memory = ir.GlobalVariable(builder.module, I64, _SYMBOL)
            memory.linkage = "external"
        n = builder.load(memory)
        first = builder.add(builder.mul(n, I64(_WORDS)), I64(1))
        for i, value in enumerate(arguments):
            builder.store(value, builder.gep(memory, [builder.add(first, I64(i))]))
        builder.store(builder.add(n, I64(1)), memory)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3), codegen


@kernel
def _recorded_task(code, frame, task, thread):
    begin = _cycles()
    _plain_call_task(code, frame, task, thread)
    _note(task, begin, _cycles())


@kernel
def _now():
    return _cycles()


@kernel
def _take_even_group(f, task, thread, i, is_first):
    """As teams.take_group, of an even share: the first task, here alone, would take all groups."""
    n_members = min((len(f.own) + f.n_shared - 1) // f.n_shared, f.n_groups)
    share = f.n_groups if task < f.n_alone else (f.n_groups + n_members - 1) // n_members
    if i < share:
        return teams.take_group(f, task, thread, i, is_first)
    f.own[thread, i] = -1
    return -1


def record() -> None:
    """Have regions note their tasks; before the first is compiled, into a cache of its own."""
    llvm.add_symbol(_SYMBOL, _record.ctypes.data)
    regions.call_task = _recorded_task
    tile_product.take_group = _take_even_group
    threads.set(1)


class Recording:
    """The tasks of what ran between `start` and `end`, in cycles.

    note_cycles   what it takes to note a task, which is not counted
    """

    def __init__(self, start: int, end: int, noted: np.ndarray, note_cycles: int) -> None:
        self.tasks, begins, ends = noted.T
        self.cycles = ends - begins
        self.alone = end - start - int((ends - begins).sum()) - len(noted) * note_cycles

    @classmethod
    def of(cls, saved: Mapping[str, np.ndarray]) -> "Recording":
        """What record_beside saved."""
        result = cls.__new__(cls)
        result.tasks, result.cycles = saved["tasks"], saved["cycles"]
        result.alone = int(saved["alone"])
        return result

    @staticmethod
    def typical(recordings: Sequence["Recording"], pick: Callable) -> "Recording":
        """One for several of the same work; pick: np.min or np.median, of each task's times."""
        result = copy(recordings[0])
        assert all((r.tasks == result.tasks).all() for r in recordings), "another order of tasks"
        result.cycles = pick([r.cycles for r in recordings], axis=0)
        result.alone = int(pick([r.alone for r in recordings]))
        return result

    @property
    def total(self) -> int:
        """Cycles on one thread."""
        return self.alone + int(self.cycles.sum())

    def on(self, n_threads: int, region_cycles: float) -> float:
        """Cycles on that many threads."""
        return _on_threads([self], n_threads, region_cycles)


def _on_threads(of_cores: Sequence[Recording], n_threads: int, region_cycles: float) -> float:
    """Cycles on that many threads, each of which takes the times of one core."""
    tasks = of_cores[0].tasks
    assert all((r.tasks == tasks).all() for r in of_cores), "another order of tasks"
    cycles = np.stack([r.cycles for r in of_cores], axis=1)
    first = np.flatnonzero(tasks == 0)  # a region begins with task 0
    regions = np.split(cycles, first[1:]) if len(first) else []
    alone = float(np.median([r.alone for r in of_cores]))
    return alone + sum(_shared_out(r, n_threads, region_cycles) for r in regions)


def _shared_out(tasks: np.ndarray, n_threads: int, region_cycles: float) -> float:
    """When the last of a region's tasks (n, cores) ends, each taken by the thread that is free
    first."""
    if n_threads == 1 or len(tasks) == 1:
        return float(tasks[:, 0].sum())
    free = [(0.0, thread) for thread in range(min(n_threads, len(tasks)))]
    for of_cores in tasks.tolist():
        now, thread = free[0]
        heapq.heapreplace(free, (now + of_cores[thread % len(of_cores)], thread))
    return max(free)[0] + region_cycles


class _Nothing(Frame):
    x: Floats1


@task_code(_Nothing)
def _nothing(f, task, thread):
    return


class Run:
    """A LoRA training step on a model, of rank 8 on all linear modules."""

    def __init__(self, path: str, n_tokens: int) -> None:
        model = pyggml.load(path)
        adapter = attach(model, LoraConfig(rank=8, alpha=16.0))
        self.parameters: Parameters = adapter.parameters
        self.passes = Passes(adapter.model, self.parameters, n_tokens)
        self.optimiser = FlatAdamW(self.parameters, TrainConfig())
        self.batch: WindowBatch = random_batch(1, n_tokens, model.config.n_vocab)
        self.n, self.note_cycles = 0, _note_cycles()

    def step(self) -> None:
        self.n += 1
        step(self.passes, self.optimiser, self.parameters, self.batch, self.n)

    def record_step(self) -> Recording:
        _record[0], start = 0, _now()
        self.step()
        return Recording(start, _now(), _notes(), self.note_cycles)

    def record_nodes(self) -> list[tuple[str, Recording]]:
        """Each node of the graphs once more, with the name of its op."""
        nodes = []
        _record[0], start = 0, _now()
        for node, _ in self.passes.programs[0].walk():
            nodes.append((node.op.name, Recording(start, _now(), _notes(), self.note_cycles)))
            _record[0], start = 0, _now()
        return nodes


def _note_cycles() -> int:
    """What it takes to note a task: the shortest of some runs of tasks that do nothing."""
    nothing, n = stage(_nothing, _Nothing(x=np.zeros(1, np.float32)), 1 << 14), 1 << 14
    taken = []
    for _ in range(20):
        _record[0], start = 0, _now()
        launch(nothing)
        taken.append(Recording(start, _now(), _notes(), 0).alone // n)
    return min(taken)


def _notes() -> np.ndarray:
    n = int(_record[0])
    assert n <= _MOST_TASKS, f"{n} tasks, room for {_MOST_TASKS}"
    return _record[1 : 1 + _WORDS * n].reshape(n, _WORDS).copy()


def _cycles_per_second() -> float:
    began, start = perf_counter(), _now()
    while perf_counter() - began < 0.2:
        continue
    return (_now() - start) / (perf_counter() - began)


def region_seconds() -> float:
    """What a region of this process's threads costs."""
    nothing, n = _Nothing(x=np.zeros(1, np.float32)), 1000
    tables = [table_of([stage(_nothing, nothing, m)] * n) for m in (threads.most(), 1)]
    region, alone = (min(_seconds_of(table) for _ in range(30)) / n for table in tables)
    return max(region - alone, 0.0)


def _seconds_of(table: np.ndarray) -> float:
    began = perf_counter()
    run_all(table, 0)
    return perf_counter() - began


def region_us(n: int, measured: dict[int, float]) -> float:
    """Microseconds of a region on n threads, from those seconds that were measured."""
    most = max(m for m in measured if m <= n)
    return round(measured[most] * 1e6 * (log2(n) / log2(most) if most > 1 else 1), 2)


def foretell(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """A step's time on all threads, where it is lost, and how much runs on one thread."""
    n_threads, rate = threads.most(), _cycles_per_second()
    region, n_steps = options.region_us * 1e-6 * rate, options.steps
    whole = Recording.typical([run.record_step() for _ in range(n_steps)], np.min)
    names = [name for name, _ in run.record_nodes()]
    steps = [[node for _, node in run.record_nodes()] for _ in range(n_steps)]
    lost = Counter[str]()
    for name, nodes in zip(names, zip(*steps, strict=True), strict=True):
        node = Recording.typical(nodes, np.min)
        lost[name] += node.on(n_threads, region) - node.total / n_threads
    return {
        "one_thread": round(whole.total / rate, 4),
        "unshared": round(whole.on(n_threads, region) / rate, 4),
        "alone": round(whole.alone / whole.total, 4),
        "lost": {name: round(cycles / rate, 4) for name, cycles in lost.most_common(8)},
    }


def measure(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """A step's time on all threads of this process."""
    taken = []
    for _ in range(options.steps):
        began = perf_counter()
        run.step()
        taken.append(perf_counter() - began)
    return {"measured": round(min(taken), 4), "median": round(median(taken), 4)}


def record_beside(run: Run, options: argparse.Namespace) -> NoReturn:
    """When a line comes, record steps into a file, while others do, and run more until the end."""
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.readline()
    whole = Recording.typical([run.record_step() for _ in range(options.steps)], np.median)
    with Path(options.to).open("wb") as file:
        np.savez(file, tasks=whole.tasks, cycles=whole.cycles, alone=whole.alone)
    print(json.dumps({"rate": _cycles_per_second()}), flush=True)
    while True:
        run.step()


ROLES = {f.__name__: f for f in (foretell, measure, record_beside)}
MACHINE = "machine"


def one(options: argparse.Namespace) -> None:
    """What a process of its own does, for one number of threads."""
    if options.only == MACHINE:
        print(json.dumps({"region": region_seconds()}))
        return
    if options.only != "measure":
        record()
    run = Run(options.model, options.tokens)
    run.step()  # compiles
    _now()
    print(json.dumps(ROLES[options.only](run, options)))


class Processes:
    """Starts such processes, whose kernels that record are kept in a folder of their own."""

    def __init__(self, options: argparse.Namespace, cache: str) -> None:
        given = (options.model, "--tokens", str(options.tokens), "--steps", str(options.steps))
        here = str(Path(__file__).parent)
        self._command = [sys.executable, "-c", MORE_THREADS, here, __file__, *given]
        self._cache = cache

    def start(self, role: str, n: int, *further: str) -> subprocess.Popen:
        environment = os.environ | {"NUMBA_NUM_THREADS": str(n)}
        if role not in ("measure", MACHINE):
            environment["NUMBA_CACHE_DIR"] = self._cache
        command, pipe = [*self._command, "--only", role, *further], subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)

    def result(self, role: str, n: int, *further: str) -> dict[str, Any]:
        """What it prints."""
        process = self.start(role, n, *further)
        text, _ = process.communicate()
        if process.returncode:
            raise SystemExit(process.returncode)
        return dict(json.loads(text))

    def beside(self, n: int, region_us: float, n_cores: int) -> dict[str, Any]:
        """The forecast for n threads of what so many processes record at the same time."""
        files = [f"{self._cache}/beside-{i}.npz" for i in range(n_cores)]
        processes = [self.start("record_beside", n, "--to", file) for file in files]
        try:
            _lines_of(processes)
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            rate = median(line["rate"] for line in _lines_of(processes))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        recordings = [Recording.of(np.load(file)) for file in files]
        cycles = _on_threads(recordings, n, region_us * 1e-6 * rate)
        return {"foretold": round(cycles / rate, 4)}


def _lines_of(processes: Sequence[subprocess.Popen]) -> list[dict[str, Any]]:
    """The next line of each."""
    lines = [process.stdout.readline() for process in processes if process.stdout is not None]
    if not all(lines):
        raise SystemExit("a process that was to record beside others has ended")
    return [json.loads(line) for line in lines]


def numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=numbers, default=[1, 2, 4, 8, 16, 64])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", choices=[*ROLES, MACHINE], help=argparse.SUPPRESS)
    parser.add_argument("--region-us", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--to", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        one(options)
        return
    n_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as cache:
        result, processes = {}, Processes(options, cache)
        here = {1, n_cores, *(n for n in options.threads if n <= n_cores)}
        measured = {n: processes.result(MACHINE, n)["region"] for n in sorted(here)}
        for n in options.threads:
            us = region_us(n, measured)
            result[n] = {"region_us": us} | processes.result("foretell", n, "--region-us", str(us))
            result[n] |= processes.beside(n, us, min(n, n_cores))
            if n <= n_cores:
                result[n] |= processes.result("measure", n)
    name = Path(options.model).name
    print(json.dumps({"benchmark": "schedule", "model": name, **about("numba"), "threads": result}))


if __name__ == "__main__":
    main()
