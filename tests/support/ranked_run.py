"""A run of a tiny model, made by one process or by several ranks, on the CPU or another device.

`mpiexec -n 3 python ranked_run.py JSON`: each rank prints what each run of a list ended with, as a
line of JSON. `python ranked_run.py JSON 3` starts so many ranks by itself; the first prints all.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

import pyggml
from pyggml.cli.terminal.interrupt import stop_on_signals
from pyggml.errors import PyggmlError
from pyggml.lora import (
    DataConfig,
    LoraConfig,
    TrainConfig,
    Trainer,
    attach,
    train_packed,
    train_scales,
    train_tensors,
)
from pyggml.lora import corpus as corpus_of_rows
from pyggml.lora.data import Corpus, Dataset
from pyggml.lora.data.windows.answers import Answer, preferences
from pyggml.lora.objectives import OBJECTIVES
from pyggml.lora.ranks import ALONE, ranks_of_process
from pyggml.lora.ranks.local import start

CTX, N_VOCAB = 10, 48
PROMPTS = [{"prompt": "ab" * (1 + i % 3) + str(i)} for i in range(9)]


def vowels(completion):
    """A reward by which some answers earn more than others."""
    return sum(map(ord, completion)) % 7


# Of those that write answers, and of those whose teacher is the model without its adapter.
OF_KIND = {
    "distill": {"teacher_top_k": 5},
    "gkd": {"teacher_top_k": 5, "answers": 2, "answer_tokens": 5, "own_answers": 0.7},
    "grpo": {"answers": 3, "answer_tokens": 5, "reward": (vowels,), "iterations": 2},
}
SHORT = {"batch": 2, "grad_accum": 2, "max_steps": 4}  # of such a run


def objective_of(kind, model):
    """The objective. A model that writes answers has a vocabulary, see tiny_models.py."""
    chosen, settings = OBJECTIVES[kind], OF_KIND.get(kind, {})
    return chosen(**settings, **{"teacher": str(model)} if hasattr(chosen, "teacher") else {})


def corpus_of(kind, model):
    """Windows of random tokens, or of answers; more than whole steps of them. Or prompts."""
    if OBJECTIVES[kind].rows == "prompts":
        rows = [{**row, "completion": "ba"} for row in PROMPTS]
        return corpus_of_rows(
            rows, model, DataConfig(ctx=2 * CTX, val_split=0.3), purpose="prompts"
        )
    rng = np.random.default_rng(3)
    if kind in ("sft", "distill"):
        tokens = rng.integers(0, N_VOCAB, (15, CTX + 1)).astype(np.int32)
        documents = np.sort(rng.integers(0, 3, (15, CTX + 1)).astype(np.int32), axis=1)
        data = Dataset(tokens, documents)
        return Corpus(data.part(slice(0, 11)), data.part(slice(11, 15)))
    units = [[_answer(rng, 3 + i % 4, wanted) for wanted in (True, False)] for i in range(9)]
    if kind == "kto":
        units = [[answer] for unit in units for answer in unit]
    return Corpus(
        *(preferences(part, 4 * CTX, mismatch=kind == "kto") for part in (units[:-3], units[-3:]))
    )


def _answer(rng, n, wanted):
    ids = rng.integers(1, N_VOCAB, 3 + n)
    return Answer([int(i) for i in ids], np.arange(3 + n) >= 3, wanted)


def trainer_of(
    model, ranks=ALONE, kind="sft", resume=None, train=None, backends=(), split=(), **settings
):
    """train: "full" for all tensors, "half" for the same in halves, "scales" for those of blocks,
    or a file type for what its blocks hold; else an adapter. split: the blocks over devices."""
    settings = {"lr": 0.01, "epochs": 2, "grad_accum": 4, "warmup_steps": 2, **settings}
    how = {"compute": settings.get("compute", "auto"), "backends": backends}
    if split:
        from separate_cpu import SeparateCPU

        how |= {"backends": [SeparateCPU() for _ in split], "gpu_layers": 99, "split": split}
    base = pyggml.load(model, **how)
    lora = LoraConfig(rank=3, alpha=5.0, dropout=0.1)
    if train is None:
        adapter = attach(base, lora)
    elif train == "scales":
        adapter = train_scales(base)
    elif train in ("full", "half"):
        adapter = train_tensors(base, ["*"], in_halves=train == "half")
    else:
        adapter = train_packed(base, ["*"], train)
    rng = np.random.default_rng(9)
    adapter.parameters.data[:] += 0.05 * rng.normal(size=adapter.parameters.data.size)
    adapter.parameters.pack(adapter.model.devices)
    run = (adapter.model, adapter.parameters, corpus_of(kind, base), TrainConfig(**settings))
    trainer = Trainer(*run, objective_of(kind, model), ranks, reference=base)
    if resume is not None:
        trainer.resume(Path(resume))
    return trainer


def outcome(trainer):
    """What a run ends with: its parameters and moments, losses, and right tokens or rewards."""
    p, history = trainer.parameters, trainer.history
    arrays = (*p.arrays.values(), p.m, p.v, *p.moments.values())
    digest = hashlib.sha256(b"".join(b.tobytes() for b in arrays)).hexdigest()
    validations = [[v.step, v.loss, v.token_accuracy, repr(v.rewards)] for v in history.validations]
    return [digest, list(history.losses), validations, trainer.progress.step]


def expect_as_on_the_host(model, kind, device):
    """A short run on a device has the losses and the adapter of one on the CPU."""
    host, there = (
        trainer_of(model, kind=kind, compute="f32", backends=backends, **SHORT)
        for backends in ([], [device])
    )
    host.run(progress=False)
    there.run(progress=False)
    losses = there.history.losses, host.history.losses
    np.testing.assert_allclose(*losses, rtol=1e-4, atol=1e-6)
    found, wanted = there.parameters.data, host.parameters.data
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())


def main(ranks, model, die=None, differ=None, fail=None, stop=None, **settings):
    """die: (rank, step) where that rank is killed; fail: where it raises; stop: (rank, step,
    seconds, words) where it runs a command, and how long ranks wait from then on; differ: (rank,
    settings of that rank alone)."""
    if differ is not None and ranks.rank == differ[0]:
        settings |= differ[1]
    trainer = trainer_of(model, ranks, **settings)
    begin = trainer.passes.begin

    def train(batch, alone):
        if alone:
            return begin(batch, alone)
        if die == [ranks.rank, trainer.progress.step + 1]:
            os.kill(os.getpid(), signal.SIGKILL)
        if stop is not None and stop[1] == trainer.progress.step + 1:
            ranks.wait_at_most(stop[2])
            if stop[0] == ranks.rank:
                subprocess.run([w.format(os.getpid()) for w in stop[3]], check=True)
        if fail == [ranks.rank, trainer.progress.step + 1]:
            raise PyggmlError("the disk is full")
        return begin(batch, alone)

    trainer.passes.begin = train
    try:
        with stop_on_signals(trainer.stop):
            trainer.run(progress=False)
    except PyggmlError as error:
        return {"error": str(error)}
    about = {"rank": ranks.rank, "size": ranks.size, "at_once": trainer.passes.n_slots}
    return {**about, "outcome": outcome(trainer)}


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent))
    everyone, runs = ranks_of_process(), json.loads(sys.argv[1])
    n = int(*sys.argv[2:])
    if n and everyone.size == 1:
        everyone = start(n, [sys.executable, "-P", *sys.argv])
    ends = [json.dumps([main(everyone, **settings) for settings in runs])]
    if n and not any("has ended" in end or "was killed" in end for end in ends):
        ends = everyone.texts(*ends)
    sys.stdout.write("".join(f"{end}\n" for end in ends))
    if n:
        everyone.close()
