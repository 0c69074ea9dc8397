"""Weights that a training pass has read leave the process's memory and come back unchanged."""

import mmap
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from pyggml import gguf
from pyggml.backends.cpu import pages
from pyggml.graph import Graph
from pyggml.graph.dtypes import F16, F32
from pyggml.graph.tensor import leaf
from pyggml.ops import mul_mat
from pyggml.runtime import Devices, bind, schedule

pytestmark = pytest.mark.quick

HUGE = Path("/sys/kernel/mm/transparent_hugepage")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's madvise")


def mapping(path):
    """What the system says of the maps of a file: name -> words, of each map."""
    found = []
    with Path("/proc/self/smaps").open() as lines:
        for line in lines:
            name, *words = line.split()
            if "-" in name:
                inside = words[-1:] == [str(path)]
                found += [{}] * inside
            elif inside:
                found[-1] = found[-1] | {name.rstrip(":"): words}
    return found


def resident(path):
    """Bytes of a mapped file that count as this process's memory."""
    return sum(1024 * int(each["Rss"][0]) for each in mapping(path))


@pytest.fixture
def stored(tmp_path, rng):
    """A file with two matrices of 4 MB, and what is in them."""
    arrays = {name: rng.standard_normal((1024, 2048)).astype(np.float16) for name in "ab"}
    path = tmp_path / "weights.gguf"
    metadata = {"general.architecture": "none"}
    gguf.write(path, metadata, [(n, F16, a.shape, a) for n, a in arrays.items()])
    return path, arrays


def test_pages_go_and_come_back(stored):
    path, arrays = stored
    with gguf.open(path) as file:
        a, b = file.data("a"), file.data("b")
    np.testing.assert_array_equal(a, arrays["a"])
    np.testing.assert_array_equal(b, arrays["b"])
    assert resident(path) >= a.nbytes + b.nbytes
    pages.release(a)()
    assert b.nbytes - (1 << 17) < resident(path) < b.nbytes + (1 << 17)
    np.testing.assert_array_equal(a, arrays["a"])


@pytest.mark.skipif(not HUGE.exists(), reason="a kernel without huge pages")
def test_a_file_may_be_read_in_huge_pages(stored):
    with gguf.open(stored[0]) as file:
        a = file.data("a")
        (only,) = mapping(stored[0])
    assert a.nbytes and "hg" in only["VmFlags"]


def test_a_kernel_without_huge_pages_reads_small_ones(stored, monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)
    path, arrays = stored
    with gguf.open(path) as file:
        np.testing.assert_array_equal(file.data("a"), arrays["a"])


def test_what_is_not_mapped_small_or_writable_is_left_alone(stored):
    with gguf.open(stored[0]) as file:
        a = file.data("a")
    assert pages.release(a[:8]) is None
    assert pages.release(np.array(a)) is None
    assert pages.release(np.frombuffer(bytes(1 << 20), np.uint8)) is None
    assert pages.release(a[:512]) is not None


def test_a_program_lets_go_of_weights_only_if_told_to(stored, rng):
    path, _ = stored
    with gguf.open(path) as file:
        w = leaf(file.data("a"), "a", F16)
    x = leaf(rng.standard_normal((40, 2048)).astype(np.float32), "x", F32)
    found, left = [], []
    for release in (False, True):
        y = mul_mat(w, x)
        program = bind(schedule(Graph.of(y), Devices()), release=release)
        program()
        left.append(resident(path))
        program()
        found.append(np.array(y.data))
    np.testing.assert_array_equal(*found)
    assert left[0] >= w.n_bytes > 16 * left[1]


def test_training_lets_go_of_weights_where_memory_is_scarce():
    free = psutil.virtual_memory().available
    assert pages.are_scarce(free) and not pages.are_scarce(free // 4)
