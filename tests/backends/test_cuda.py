"""The card's kernels without a card: they compile, and what is missing is said."""

import re
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
from card_patterns import patterns, sample_of
from extras import need, needs_compiler
from processes import printed

from pyggml.backends.cpu import CPU
from pyggml.backends.cuda import cards, open_cuda
from pyggml.backends.cuda.runtime.capability import SHARED_KIB
from pyggml.errors import ConfigError, DeviceError
from pyggml.graph import Graph
from pyggml.graph.dtypes import DTYPES
from pyggml.graph.tensor import as_leaf
from pyggml.ops import OPS
from pyggml.runtime import Devices, bind, schedule
from pyggml.runtime.choice import WANTED, backends_of


def test_the_package_does_not_import_numba_cuda():
    code = "import sys, pyggml, pyggml.model; sys.exit('numba.cuda' in sys.modules)"
    printed(code)


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


def launches_of(op, device):
    """The launches that the device binds an op's samples to, each with its shared memory."""
    for sample in op.samples(np.random.default_rng(5)):
        node = op(*map(as_leaf, sample.arrays), **sample.params)
        if device.refusal(node) is None:
            program = bind(schedule(Graph.of(node), Devices([device, CPU()])))
            for call in program.kernels[device].values():
                yield from with_shared_bytes(call)


def with_shared_bytes(call):
    """(kernel, arguments) of a call's launches, and the bytes of dynamic shared memory of each."""
    from pyggml.backends.cuda.runtime.launches import launches, steps

    for step in steps(call):
        for launched in launches(step):
            yield launched, step.arguments[1][3]


_ASSEMBLED = set()  # (kernel, types, whether for a card before Hopper)
_COMPILED = defaultdict(dict)  # so of device functions, which Numba compiles for one card


@pytest.fixture
def compiled_for(monkeypatch):
    """compiled_for(is_early): from then on device functions are those for cards before Hopper, or
    for later ones; those that there were before are back afterwards."""
    from numba.cuda.dispatcher import CUDADispatcher

    before, compile_device = {}, CUDADispatcher.compile_device

    def choose(is_early):
        def compile_here(function, *types):
            before.setdefault(function, function.overloads)
            function.overloads = _COMPILED[is_early].setdefault(function, {})
            return compile_device(function, *types)

        monkeypatch.setattr(CUDADispatcher, "compile_device", compile_here)

    yield choose
    for function, overloads in before.items():
        function.overloads = overloads


@pytest.fixture(params=SHARED_KIB, ids=lambda c: f"{c[0]}.{c[1]}")
def compiles(request, monkeypatch, compiled_for):
    """A check that launches for a card of this compute capability compile, and are assembled for
    it: the assembler refuses instructions of later ones. They ask for no more than it has."""
    need("numba_cuda")
    from numba.cuda import dispatcher, types
    from numba.cuda.cudadrv.driver import _Linker
    from numba.cuda.typing.typeof import typeof

    from pyggml.backends.cuda.gemm import few_rows
    from pyggml.backends.cuda.runtime.driver import cuda

    needs_compiler()
    block, whole = (n << 10 for n in SHARED_KIB[request.param])
    card = SimpleNamespace(
        compute_capability=request.param,
        MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=block,
        MAX_SHARED_MEMORY_PER_MULTIPROCESSOR=whole,
    )
    for module in (dispatcher, cuda):
        monkeypatch.setattr(module, "get_current_device", lambda: card)
    few_rows.shared_bytes.cache_clear()
    is_early = request.param < (9, 0)
    compiled_for(is_early)
    alike = [c for c in SHARED_KIB if c < (9, 0)] if is_early else [(9, 0, "a")]  # as Numba does

    def check(launched, name):
        assert launched, f"{name}: nothing is launched"
        for (kernel, arguments), n_bytes in launched:
            assert n_bytes <= block, f"{name} asks for {n_bytes} bytes of shared memory"
            signature = types.void(*(typeof(a) for a in arguments))
            if (kernel, signature, is_early) not in _ASSEMBLED:
                _ASSEMBLED.add((kernel, signature, is_early))
                ptx, _ = cuda.compile(
                    kernel.py_func, signature, device=False, abi="numba", cc=alike[0]
                )
                assert ".entry" in ptx, name
                for capability in alike:
                    assembler = _Linker(max_registers=0, cc=capability, lto=False)
                    assembler.add_ptx(ptx.encode())
                    assert assembler.complete().code, name

    yield check
    few_rows.shared_bytes.cache_clear()


def test_every_kernel_compiles_for_cards_of_each_capability(dry, compiles):
    for name in sorted(dry._kernels):
        compiles(list(launches_of(OPS[name], dry)), name)


def test_every_kernel_of_an_op_of_the_card_s_own_compiles_too(dry, compiles, monkeypatch):
    """Products are cuBLAS's, which is not called; nor is what is launched while nodes are bound."""
    from pyggml.backends.cuda.gemm import cublas
    from pyggml.backends.cuda.runtime import launches
    from pyggml.backends.cuda.runtime.kernel import OWN_OPS

    monkeypatch.setattr(cublas, "_library", lambda: SimpleNamespace(gemm_ex=None))
    monkeypatch.setattr(cublas, "_handles", lambda stream: iter([(0, np.zeros(1, np.uint8))] * 9))
    monkeypatch.setattr(launches, "_launch", lambda *_: None)
    assert OWN_OPS
    for name, op in sorted(OWN_OPS.items()):
        calls = list(launches_of(op, dry))
        if not name.startswith("gradient_of_"):  # which cuBLAS computes
            compiles(calls, name)


def test_patterns_compile_for_cards_of_each_capability(dry, compiles):
    for name in patterns().keys() - {"mul_mat+scale", "out_prod+scale"}:  # which cuBLAS computes
        program = bind(schedule(sample_of(name)[0], Devices([dry, CPU()])))
        calls = program.kernels[dry].values()  # not one, where the fused one needs clusters
        compiles([one for call in calls for one in with_shared_bytes(call)], name)


def test_placing_at_once_compiles_for_cards_of_each_capability(compiles, monkeypatch):
    from pyggml.backends.cuda.runtime.driver import cuda
    from pyggml.backends.cuda.weights.unpack import Thin, place_thin, placed_at_once

    monkeypatch.setattr(cuda, "to_device", lambda array: array)
    thin, out = np.zeros(512, np.float32), np.zeros(4096, np.uint16)
    calls = [place_thin(out[i:], thin[i:], Thin(4, 16, 0, 16, 8, 16), None) for i in (0, 64)]
    compiles(list(with_shared_bytes(placed_at_once(calls, None))), "placed at once")


def test_products_of_a_dozen_rows_compile_for_cards_of_each_capability(compiles):
    """After a norm; the samples of ops are too narrow for them."""
    from pyggml.backends.cuda.gemm import few_rows, packed_tiles

    (n, k), rows, dtype = (64, 1024), 9, DTYPES["Q8_0"]
    w = np.zeros(n * dtype.row_bytes(k), np.uint8)
    out, a = np.zeros(rows * n, np.float32), np.zeros(rows * k, np.float32)
    part = few_rows.FewRowsProduct(out, w, dtype, n)
    norm = few_rows.FusedNorm(a, np.float32(1e-6), a, False)
    call = packed_tiles.products([part], a, rows, k, None, norm)
    compiles(list(with_shared_bytes(call)), "packed tiles")
