"""The threads of this package: every task is run once, whoever computes beside, before or after, in
this process or a child of it; without tasks they cost nothing, and they are in nobody's way."""

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import loops
import numpy as np
import pytest
from loops import double
from processes import python

from pyggml import threads
from pyggml.jit import JIT, cores, regions
from pyggml.jit.frames import Floats1, Frame, Int
from pyggml.jit.tasks import launch, stage, task_code

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(not JIT, reason="interpreted code runs on one thread"),
]


class Counts(Frame):
    n: Floats1  # how often each task was run
    thread: Floats1  # which thread ran it
    work: Int


@task_code(Counts)
def _count(f, task, thread):
    x = np.float32(task)
    for _ in range(f.work):
        x = x * np.float32(0.999) + np.float32(1)
    f.n[task] += np.float32(1) if x > -1 else np.float32(0)
    f.thread[task] = thread


def counts(n, work=0):
    return Counts(n=np.zeros(n, np.float32), thread=np.full(n, -1, np.float32), work=work)


@pytest.fixture(autouse=True)
def as_before():
    before = threads.get()
    yield
    threads.set(before)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 100])
def test_each_task_is_run_once(n):
    f = counts(n)
    for _ in range(200):
        launch(stage(_count, f, n))
    assert (f.values["n"] == 200).all()


def test_more_tasks_than_one_region_counts():
    f = counts(regions._MOST + 3)
    launch(stage(_count, f, regions._MOST + 3))
    assert (f.values["n"] == 1).all()


@pytest.mark.skipif(threads.most() == 1, reason="one core")
def test_all_threads_that_are_active_take_tasks_and_no_others():
    f, late = counts(64, work=20_000), time.monotonic() + 20
    threads.set(1)
    launch(stage(_count, f, 64))
    assert set(f.values["thread"]) == {0}
    threads.set(2)
    seen = set()
    while seen != {0, 1} and time.monotonic() < late:  # another process may have the other core
        launch(stage(_count, f, 64))
        seen |= set(f.values["thread"])
    assert seen == {0, 1}


def test_regions_of_two_python_threads_at_once():
    wrong = []

    def compute(seed):
        rng = np.random.default_rng(seed)
        for n in rng.integers(1, 40, 300):
            f, x = counts(int(n), work=int(rng.integers(0, 300))), rng.random((int(n), 7))
            y = np.zeros_like(x)
            launch(stage(_count, f, int(n)))
            double(y, x)
            if not (f.values["n"] == 1).all() or not (y == 2 * x).all():
                wrong.append(n)

    both = [threading.Thread(target=compute, args=(seed,)) for seed in range(3)]
    for t in both:
        t.start()
    for t in both:
        t.join()
    assert wrong == []


def run(script, first="", warning="", **environment):
    """A script in a process of its own, after what it needs: its output, and no word of error but
    the warning."""
    done = python("-P", "-c", first + START + script, **{"NUMBA_NUM_THREADS": "2"} | environment)
    assert done.returncode == 0, done.stderr
    assert warning in done.stderr if warning else done.stderr == "", done.stderr
    return done.stdout.split()


START = f"""
import os, signal, sys, threading, time
from numba.core import config
config.NUMBA_DEFAULT_NUM_THREADS = config.NUMBA_NUM_THREADS  # as if there were as many cores
sys.path.append({str(Path(loops.__file__).parent)!r})
import numpy as np
from loops import double
from pyggml import threads
from pyggml.jit import pool
x = np.ones((512, 512), np.float32)
def compute():
    y = np.zeros_like(x)
    double(y, x)
    return bool((y == 2).all())
"""


def absent(layer):
    """What is said where Numba lacks a layer: TBB is a package, and OpenMP a library."""
    module = {"tbb": "tbbpool", "omp": "omppool", "safe": "tbbpool", "nonsense": "nonsense"}.get(
        layer
    )
    try:
        if module:
            importlib.import_module(f"numba.np.ufunc.{module}")
    except ImportError:
        return f"NUMBA_THREADING_LAYER={layer} cannot be loaded"
    return ""


@pytest.mark.parametrize("layer", ["workqueue", "omp", "tbb", "safe", "nonsense", "default"])
def test_whatever_threads_numba_has_two_python_threads_compute_at_once(layer):
    """Numba's work queue ends a process in which two do."""
    script = """
compute()
right = []
def many():
    right.extend([compute() for _ in range(200)])
both = [threading.Thread(target=many) for _ in range(2)]
for t in both: t.start()
for t in both: t.join()
print(all(right), len(right))
"""
    done = run(script, warning=absent(layer), NUMBA_THREADING_LAYER=layer)
    assert done == ["True", "400"]


def test_six_threads_wake_each_other():
    script = "print(all([compute() for _ in range(300)]), len(pool._threads))"
    assert run(script, NUMBA_NUM_THREADS="6") == ["True", "5"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_of_a_fork_has_threads_of_its_own():
    script = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork in a process with threads
before = compute(), len(pool._threads)
child = os.fork()
if child == 0:
    none = len(pool._threads)
    print(none, compute(), len(pool._threads), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(*before, compute())
"""
    assert run(script) == ["0", "True", "1", "True", "1", "True"]


def test_threads_without_tasks_sleep():
    script = """
compute(); time.sleep(0.1)
before = time.process_time()
time.sleep(1)
print(time.process_time() - before)
"""
    assert float(run(script)[0]) < 0.02


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is another thing there")
@pytest.mark.parametrize("main", ["time.sleep(60)", "[compute() for _ in iter(int, 1)]"])
def test_ctrl_c_is_prompt(main):
    script = f"""
compute()
print("ready", flush=True)
try:
    {main}
except KeyboardInterrupt:
    print("interrupted")
"""
    running = subprocess.Popen(
        [sys.executable, "-P", "-c", START + script], stdout=subprocess.PIPE, text=True
    )
    assert running.stdout.readline() == "ready\n"
    time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    # Far below the 60 s that it would sleep, on a busy machine too.
    assert running.communicate(timeout=30)[0] == "interrupted\n"
    assert running.returncode == 0


def test_the_interpreter_ends_while_others_compute():
    """A daemon thread that computes is left behind; what is called after the threads have ended
    still computes."""
    first = "import atexit; atexit.register(lambda: print(compute(), pool._threads[0].is_alive()))"
    script = """
def forever():
    while True: compute()
print(compute(), pool._threads[0].is_alive())
threading.Thread(target=forever, daemon=True).start()
time.sleep(0.1)
"""
    assert run(script, first) == ["True", "True", "True", "False"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
@pytest.mark.parametrize("asked", [{}, {"NUMBA_NUM_THREADS": "16"}])
def test_there_are_as_many_threads_as_cores_that_may_be_used(asked):
    script = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    env = {name: value for name, value in os.environ.items() if name != "NUMBA_NUM_THREADS"} | asked
    script += "from pyggml import threads" + START.replace("config.NUMBA_DEFAULT", "_")
    script += "print(threads.most(), compute(), len(pool._threads))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "True", "0"]


@pytest.mark.parametrize(("share", "wanted"), [(float("inf"), 8), (1.5, 2), (0.5, 1)])
def test_a_container_s_share_of_the_cores_limits_them(monkeypatch, share, wanted):
    monkeypatch.setattr(cores.config, "NUMBA_DEFAULT_NUM_THREADS", 8)
    monkeypatch.setattr(cores.config, "NUMBA_NUM_THREADS", 16)
    monkeypatch.setattr(cores.granted, "cores", lambda: share)
    assert cores.n_cores.__wrapped__() == wanted
