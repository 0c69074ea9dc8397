"""Many requests, one model: a scheduler that decodes them together, and the thread that runs it.

request     what is asked for, and what is told on the way
scheduler   which tokens go into the next pass
worker      the thread that owns the scheduler
"""

from pyggml.generation.serving.request import Failure, ReadPrompt, Request, RequestExpired
from pyggml.generation.serving.scheduler import Scheduler
from pyggml.generation.serving.worker import Full, Idle, Worker, WorkerClosed

__all__ = [
    "Failure",
    "Full",
    "Idle",
    "ReadPrompt",
    "Request",
    "RequestExpired",
    "Scheduler",
    "Worker",
    "WorkerClosed",
]
