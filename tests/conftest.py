"""Kernels under test check their array bounds, and passes their graphs; no test fails by chance or
because others compute.

Hypothesis tries the same examples in every run, without a deadline: kernels compile. Others are
tried with `pytest --hypothesis-profile=others`, and twenty times as many with `thousands`.
"""

import os

os.environ.setdefault("NUMBA_BOUNDSCHECK", "1")  # before anything imports numba
os.environ.setdefault("PYGGML_VERIFY", "1")  # also for the commands that tests start

import gc
import re
import signal
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from extras import summary, wants_extra
from hypothesis import HealthCheck, settings

# Files of tests need not outlive a loss of power, and a disk takes milliseconds to write each. What
# tests start in other processes waits for the disk, as it does for users.
os.fsync = lambda handle: None

PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **PATIENT)
settings.register_profile("others", **PATIENT)
settings.register_profile("thousands", max_examples=2000, **PATIENT)
settings.load_profile("same")

QUICK = re.compile(
    r"\b(mark\.quick|cases\()"
)  # what a file has whose tests are among the quick ones
HERE = Path(__file__).parent
# What tests start imports the checkout, as they do (pythonpath in pyproject.toml).
PATHS = [str(HERE.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(PATHS))
# Of a whole run: two cores are busy also while a test waits for a disk, a clock or another process.
N_WORKERS = 3
# Files that take a minute each where kernels are compiled anew: the first, so that all processes of
# a whole run end at the same time.
LONG_FILES = (
    "test_every_op.py",
    "kernels/gemm/test_isa.py",
    "test_guard_pages.py",
    "test_lessons.py",
    "backends/test_webgpu.py",
    "backends/test_webgpu_models.py",
    "lora/test_ranks.py",
    "backward/test_full_model.py",
)
GRADIENTS = pytest.StashKey[Counter]()
N_BLOCKS = 512  # of each type of weights, that tests draw theirs from
SKIPPED = "pyggml/skipped"  # in pytest's cache: what a whole run skipped for want of an extra


def pytest_addoption(parser):
    about = "run only what the last run of all tests skipped for want of an extra"
    parser.addoption("--skipped", action="store_true", help=about)


def skipped_before(config):
    """Tests and files that were skipped, by their node ids; None: all tests are wanted."""
    return set(config.cache.get(SKIPPED, [])) if config.getoption("skipped") else None


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """The whole suite runs in N_WORKERS processes, each file in one of them, unless -n is given.

    Kernels use all threads there as elsewhere: tests that compare threads have some.
    """
    option = config.option
    if hasattr(config, "workerinput"):  # this is one of them
        return
    xdist = config.pluginmanager.hasplugin("xdist") and os.cpu_count() > 1
    if xdist and option.numprocesses is None and is_whole(config):
        option.numprocesses = N_WORKERS
        option.dist, option.loadscopereorder = "loadfile", False


def is_whole(config):
    """Whether a command wants every test, and nothing of one process, such as a debugger."""
    option = config.option
    return (
        [Path(path).resolve() for path in config.args] == [HERE]
        and option.markexpr == "not interop and not slow and not clients"
        and not (option.keyword or option.collectonly or option.usepdb or option.capture == "no")
    )


def pytest_configure(config):
    config.stash[GRADIENTS] = Counter()
    gc.set_threshold(100_000)  # with Python's 700, parsing the sources takes three times as long
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell, and then
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in all that tests start


def pytest_ignore_collect(collection_path, config):
    """`pytest -m quick` does not even import the files that none of its tests are in, nor does
    `pytest --skipped`."""
    skipped = skipped_before(config)
    if skipped is not None and collection_path.name.startswith("test_"):
        name = collection_path.relative_to(config.rootpath).as_posix()
        return not any(each.partition("::")[0] == name for each in skipped) or None
    if config.option.markexpr == "quick" and collection_path.name.startswith("test_"):
        return not QUICK.search(collection_path.read_text("utf-8")) or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Nor does it make items of functions none of whose parameters are among its tests."""
    if collector.config.option.markexpr == "quick" and name.startswith("test_"):
        return None if any(map(is_quick, marks_of(collector.module) + marks_of(obj))) else []
    return None


def marks_of(thing):
    marks = getattr(thing, "pytestmark", [])
    return marks if isinstance(marks, list) else [marks]


def is_quick(mark):
    """Whether this is the mark, or that of parameters some of which have it."""
    if mark.name == "parametrize":
        return any(m.name == "quick" for p in mark.args[1] for m in getattr(p, "marks", ()))
    return mark.name == "quick"


def pytest_collection_modifyitems(config, items):
    skipped = skipped_before(config)
    if skipped is not None:
        items[:] = [i for i in items if {i.nodeid, i.nodeid.partition("::")[0]} & skipped]
    first = {HERE / file: n for n, file in enumerate(LONG_FILES)}
    assert all(path.is_file() for path in first), "LONG_FILES names a file that is not there"
    items.sort(key=lambda item: first.get(item.path, len(first)))


def pytest_collection_finish():
    """What was imported and collected stays: the garbage collector need not look through it."""
    gc.freeze()


def pytest_sessionfinish(session):
    """Nor through what the quick tests leave when Python ends, which took 2.5 s."""
    if session.config.option.markexpr == "quick":
        gc.freeze()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["gradients"] = dict(session.config.stash[GRADIENTS])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """What one of the processes has compared counts here."""
    node.config.stash[GRADIENTS].update(getattr(node, "workeroutput", {}).get("gradients", {}))


@pytest.fixture(scope="module", autouse=True)
def young_heap():
    """What earlier files left, compiled code above all, stays: no garbage collector of a later one
    looks through it. A run of training collects four times."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def gradients(request):
    """Op name -> how many of its gradients were compared with a slope in this session."""
    return request.config.stash[GRADIENTS]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    compared = config.stash[GRADIENTS]
    if compared:
        terminalreporter.write_line(
            f"gradients compared: {compared.total()} over {len(compared)} ops"
        )
    skipped = terminalreporter.getreports("skipped")
    keeps = config.pluginmanager.hasplugin("cacheprovider")
    if keeps and is_whole(config) and not config.getoption("skipped"):
        of_extras = [r.nodeid for r in skipped if wants_extra(r.longrepr[2])]
        config.cache.set(SKIPPED, of_extras)
    for line in summary(report.longrepr[2] for report in skipped):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def shared():
    """The folder of models, vocabularies and golden values that lies beside a checkout."""
    folder = Path(__file__).parents[1] / "../shared"
    if not folder.is_dir():
        pytest.skip("../shared (models, vocabularies, golden values) is not there")
    return folder


@pytest.fixture(scope="session")
def speaking(tmp_path_factory):
    """Path of a tiny model with a vocabulary."""
    from tiny_models import TOKENS, VOCABULARY, write_llama

    path = tmp_path_factory.mktemp("speaking") / "m.gguf"
    return write_llama(path, len(TOKENS), n_layer=1, seed=1, keys=VOCABULARY)


@pytest.fixture
def rng():
    """The same numbers in every run."""
    import numpy as np

    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def some_weight():
    """some_weight(rng, shape, type name): the bytes of normal numbers packed as this type, blocks
    drawn from a few, as packing takes its time.

    Of types that nothing packs all bits are random, but for a scale that makes weights near one.
    """
    import numpy as np

    from pyggml.quants import NoPack, quant, quantize

    @cache
    def blocks(name):
        numbers = np.random.default_rng(0).standard_normal((N_BLOCKS, quant(name).dtype.block))
        return quantize(numbers.astype(np.float32), name)

    def make(rng, shape, name):
        d = quant(name).dtype
        if not isinstance(quant(name).pack, NoPack):
            drawn = rng.integers(0, N_BLOCKS, (*shape[:-1], shape[-1] // d.block))
            return blocks(name)[drawn].reshape(*shape[:-1], -1)
        raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // d.block, d.block_bytes), np.uint8)
        if name == "IQ1_M":  # the top 4 bits of four uint16 are the half 0.01
            raw[..., 49::2] = (raw[..., 49::2] & 15) | np.array([0xF0, 0x10, 0x10, 0x20], np.uint8)
        else:
            raw[..., :2] = np.array([0.01], np.float16).view(np.uint8)
        return raw.reshape(*shape[:-1], d.row_bytes(shape[-1]))

    return make
