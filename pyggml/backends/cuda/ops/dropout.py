"""Random draws of training, the host's numbers: dropout and noise."""

import numpy as np

from pyggml.backends.cuda.code.formulas import device_formula
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.ops.arithmetic.dropout import KEEP, NOISY, philox_words, quarters, share_kept

_LOW = np.uint64(0xFFFFFFFF)
_words = device(philox_words)
_EIGHT = np.uint64(8)


@device
def philox(column, row, stream, draw):
    """Four random words, uint64 below 2^32, of a column in a quarter of a row."""
    k0, k1, n = np.uint64(draw[0]) & _LOW, np.uint64(draw[1]) & _LOW, np.uint64(draw[2]) & _LOW
    return _words(np.uint64(column), np.uint64(row), stream, n, k0, k1)


_keep, _noisy = device_formula(KEEP), device_formula(NOISY)


@kernel
def _dropout(out, x, draw, stream, least, grown, n, quarter):
    """A thread draws the words of one column of all four quarters of a row."""
    for i in range(cuda.grid(1), out.size // n * quarter, cuda.gridsize(1)):
        row, column = i // quarter, i % quarter
        words = philox(column, row, stream, draw)
        for w in range(4):
            j = w * quarter + column
            if j < n:
                at = row * n + j
                out[at] = _keep(x[at], words[w], least, grown)


@kernel
def _noise(out, x, size, draw, stream, n, quarter):
    for i in range(cuda.grid(1), out.size // n * quarter, cuda.gridsize(1)):
        row, column = i // quarter, i % quarter
        words = philox(column, row, stream, draw)
        for w in range(4):
            j = w * quarter + column
            if j < n:
                at = row * n + j
                out[at] = _noisy(x[at], size[row], np.float32(words[w] >> _EIGHT))


def _bind_dropout(site: CudaSite) -> Call:
    least, grown = share_kept(site.node.params["p"])
    n, quarter, jobs = quarters(site.node)
    return per_element(
        _dropout, jobs, site.stream, site.out, *site.src, np.uint64(site.node.params["stream"]),
        np.uint64(least), np.float32(grown), n, quarter,
    )  # fmt: skip


def _bind_noise(site: CudaSite) -> Call:
    n, quarter, jobs = quarters(site.node)
    stream = np.uint64(site.node.params["stream"])
    return per_element(_noise, jobs, site.stream, site.out, *site.src, stream, n, quarter)


declare("dropout", _bind_dropout)
declare("uniform_noise", _bind_noise)
