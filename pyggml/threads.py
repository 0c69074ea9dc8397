"""How many threads the kernels use.

from pyggml import threads

threads.set(2)  # from now on
threads.get()  # 2
threads.most()  # what this process was started with: all cores, or NUMBA_NUM_THREADS
threads.set(0)  # that many
"""

import warnings

import numba
from numba.core import config

from pyggml.jit import JIT

__all__ = ["get", "most", "set"]


def get() -> int:
    """How many threads parallel kernels use."""
    return int(numba.get_num_threads())


def most() -> int:
    """The most threads that this process can use; scratch of each thread is planned for these."""
    return int(config.NUMBA_NUM_THREADS)


def set(n: int) -> None:
    """Use n threads from now on, at most most(); 0: all.

    Warns where Numba found its slow thread layer only.
    """
    numba.set_num_threads(min(n or most(), most()))
    if JIT and numba.threading_layer() == "workqueue":
        warnings.warn(
            "Numba found neither OpenMP nor TBB, so small parallel kernels will be slow: "
            "install libomp (macOS) or the package tbb",
            RuntimeWarning,
            stacklevel=2,
        )
