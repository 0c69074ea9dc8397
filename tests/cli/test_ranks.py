"""--ranks and --device cuda:all: processes that the first one starts."""

import dataclasses

import pytest

from pyggml.cli.commands.finetune.job import Job, check_shared
from pyggml.errors import ConfigError
from pyggml.lora.ranks.alone import Ranks
from pyggml.lora.ranks.device import device_of_rank


@pytest.fixture
def finetune(pyggml, tiny, text, tmp_path):
    """Four steps of two passes each, by `output`'s name."""

    def call(output, *options):
        given = ("--ctx", 16, "--compute", "f32", "--lora-rank", 2, "--lr", 0.01, "--prompt", "th")
        given += ("--grad-accum", 2, "--max-steps", 4, "--no-report", "-o", tmp_path / output)
        given += ("--cache-dir", tmp_path / "tokens", *options)
        return pyggml("finetune", "-m", tiny, "-f", text, *given)

    return call


def test_ranks_write_the_adapter_of_one_process_also_when_interrupted(
    finetune, signal_after, tmp_path
):
    """Ctrl-C ends all of them after the step, and one process goes on."""
    assert finetune("alone.gguf").code == 0
    whole = finetune("two.gguf", "--ranks", 2)
    assert whole.code == 0, whole.err
    assert whole.row("ranks") == "2 processes share the 2 passes of a step"
    assert whole.out.count("step 4/4") == 1 and not whole.err
    signal_after(2, 1)
    folder = ("--checkpoint-dir", tmp_path / "points")
    ended = finetune("cut.gguf", "--ranks", 2, *folder)
    assert ended.code == 130 and "after step 2 of 4" in ended.row("stopped")
    assert "--ranks 2" in ended.row("resume") and "mpiexec" not in ended.row("resume")
    signal_after(9, 1)
    assert finetune("cut.gguf", *folder, "--resume", "auto").code == 0
    (wanted,) = {(tmp_path / f"{name}.gguf").read_bytes() for name in ("alone", "two", "cut")}
    assert wanted


def test_without_a_number_of_passes_each_rank_has_one(pyggml, tiny, text, tmp_path):
    """Which is said, and what goes on with another number of ranks says it too."""
    short = ("finetune", "-m", tiny, "-f", text, "--ctx", 16, "--max-steps", 2, "--no-report")
    short += ("--compute", "f32", "--prompt", "th", "--cache-dir", tmp_path / "tokens")
    bytes_of = []
    for name, options in (("two", ("--ranks", 2)), ("one", ("--grad-accum", 2))):
        ended = pyggml(*short, "-o", tmp_path / f"{name}.gguf", *options)
        assert ended.code == 0, ended.err
        bytes_of.append((tmp_path / f"{name}.gguf").read_bytes())
        if name == "two":
            said = "2 processes share the 2 passes of a step, as for --grad-accum 2"
            assert ended.row("ranks") == said
    assert bytes_of[0] == bytes_of[1]


def test_a_fault_of_all_ranks_is_one_sentence(finetune):
    ended = finetune("a.gguf", "--ranks", 3)
    assert ended.code == 2 and ended.err.count("\n") == 1
    assert "--grad-accum is 2: 3 ranks share the passes of a step" in ended.err


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (
            ("--device", "cuda:all", "-ngl", 3),
            "--device cuda:all gives each card passes of a step, --gpu-layers blocks of the model",
        ),
        (
            ("--device", "cuda:0,cuda:1", "--ranks", 3),
            "--ranks is 3 and --device cuda:0,cuda:1: wanted one for each process",
        ),
        (
            ("--device", "cuda:0,cuda:1", "--split", "1,1", "--ranks", 2),
            "--ranks is 2 and --device cuda:0,cuda:1: wanted one for each process",
        ),
        (("--device", "cuda:0,cuda:0"), "--device names cuda:0 twice, wanted another one"),
        (("--ranks", 0), "Invalid value for '--ranks'"),
        (("--ranks", 2, "-f", "-"), "-: is a pipe, which is read once: wanted a file for 2 proc"),
    ],
    ids=str,
)
def test_devices_that_clash_with_processes_are_refused(finetune, options, wanted):
    ended = finetune("a.gguf", *options)
    assert ended.code == 2 and wanted in ended.err and ended.err.count("\n") == 1


def test_a_sweep_makes_each_run_in_one_process(pyggml, tiny, text, tmp_path):
    options = (
        "-f",
        text,
        "-o",
        tmp_path / "runs",
        "--lr",
        "1e-3,1e-2",
        "--device",
        "cuda:0,cuda:1",
    )
    ended = pyggml("sweep", "-m", tiny, *options)
    assert ended.code == 2
    assert "--device cuda:0,cuda:1 is a process for each, and a run of a sweep is one" in ended.err


@pytest.mark.quick
def test_a_launcher_decides_the_number_of_its_processes():
    launched = Ranks()
    launched.size, launched.launcher = 2, ("mpiexec", "-n", "2")
    check_shared(_job("cpu", ranks=2), launched)
    with pytest.raises(ConfigError, match="--ranks is 3, and 2 processes are started by a launch"):
        check_shared(_job("cpu", ranks=3), launched)


@pytest.mark.quick
def test_ranks_take_all_cards_or_those_of_a_list(monkeypatch):
    @dataclasses.dataclass
    class Card:
        index: int

    class Second(Ranks):
        rank, size, on_host = 1, 2, 1

    monkeypatch.setattr("pyggml.backends.cuda.cards", lambda: [Card(0), Card(3)])
    n = {device: Job.n_ranks.fget(_job(device)) for device in ("cuda:all", "cuda:5,cuda:4", "cpu")}
    assert n == {"cuda:all": 2, "cuda:5,cuda:4": 2, "cpu": 1}
    assert Job.n_ranks.fget(_job("cuda:0,cuda:1", split=(1.0, 1.0))) == 1
    assert device_of_rank("cuda:all", Second()) == "cuda:3"
    assert device_of_rank("cuda:5,cuda:4", Second()) == "cuda:4"


def _job(device, split=None, ranks=None):
    job = object.__new__(Job)
    for name, value in (("device", device), ("split", split), ("ranks", ranks)):
        object.__setattr__(job, name, value)
    object.__setattr__(job, "gpu_layers", None)
    return job
