"""Numba's CUDA, imported here before all else.

Under NUMBA_ENABLE_CUDASIM=1 Python threads run the kernels: `SIMULATED`, see simulator.py.
"""

import importlib
import warnings
from contextlib import suppress

import numpy as np

__all__ = ["SIMULATED", "cuda"]

# Its own .pth does this where packages lie in site-packages, not where they lie on PYTHONPATH.
with suppress(ImportError):
    importlib.import_module("_numba_cuda_redirector")
# numba-cuda 0.30 names it when imported, NumPy 2.5 has dropped it.
vars(np).setdefault("row_stack", np.vstack)

# Hence these imports come after the lines above, not at the top.
with warnings.catch_warnings():  # it makes a time without a unit, which NumPy 2.5 deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from numba import config, cuda

SIMULATED = bool(config.ENABLE_CUDASIM)
if not SIMULATED:  # a kernel for one row has one block
    vars(importlib.import_module("numba.cuda.core.config"))["CUDA_LOW_OCCUPANCY_WARNINGS"] = 0
