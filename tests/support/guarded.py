"""Arrays that end, or begin, at a page that may not be touched: a read past them faults.

python guarded.py [TYPE | TYPE COMPUTE …]

Every op and every product, each named on a line before it runs, with arrays that end at such a
page, then with arrays that begin at one; with words, the products alone that they name, a weight
type, or one and a compute type, at the ends.
"""

import ctypes
import itertools
import mmap
import sys
from math import prod

import numpy as np

PAGE = mmap.PAGESIZE
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
ROWS = (1, 17, 33)
# For each number of few rows a type has code of its own, which compiles for half a second and reads
# the type as that of one row does: these types stand for all.
FEW_ROWS, OF_FEW_ROWS = (2, 5), ("F16", "Q8_0", "Q4_K", "Q6_K", "IQ3_S", "TQ1_0")


class Guarded:
    """Makes arrays with such a page at their "end" or "start"; keeps their memory until it goes
    itself."""

    def __init__(self, side):
        self.side, self._kept = side, []

    def empty(self, shape, dtype, alignment=1):
        """An array of this shape; its memory is full of ones in every bit."""
        n = prod(shape) * np.dtype(dtype).itemsize
        size = -(-max(n, 1) // PAGE) * PAGE
        memory = mmap.mmap(-1, size + 2 * PAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for page in (start, start + PAGE + size):
            assert _mprotect(page, PAGE, 0) == 0
        offset = PAGE + ((size - n) // alignment * alignment if self.side == "end" else 0)
        raw = np.frombuffer(memory, np.uint8, n, offset)
        raw[:] = 0xFF
        self._kept.append(memory)
        return raw.view(dtype).reshape(shape) if n else np.empty(shape, dtype)

    def copy(self, a):
        """The numbers of an array."""
        made = self.empty(a.shape, a.dtype)
        made[...] = a
        return made


def say(name):
    """What runs next: the last line names what faulted."""
    sys.stdout.write(f"{name}\n")
    sys.stdout.flush()


def run_ops(guarded):
    """Every sample of every op, its sources, results and scratch guarded."""
    from pyggml.graph.arrays import array
    from pyggml.graph.tensor import as_leaf, zeros
    from pyggml.kernels.kernel import KERNELS, Site
    from pyggml.ops import OPS

    for name, op in OPS.items():
        if op not in KERNELS:
            continue
        for i, sample in enumerate(op.samples(np.random.default_rng(0))):
            say(f"{name} {i} at the {guarded.side}")
            src = [as_leaf(a) for a in sample.arrays]
            node = op(*src, **sample.params)
            arrays = tuple(guarded.copy(np.ascontiguousarray(array(s))) for s in src)
            out = guarded.empty(node.shape, node.dtype.numpy) if not node.dtype.quantised else None
            out = guarded.copy(zeros(node.shape, node.dtype).data)
            saved = tuple(guarded.empty(s.shape, s.dtype.numpy) for s in node.saved)
            n_bytes = KERNELS[op].scratch(node, "f32")
            scratch = guarded.empty((n_bytes,), np.uint8, 64)
            KERNELS[op].bind(Site(node, out, arrays, saved, scratch, False, "f32"))()


def run_products(guarded, words):
    """Every weight type, both ways, few rows and many, as each compute type."""
    from pyggml.graph.dtypes import DTYPES
    from pyggml.kernels import gemm
    from pyggml.quants import QUANTS

    rng = np.random.default_rng(0)
    for name, form, m, compute in itertools.product(
        QUANTS, ("mul_mat", "out_prod"), ROWS + FEW_ROWS, ("f32", "bf16", "int8")
    ):
        if words and not {name, f"{name} {compute}"} & words:
            continue
        if m in FEW_ROWS and name not in OF_FEW_ROWS:
            continue
        say(f"{name} {form} {m} {compute} at the {guarded.side}")
        dtype, k = DTYPES[name], 512
        for n in (48, 512):
            raw = rng.integers(0, 100, (n, dtype.row_bytes(k)), np.uint8)
            w = guarded.copy(raw).view(dtype.numpy)
            inner, outer = (k, n) if form == "mul_mat" else (n, k)
            p = gemm.Problem(form, m, outer, inner, dtype, compute)
            scratch = guarded.empty((gemm.scratch_bytes(p),), np.uint8, 64)
            a = guarded.copy(rng.standard_normal((m, inner)).astype(np.float32))
            c = guarded.empty((m, outer), np.float32)
            multiply = gemm.mul_mat if form == "mul_mat" else gemm.out_prod
            multiply(c, a, gemm.Weight(w, dtype, compute), scratch, False)()


if __name__ == "__main__":
    words = {*sys.argv[1:]}
    for side in ("end",) if words else ("end", "start"):
        if not words:
            run_ops(Guarded(side))
        run_products(Guarded(side), words)
