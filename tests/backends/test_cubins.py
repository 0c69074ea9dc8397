"""Compiled kernels of cards on disk: found again, told apart, made anew where one is not whole."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from extras import reason
from processes import printed

pytest.importorskip("numba_cuda", reason=reason("numba_cuda"))

from failing_card import of_package, raising

from pyggml.backends.cuda.code import jit
from pyggml.backends.cuda.runtime import cubins, driver, failures
from pyggml.backends.cuda.runtime.cubins import Cubins, description_of

DIGESTS = """
import hashlib, json
from pyggml.backends.cuda.attention.decode import _Shape, _attend
from pyggml.backends.cuda.runtime.cubins import description_of
from pyggml.backends.cuda.gemm import few_rows
from pyggml.backends.cuda.gemm.packed_dots import DotShape
from pyggml.backends.cuda.weights.packed import unit_of
from pyggml.backends.cuda.code.formulas import device_formula
from pyggml.ops import OPS
from pyggml.backends.cuda.weights.readers import four_of
kinds = [
    DotShape(unit_of(n, 256), 1, 1, False, True, True, False) for n in ("Q8_0", "Q4_K", "Q6_K")
]
found = [device_formula(OPS[name].formula) for name in ("silu_back", "gelu_back")]
found += [four_of(name) for name in ("Q4_K", "Q6_K", "IQ2_XS")]
found += [few_rows._kernel((kind,), True, False) for kind in kinds]
found += [_attend(_Shape(128, "F16", 2, 1, False, True, True, False, 4, 8, False))]
texts = [json.dumps(description_of(k)) for k in found]
print([hashlib.sha256(t.encode()).hexdigest() for t in texts])
"""


def test_a_kernel_is_described_alike_in_every_process(monkeypatch):
    found = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.append(printed(DIGESTS))
    assert found[0] == found[1]
    assert len(set(found[0].split(","))) == 9


def scaling(by):
    def kernel(y, x):
        y[0] = by * x[0]

    return kernel


def test_what_a_kernel_closes_over_is_in_its_description():
    def with_helper(helper):
        def kernel(y):
            y[0] = helper(y[0])

        return kernel

    same, other = description_of(scaling(2.0)), description_of(scaling(3.0))
    assert json.dumps(same) == json.dumps(description_of(scaling(2.0))) != json.dumps(other)
    assert description_of(scaling(2)) != same, "2 and 2.0 make different code"
    helpers = [jit.device(scaling(by)) for by in (2.0, 3.0, 2.0)]
    first, second, third = (description_of(with_helper(h)) for h in helpers)
    assert first == third != second
    with pytest.raises(TypeError, match="no plain value"):
        description_of(scaling(object()))


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A function's store on a card of this capability, whose kernels are (name, code, types)."""
    monkeypatch.setattr(cubins, "_folder", lambda: tmp_path / "kept")
    card = SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr(cubins, "get_current_device", lambda: card)
    monkeypatch.setattr(cubins, "kernel_of", lambda *found: found)
    return SimpleNamespace(card=card, folder=tmp_path / "kept")


def compiled(name, code):
    library = SimpleNamespace(get_cubin=lambda: SimpleNamespace(code=code))
    return SimpleNamespace(
        entry_name=name, library=library, cooperative=False, launch_config_sensitive=False
    )


def test_a_kernel_that_was_kept_is_found(store):
    kept = Cubins(scaling(2.0))
    assert kept.load_overload(("float32",), None) is None
    kept.save_overload(("float32",), compiled("scaled", b"code\n\0more"))
    again = Cubins(scaling(2.0))
    assert again.load_overload(("float32",), None) == ("scaled", b"code\n\0more", ("float32",))
    assert again.load_overload(("float64",), None) is None, "of other types"
    assert Cubins(scaling(3.0)).load_overload(("float32",), None) is None
    store.card.compute_capability = (8, 0)
    assert again.load_overload(("float32",), None) is None, "of another card"


@pytest.mark.parametrize(
    "spoilt", [b"", b"{}\n", b"[1]\ncode", b"no json\ncode", b'{"sha256": 1}', None]
)
def test_a_file_that_is_not_whole_is_made_anew(store, spoilt):
    kept = Cubins(scaling(2.0))
    kept.save_overload((), compiled("scaled", b"code"))
    (file,) = store.folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1] if spoilt is None else spoilt)
    assert kept.load_overload((), None) is None
    kept.save_overload((), compiled("scaled", b"code"))
    assert kept.load_overload((), None) == ("scaled", b"code", ())


@pytest.mark.parametrize("name, raises", [("INVALID_IMAGE", False), ("ILLEGAL_ADDRESS", True)])
def test_a_kernel_that_is_not_taken_is_made_anew_unless_the_card_is_lost(
    store, monkeypatch, name, raises
):
    kept = Cubins(scaling(2.0))
    kept.save_overload((), compiled("scaled", b"code"))
    monkeypatch.setattr(cubins, "kernel_of", raising(of_package("cuda", f"CUDA_ERROR_{name}: no")))
    monkeypatch.setattr(failures, "driver", SimpleNamespace(cuCtxSynchronize=lambda: None))
    with pytest.raises(Exception, match=name) if raises else nullcontext():
        assert kept.load_overload((), None) is None


def test_a_disk_that_takes_nothing_is_no_fault(store):
    store.folder.write_text("a file where the folder should be")
    kept = Cubins(scaling(2.0))
    kept.save_overload((), compiled("scaled", b"code"))
    assert kept.load_overload((), None) is None


def test_each_card_allows_a_kernel_its_shared_memory(monkeypatch):
    """Numba loads a kernel on a further card when it is launched there, and asks no store."""
    from numba.cuda import codegen

    told, current = [], [0]

    def loaded(*_):
        function = SimpleNamespace(handle=f"kernel on {current[0]}")
        return SimpleNamespace(get_function=lambda name: function)

    def context():
        card = SimpleNamespace(id=current[0], compute_capability=(9, 0))
        return SimpleNamespace(device=card, create_module_image=loaded)

    def tell(attribute, value, kernel, card):
        told.append((int(attribute), value, kernel, card))

    monkeypatch.setattr(codegen, "devices", SimpleNamespace(get_context=context))
    monkeypatch.setattr(driver, "driver", SimpleNamespace(cuKernelSetAttribute=tell))
    library = codegen.CUDACodeLibrary(None, "multiply", entry_name="multiply")
    library._cubin_cache[9, 0, "a"] = "code"
    kernel = SimpleNamespace(_codelibrary=library)
    assert Cubins(scaling(2.0), 70_000)._ready(kernel) is kernel
    for card in (0, 1, 1, 0):
        current[0] = card
        assert library.get_cufunc().handle == f"kernel on {card}"
    assert told == [(a, n, f"kernel on {c}", c) for c in (0, 1) for a, n in ((8, 70_000), (9, 100))]
