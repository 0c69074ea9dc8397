"""Graph, devices → numbers: which device computes which node, each kernel bound once, the run.

assign → split → plan (each device's part of the graph in an arena of its own) → bind → run. A graph
that the host runs alone is a schedule of one part.
"""

from pyggml.runtime.assign import Assignment, assign
from pyggml.runtime.calls import compile_backwards
from pyggml.runtime.choice import backends_of
from pyggml.runtime.devices import Devices
from pyggml.runtime.program import Arenas, Program, bind, results, run
from pyggml.runtime.schedule import Schedule, schedule
from pyggml.runtime.split import Copy, DevicePart, Split, split

__all__ = [
    "Arenas", "Assignment", "Copy", "DevicePart", "Devices", "Program", "Schedule", "Split",
    "assign", "backends_of", "bind", "compile_backwards", "results", "run", "schedule", "split",
]  # fmt: skip
