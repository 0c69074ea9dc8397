"""By hand along the guides that end in a command: an objective, a format, a device."""

import json

import pytest
from guides import DOCS, blocks_of, copy_of, edit, run_tests
from processes import python
from reference_backend import ReferenceBackend

from pyggml.lora import StepReport
from pyggml.ops import OPS
from pyggml.runtime.choice import KINDS, DeviceKind

PAIRS = [
    {"prompt": f"{name}? ", "chosen": f"the {name}", "rejected": f"no {name[::-1]}"}
    for name in ("ant", "bee", "cow", "dog", "elk", "fox", "gnu", "hen")
]
ROWS = [{"prompt": f"{p['prompt']}ü", "completion": p["chosen"]} for p in PAIRS]
# The commands of a checkout whose folder lora/ is a copy.
COMMAND = """
import sys
from pathlib import Path

import pyggml

pyggml._BESIDE["pyggml.lora"] = Path(sys.argv[1]) / "lora/__init__.py"
from pyggml.cli import __main__ as cli

sys.exit(cli.main(sys.argv[2:]))
"""


def command(tree, *arguments):
    """`pyggml ARGUMENTS` of the checkout with the folder lora/ of this tree, ended."""
    return python("-c", COMMAND, tree, *arguments)


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS), "utf-8")
    return path


def test_an_objective_in_a_program(tiny, pairs):
    names = {}
    for block in blocks_of("adding-an-objective.md"):
        exec(block, names)
    steps = [r for r in names["train"](tiny, pairs) if isinstance(r, StepReport)]
    assert len(steps) == 8
    assert steps[0].loss == pytest.approx(1.0, abs=1e-6), "nothing is preferred at first"
    assert steps[-1].loss < steps[0].loss and steps[-1].rewards.margin > 0


@pytest.fixture
def with_hinge(tmp_path):
    """Runs `pyggml ARGUMENTS` with the page's objective, added as the page says; what it prints."""
    folder = copy_of(tmp_path, "lora") / "lora/objectives"
    (folder / "hinge.py").write_text(blocks_of("adding-an-objective.md")[0], "utf-8")
    edit(
        folder / "__init__.py",
        "import IPO\n",
        "import IPO\nfrom pyggml.lora.objectives.hinge import Hinge\n",
    )
    edit(folder / "__init__.py", "_OF_ANSWERS = (", "_OF_ANSWERS = (Hinge, ")

    def call(*arguments):
        ended = command(tmp_path, *arguments)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return call


def test_an_objective_on_the_command_line(with_hinge, tiny, pairs, tmp_path):
    """With its setting as an option, in the settings that are kept, in help and in a report."""
    output = tmp_path / "a.gguf"
    files = ("-m", tiny, "-f", pairs, "-o", output, "--prompt", "the ")
    sizes = ("--ctx", 48, "--max-steps", 3, "--lora-rank", 2)
    said = with_hinge("finetune", *files, *sizes, "--objective", "hinge", "--margin", 2)
    assert "step 1/3  loss 2.000" in said, "the margin: nothing is preferred at first"
    settings = output.with_suffix(".yaml").read_text("utf-8")
    assert 'objective: "hinge"' in settings and "margin: 2.0" in settings
    assert "hinge" in output.with_suffix(".html").read_text("utf-8")
    text = " ".join(with_hinge("finetune", "--help-all").split())
    assert "hinge learns which answer is better, up to a margin" in text and "--margin" in text


REC = "".join("prompt: {prompt}\ncompletion: {completion}\n\n".format(**r) for r in ROWS)
CSV_SAMPLE = '    "a.csv": '


def test_a_format(tiny, tmp_path):
    """It is read as it is, compressed and by its content alone; a fault is told by its place."""
    tree = copy_of(tmp_path, "pyggml", "lora", "cli", "tests")
    (tree / "lora/data/formats/rec.py").write_text(blocks_of("adding-a-format.md")[0], "utf-8")
    files, tests = tree / "lora/data/reading/files.py", tree / "tests/lora/test_packed_data.py"
    last = "from pyggml.lora.data.formats.parquet import PARQUET\n"
    edit(files, last, last + "from pyggml.lora.data.formats.rec import REC\n")
    edit(files, "JSON_LINES, CSV)", "JSON_LINES, CSV, REC)")
    edit(tree / "pyggml/hub.py", '".tsv", ".txt")', '".tsv", ".txt", ".rec")')
    edit(tests, CSV_SAMPLE, f'    "a.rec": {REC!r},\n{CSV_SAMPLE}')
    edit(tests, '"csv", "txt"}', '"csv", "txt", "rec"}')
    # Plain, by gzip and, where zstandard is there, by zstd; and the list of formats.
    assert run_tests(tree, tests, "-k", "rec or every_format") >= 2
    rows, output = tmp_path / "rows.rec", tmp_path / "a.gguf"
    sizes = ("--ctx", 48, "--max-steps", 1, "--lora-rank", 2)
    for text, code, said in (
        (REC, 0, "rows.rec (rec): "),
        (f"{REC}prompt: x\nlabel: +", 2, "record 9"),
    ):
        rows.write_text(text, "utf-8")
        ended = command(tree, "finetune", "-m", tiny, "-f", rows, "-o", output, *sizes)
        assert ended.returncode == code and said in ended.stdout + ended.stderr, ended.stderr


@pytest.mark.filterwarnings("default:reference leaves")
def test_a_device(pyggml, finetune, monkeypatch):
    """A row of KINDS is enough for --device and inspect; a warning tells what the CPU computes."""
    assert "`KINDS` in `pyggml/runtime/choice.py`" in (DOCS / "adding-a-device.md").read_text(
        "utf-8"
    )
    ops = sorted(OPS)[::2]
    kind = DeviceKind(
        open=lambda number, exact: ReferenceBackend(ops),
        machine=lambda: iter([("reference", "float64 in NumPy")]),
    )
    monkeypatch.setitem(KINDS, "reference", kind)
    assert pyggml("inspect", "--machine").out.count("reference: float64 in NumPy") == 1
    ended = finetune("--device", "reference")
    assert ended.code == 0, ended.err
    assert "reference leaves" in ended.err, ended.out
