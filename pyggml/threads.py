"""How many threads the kernels use.

from pyggml import threads

threads.set(2)  # from now on
threads.get()  # 2
threads.most()  # all cores that this process has, or NUMBA_NUM_THREADS if that is less
threads.set(0)  # that many
"""

from warnings import warn

from pyggml.jit import pool
from pyggml.jit.cores import n_cores as most

__all__ = ["get", "most", "set"]


def get() -> int:
    """How many threads parallel kernels use."""
    return pool.active()


def set(n: int) -> None:
    """Use n threads from now on, at most most(), of which more warn; 0: all. ValueError for
    fewer."""
    if n < 0:
        raise ValueError(f"{n} threads, wanted 1 to {most()}, or 0 for all")
    if n > most():
        said = f"{n} threads were asked for: {most()} are used, all that this process has"
        warn(said, RuntimeWarning, stacklevel=2)
    pool.use(min(n or most(), most()))
