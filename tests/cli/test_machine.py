"""`pyggml inspect --machine`: what computes here."""

import pytest

from pyggml.backends.cuda import Card
from pyggml.cli.commands.inspect.machine import _line
from pyggml.jit.isa import ISAS
from pyggml.kernels.gemm import CHOSEN, FASTEST, PATHS
from pyggml.quants import QUANTS


@pytest.fixture(autouse=True)
def briefly(monkeypatch):
    """What the machine can do at most is measured for an instant, not for seconds."""
    monkeypatch.setattr("pyggml.look.limits._SECONDS", 0.01)


def test_inspect_says_what_computes_on_this_machine(pyggml):
    ended = pyggml("inspect", "--machine")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert any(line.startswith(f"vectors    {CHOSEN.name}") for line in lines)
    assert f"auto is {FASTEST};" in ended.out
    product = next(line for line in lines if line.startswith("  Q4_0 · x"))
    named = [cell.split(": ")[1] for cell in product.split("Q4_0 · x", 1)[1].split(";")]
    assert named and {name.strip() for name in named} <= {path.name for path in PATHS}
    assert all(len(line) <= 80 for line in lines[lines.index("what computes, by tokens") :])


def test_paths_of_neighbours_are_one_and_no_two_touch():
    names = ["rows", "amx, few tokens", "amx, few tokens", "amx", "amx"]
    said = _line("  Q8_0 · x", names)
    assert said == "  Q8_0 · x              1: rows; 8 to 16: amx, few tokens; 64 to 512: amx"


def test_inspect_says_of_every_weight_type_what_computes(pyggml):
    """None is missing, and of a quantised type one token is computed as that of any other."""
    out = pyggml("inspect", "--machine").out
    rows = {line.split(" · x")[0].strip(): line for line in out.splitlines() if " · x" in line}
    others = " ".join(out.split()).replace(",", "").split()
    assert all(name in rows or name in others for name in QUANTS)
    few = {line.split(": ", 1)[1][:4] for name, line in rows.items()
           if QUANTS[name].dtype.block > 1}  # fmt: skip
    assert len(few) == 1


def test_a_vector_unit_that_was_asked_for_is_named_as_such(pyggml, monkeypatch):
    monkeypatch.setenv("PYGGML_ISA", "generic")
    monkeypatch.setattr("pyggml.cli.commands.inspect.machine.CHOSEN", ISAS["generic"])
    ended = pyggml("inspect", "--machine")
    assert "vectors    generic, which PYGGML_ISA asks for: 4 float32" in ended.out
    assert "not avx" not in ended.out


def test_inspect_wants_a_file_or_the_machine(pyggml):
    ended = pyggml("inspect")
    assert ended.code == 2 and ended.err == "pyggml: wanted a FILE or --machine\n"


def test_a_resumed_run_computes_as_the_one_that_it_continues(
    finetune, signal_after, tmp_path, monkeypatch
):
    other = "bf16" if FASTEST != "bf16" else "f32"
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("pyggml.models.on_devices.FASTEST", other)
        signal_after(2)
        assert finetune("--checkpoint-dir", tmp_path / "c").code == 130
    ended = finetune("--resume", tmp_path / "c")
    assert ended.code == 0
    assert ended.row("compute") == f"{other}, as the run that is continued; auto is {FASTEST} here"


def test_inspect_names_the_devices(pyggml, monkeypatch):
    assert "devices " in pyggml("inspect", "--machine").out
    found = [Card(1, "GeForce", (8, 9), 24 * 10**9)]
    monkeypatch.setattr("pyggml.backends.cuda.cards", lambda: found)
    told = "cuda:1: GeForce, 24.0 GB, compute capability 8.9"
    assert pyggml("inspect", "--machine").row("devices") == told
    monkeypatch.setenv("PYGGML_CUDA_CAPABILITY", "8.6")
    asked = ", kernels for 8.6, which PYGGML_CUDA_CAPABILITY asks for"
    assert pyggml("inspect", "--machine").row("devices") == told + asked
