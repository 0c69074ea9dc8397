"""Graph, devices -> Schedule: which device computes which node, and what is copied between them.

assign -> split -> plan (each device's part of the graph in an arena of its own) -> bind -> run.
"""

from pyggml.runtime.schedule.assign import Assignment, assign
from pyggml.runtime.schedule.devices import Devices
from pyggml.runtime.schedule.program import Arenas, ScheduledProgram, bind, results
from pyggml.runtime.schedule.schedule import Schedule, schedule
from pyggml.runtime.schedule.split import Copy, Part, Split, split

__all__ = [
    "Arenas",
    "Assignment",
    "Copy",
    "Devices",
    "Part",
    "Schedule",
    "ScheduledProgram",
    "Split",
    "assign",
    "bind",
    "results",
    "schedule",
    "split",
]
