"""A loop that is shared out, for tests in processes of their own."""

from pyggml.jit import parallel, prange


@parallel
def double(y, x):
    """y = 2x, row by row."""
    for r in prange(x.shape[0]):
        for c in range(x.shape[1]):
            y[r, c] = 2 * x[r, c]
