"""By hand along each guide for adding something: what it says to write is written, and what it says
to run passes. tests/cli/test_guides.py has those that end in a command."""

import inspect
import re
from pathlib import Path

import pytest
from guides import DOCS, ROOT, blocks_of, copy_of, edit, run_tests

from pyggml.models import small_metadata
from pyggml.models.architectures import llama
from pyggml.models.config import Reader
from pyggml.models.part import Part
from pyggml.ops.arithmetic import reduce, unary
from pyggml.quants import QUANTS

GUIDES = sorted(DOCS.glob("adding-a*.md"))
FOLDERS = ("pyggml", "lora", "cli", "tests", "docs", "benchmarks")


@pytest.fixture(scope="module")
def there():
    """The files of the project, and the words of its sources."""
    files = [p.as_posix() for d in FOLDERS for p in (ROOT / d).rglob("*.*")] + ["pyproject.toml"]
    sources = (Path(p).read_text("utf-8") for p in files if p.endswith(".py") and p != __file__)
    return files, {word for text in sources for word in re.findall(r"\w+", text)}


@pytest.fixture
def plugins(request, tmp_path):
    """A folder whose modules the tests of `run_tests` import first: the same in every run, or the
    cache of kernels would keep those of each."""
    cache = getattr(request.config, "cache", None)
    folder = (cache.mkdir("guides") if cache else tmp_path) / request.node.originalname
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize(
    "file, name, least",
    [
        (reduce, "reverse", 8),  # three samples, layouts, threads, drawn ones
        (unary, "cube", 14),  # four samples forward and back, in place too
    ],
)
def test_an_op(file, name, least, plugins):
    """In a file that sees what the family's file sees, declared before the tests ask for ops."""
    block = next(block for block in blocks_of("adding-an-op.md") if f"def {name}(" in block)
    names = ", ".join(each for each in vars(file) if not each.startswith("__"))
    imports = f"from __future__ import annotations\nfrom {file.__name__} import {names}\n"
    (plugins / "pasted.py").write_text(imports + block, "utf-8")
    assert run_tests(ROOT, "tests/test_every_op.py", "-k", name, plugins=plugins) >= least


ENTER_MODEL = """
from pyggml.models.architectures import ARCHITECTURES
ARCHITECTURES[LAYER_SCALE.name] = LAYER_SCALE
"""


def test_a_model(plugins):
    whole = next(block for block in blocks_of("adding-a-model.md") if "LAYER_SCALE" in block)
    (plugins / "pasted.py").write_text(whole + ENTER_MODEL, "utf-8")
    files = ("tests/models", "tests/backward/test_full_model.py")
    every = ("-m", "slow or not slow")  # of passes and caches, which are tried on few kinds else
    assert run_tests(ROOT, *files, *every, "-k", "layer-scale", plugins=plugins) >= 10


def test_the_shortest_model_is_llama_without_experts():
    """In a file that sees what llama.py sees, both make the same parts."""
    names = dict(vars(llama))
    exec(blocks_of("adding-a-model.md")[0], names)
    metadata = small_metadata(llama.LLAMA)
    readers = (Reader("llama", metadata.get, {"token_embd.weight": (11, 0)}) for _ in "ab")
    theirs, ours = (
        a.decoder(r) for a, r in zip((llama.LLAMA, names["LLAMA"]), readers, strict=True)
    )
    assert names["LLAMA"] is not llama.LLAMA and theirs == ours


def test_the_page_on_models_names_the_methods_of_a_part():
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "adding-a-model.md").read_text("utf-8"), re.M)
    methods = {n for n in vars(Part) if n[0] != "_" or n in Part.__abstractmethods__}
    assert set(rows) == methods


ENTER_PATH = """
from pyggml.kernels import gemm
from pyggml.kernels.gemm import paths
gemm.PATHS = paths.PATHS = (ONE_ROW, *paths.PATHS)
"""
SERVED = """SERVED = {
    "one_row": (weight("mul_mat", "F32", "f32", m=8, n=1), "one row"),
"""


@pytest.mark.parametrize(
    "files, words, least",
    [
        (["paths"], "one_row or every_path_is_named", 4),
        pytest.param(["paths", "product"], "", 300, marks=pytest.mark.slow),
    ],
    ids=["one", "all"],
)
def test_a_path_of_products(files, words, least, plugins, tmp_path):
    """The tests are copied, since one of them names a product that it serves."""
    tree = copy_of(tmp_path, "tests")
    (plugins / "pasted.py").write_text(blocks_of("adding-a-compute-path.md")[0] + ENTER_PATH)
    edit(tree / "tests/kernels/gemm/test_paths.py", "SERVED = {\n", SERVED)
    paths = [f"tests/kernels/gemm/test_{file}.py" for file in files]
    assert run_tests(tree, *paths, "-k", words, plugins=plugins) >= least


ENTER_ATTENTION = """
from pyggml.kernels import attention
from pyggml.kernels.attention import table
attention.FORWARD = table.FORWARD = (ONE_QUERY, *table.FORWARD)
"""


def test_a_path_of_attention(plugins):
    """It serves one query, and no more; every path still serves something."""
    (plugins / "pasted.py").write_text(blocks_of("adding-a-compute-path.md")[1] + ENTER_ATTENTION)
    tests = "tests/kernels/attention/test_table.py"
    assert run_tests(ROOT, tests, "-k", "single or reach", plugins=plugins) >= 43


OWN = """def _q8_w(blocks):
    return blocks[:, :2].view(np.float16).astype(np.float32) * blocks[:, 2:].view(np.int8)


OWN = {"Q8_W": _q8_w, """
ERRORS_BEFORE = '("IQ1_M", 0.6, 1.0)],\n'


def with_the_weight_type(tree):
    """A copy with the page's type, its row among ggml's types and its lists in tests."""
    row, whole = (re.search(r"`(_blocks\(.*?\))`", (DOCS / WEIGHTS).read_text("utf-8"))[1],
                  next(block for block in blocks_of(WEIGHTS) if "Q8_W" in block))  # fmt: skip
    package, tests = tree / "pyggml", tree / "tests/quants"
    (package / "quants/types/wide.py").write_text(whole, "utf-8")
    edit(package / "graph/dtypes.py", "        Q8_0,\n", f"        Q8_0,\n        {row},\n")
    edit(tests / "test_pack.py", "NOT_IN_GGML: tuple[str, ...] = (", 'NOT_IN_GGML = ("Q8_W",')
    edit(tests / "test_pack.py", ERRORS_BEFORE, ERRORS_BEFORE + '    ("Q8_W", 8e-3, 0.0042),\n')
    edit(tests / "test_unpack.py", "OWN = {", OWN)


WEIGHTS = "adding-a-weight-type.md"


@pytest.mark.parametrize(
    "folders, most",
    [(["tests/quants"], 16), pytest.param(["tests/kernels/gemm"], 14, marks=pytest.mark.slow)],
    ids=["quants", "products"],
)
def test_a_weight_type(folders, most, tmp_path):
    tree = copy_of(tmp_path, "pyggml", "lora", "cli", "tests")
    with_the_weight_type(tree)
    cache = str(tmp_path / "cache")
    assert run_tests(tree, *folders, "-k", "Q8_W", NUMBA_CACHE_DIR=cache) >= most


def test_the_short_decoder_is_the_one_that_is_compiled():
    source = inspect.getsource(QUANTS["Q5_1"].decode)
    assert source == blocks_of(WEIGHTS)[0]


def test_a_peer_of_the_page_stands_among_them():
    peer = next(block for block in blocks_of("adding-a-model.md") if "NEMOTRON" in block)
    peer = re.sub(r" +#.*", "", peer)
    assert peer in (ROOT / "tests/support/peers/dense.py").read_text("utf-8")


# What guides name that is not the project's: of llama.cpp, or of the thing to be added.
OTHERS = {
    "Device",
    "DEVICE",
    "Q8_W",
    "llama_model_rope_type",
    "OP",
    "your_op",
    "hinge",
    "cube_back",
}
NOT_OURS = {"ggml-common.h", "ggml-quants.c", "ggml.h", "conversion/NAME.py"}
NOT_OURS |= {"lora/objectives/hinge.py", "tests/golden/llama_cpp/NAME.npz"}


@pytest.mark.parametrize("page", GUIDES, ids=lambda p: p.stem)
def test_what_a_guide_names_is_there(page, there):
    """Its files, and each name in code type somewhere in the code."""
    said = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    codes = re.findall(r"`([^`\n]+)`", said)
    files = {
        f for code in codes for f in re.findall(r"[\w/-]+\.(?:py|npz|json|md|toml|c|h)\b", code)
    }
    has, known = there
    missing = [f for f in files - NOT_OURS if not any(f"/{p}".endswith(f"/{f}") for p in has)]
    words = {w for code in codes for w in re.findall(r"(?<![\w.-])[A-Za-z_]\w+(?!\w*\.)", code)}
    missing += words - known - OTHERS
    assert not missing
