"""What tests of training look at: a trainer's whole state, and the steps among its reports."""

from pyggml.lora import StepReport


def state(trainer):
    p = trainer.parameters
    buffers = (*p.arrays.values(), p.m, p.v, *p.moments.values())
    return [b.tobytes() for b in buffers] + [trainer.progress]


def steps(events):
    return [e for e in events if isinstance(e, StepReport)]
