"""Many requests: a scheduler that decodes those of a model together, and the thread that runs it.

request     what is asked for, and what is told on the way
scheduler   which tokens go into the next pass
relay       several models that take turns
worker      the thread that owns the scheduler
"""

from pyggml.generation.serving.relay import Relay
from pyggml.generation.serving.request import Failure, ReadPrompt, Request, RequestExpired
from pyggml.generation.serving.scheduler import Scheduler
from pyggml.generation.serving.worker import Full, Idle, Worker, WorkerClosed

__all__ = [
    "Failure", "Full", "Idle", "ReadPrompt", "Relay", "Request", "RequestExpired", "Scheduler",
    "Worker", "WorkerClosed",
]  # fmt: skip
