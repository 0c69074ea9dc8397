"""The compute capability that kernels are made for: a card's own, or an earlier one by a setting.

PYGGML_CUDA_CAPABILITY=8.6 in the environment makes a card stand for one of compute capability 8.6:
PTX is made for that, which the assembler refuses if it holds a later instruction, and is assembled
for the card; blocks have no more shared memory than there. cuBLAS is that of the card.
"""

import importlib
import os
from functools import partial
from typing import Any

from pyggml.errors import ConfigError

ENVIRONMENT = "PYGGML_CUDA_CAPABILITY"
Capability = tuple[int, int]
# KiB of shared memory, of a block and of a multiprocessor, as CUDA's programming guide has them.
SHARED_KIB = {(8, 0): (163, 164), (8, 6): (99, 100), (8, 9): (99, 100), (9, 0): (227, 228)}


def most() -> Capability | None:
    """The latest compute capability that kernels may be made for; None for that of the card.

    Raises ConfigError if the setting names another one than those of SHARED_KIB.
    """
    word = os.environ.get(ENVIRONMENT, "")
    by_word = {f"{major}.{minor}": (major, minor) for major, minor in SHARED_KIB}
    if word and word not in by_word:
        raise ConfigError(f"{ENVIRONMENT}={word}: known are {', '.join(by_word)}")
    return by_word.get(word)


def own_of(card: Any) -> Capability:
    """The compute capability of Numba's Device itself, whatever it stands for."""
    major, minor = vars(card).get("own_capability", card.compute_capability)
    return major, minor


def hold_back(card: Any) -> None:
    """Let Numba's Device stand for one of the capability that the setting names, if it is later."""
    cap = most()
    if cap is None or cap >= (own := own_of(card)):
        return
    block, whole = (n << 10 for n in SHARED_KIB[cap])
    card.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = min(block, card.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    card.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = min(
        whole, card.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
    )
    card.own_capability, card.compute_capability = own, cap
    assembling: Any = importlib.import_module("numba.cuda.cudadrv.driver")
    assembling._Linker = partial(_linker, assembling._Linker, own)


def _linker(make: Any, own: Capability, *, cc: Any = None, **options: Any) -> Any:
    """Numba's assembler, for the card's own capability in place of `cc`."""
    return make(cc=own, **options)
