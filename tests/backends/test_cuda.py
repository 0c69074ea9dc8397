"""The card's kernels without a card: they compile, and what is missing is said."""

import re
import subprocess
import sys

import numpy as np
import pytest
from card_patterns import patterns, sample_of
from extras import need

from pyggml.backends.cpu import CPU
from pyggml.backends.cuda import cards, open_cuda
from pyggml.errors import ConfigError, DeviceError
from pyggml.graph import Graph
from pyggml.graph.tensor import as_leaf
from pyggml.ops import OPS
from pyggml.runtime import Devices, bind, schedule
from pyggml.runtime.choice import WANTED, backends_of

CAPABILITY = (9, 0)


def test_the_package_does_not_import_numba_cuda():
    code = "import sys, pyggml, pyggml.model; sys.exit('numba.cuda' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def has_card():
    try:
        return bool(cards())
    except DeviceError:
        return False


@pytest.mark.quick
@pytest.mark.skipif(has_card(), reason="there is a card")
def test_a_missing_card_is_one_sentence():
    with pytest.raises(DeviceError, match=r"no CUDA device: .*, wanted") as error:
        open_cuda()
    assert backends_of("auto") == backends_of("cpu") == []
    with pytest.raises(DeviceError, match=re.escape(str(error.value))):
        backends_of("cuda:1")


@pytest.mark.parametrize("word", ["gpu", "cuda:x", "cuda:-1", "cpu:0", "webgpu:1", "auto:1", ""])
def test_a_word_that_names_no_device(word):
    with pytest.raises(ConfigError, match=f"device is .*, {WANTED}"):
        backends_of(word)


# -- machine code without a card ----------------------------------------------------------------


@pytest.fixture
def dry(request):
    need("numba_cuda")
    request.getfixturevalue("without_cublas")
    from dry_card import DryCard

    return DryCard()


def launches_of(name, device):
    """The launches that the device binds an op's samples to."""
    from pyggml.backends.cuda.runtime.launches import launches

    for sample in OPS[name].samples(np.random.default_rng(5)):
        sources = [as_leaf(a) for a in sample.arrays]
        node = OPS[name](*sources, **sample.params)
        if device.refusal(node) is None:
            program = bind(schedule(Graph.of(node), Devices([device, CPU()])))
            for call in program.kernels[device].values():
                yield from launches(call)


def needs_compiler():
    """Skip unless NVIDIA's compilers are there, which come with pyggml[cuda]."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        load_nvidia_dynamic_lib("nvrtc"), load_nvidia_dynamic_lib("nvvm")
    except DynamicLibNotFoundError:
        pytest.skip("NVIDIA's compilers are not found")


@pytest.fixture
def compiles(monkeypatch):
    """A check that launches compile to PTX."""
    from numba.cuda import dispatcher, types
    from numba.cuda.typing.typeof import typeof

    from pyggml.backends.cuda.runtime.driver import cuda

    needs_compiler()
    card = type("Card", (), {"compute_capability": CAPABILITY})
    monkeypatch.setattr(dispatcher, "get_current_device", card)
    done = set()

    def check(launched, name):
        assert launched, f"{name}: nothing is launched"
        for kernel, arguments in launched:
            signature = types.void(*(typeof(a) for a in arguments))
            if (kernel, signature) not in done:
                done.add((kernel, signature))
                ptx, _ = cuda.compile(
                    kernel.py_func, signature, device=False, abi="numba", cc=CAPABILITY
                )
                assert ".entry" in ptx, name

    return check


def test_every_kernel_compiles_to_ptx(dry, compiles):
    for name in sorted(dry._kernels):
        compiles(list(launches_of(name, dry)), name)


def test_patterns_compile_to_ptx(dry, compiles):
    from pyggml.backends.cuda.runtime.launches import launches

    for name in patterns().keys() - {"mul_mat+scale", "out_prod+scale"}:  # which cuBLAS computes
        program = bind(schedule(sample_of(name)[0], Devices([dry, CPU()])))
        calls = {node.op.name: call for node, call in program.kernels[dry].items()}
        compiles(list(launches(calls[name])), name)
