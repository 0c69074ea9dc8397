"""A card that stands for one of an earlier compute capability."""

import re
from types import SimpleNamespace

import pytest
from extras import reason

pytest.importorskip("numba_cuda", reason=reason("numba_cuda"))

from pyggml.backends.cuda import cards
from pyggml.backends.cuda.runtime import capability, driver
from pyggml.backends.cuda.runtime.simulator import HAS_PTX
from pyggml.errors import ConfigError

KIB = 1 << 10


@pytest.fixture
def card(monkeypatch):
    """Of compute capability 9.0; what it assembles is (capability, options)."""
    if HAS_PTX:
        from numba.cuda.cudadrv import driver as numbas

        monkeypatch.setattr(numbas, "_Linker", lambda cc, **options: (cc, options))
    return SimpleNamespace(
        compute_capability=(9, 0),
        MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=227 * KIB,
        MAX_SHARED_MEMORY_PER_MULTIPROCESSOR=228 * KIB,
    )


@pytest.mark.skipif(not HAS_PTX, reason="the simulator assembles nothing")
@pytest.mark.parametrize("word, block, whole", [("8.0", 163, 164), ("8.6", 99, 100)])
def test_a_card_stands_for_an_earlier_one(card, monkeypatch, word, block, whole):
    from numba.cuda.cudadrv import driver as numbas

    monkeypatch.setenv(capability.ENVIRONMENT, word)
    capability.hold_back(card)
    assert ".".join(map(str, card.compute_capability)) == word
    assert block * KIB == card.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    assert whole * KIB == card.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
    made = numbas._Linker(max_registers=0, cc=(8, 0, ""), lto=False)
    assert made == ((9, 0), {"max_registers": 0, "lto": False}), "code is the card's own"
    monkeypatch.setattr(driver, "driver", SimpleNamespace(
        get_device=lambda _: card, cuDeviceTotalMem=lambda _: 80
    ))  # fmt: skip
    card.name, card.id = "NVIDIA H100", 0
    if HAS_PTX:
        assert driver.description_of(0)[1] == (9, 0), "the driver finds what is there"


@pytest.mark.parametrize("word", ["", "9.0"])
def test_a_card_stands_for_itself_unless_it_is_later(card, monkeypatch, word):
    monkeypatch.setenv(capability.ENVIRONMENT, word)
    before = dict(vars(card))
    capability.hold_back(card)
    assert vars(card) == before


def test_a_capability_that_is_not_known(monkeypatch):
    monkeypatch.setenv(capability.ENVIRONMENT, "7.5")
    wanted = "PYGGML_CUDA_CAPABILITY=7.5: known are 8.0, 8.6, 8.9, 9.0"
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        cards()
