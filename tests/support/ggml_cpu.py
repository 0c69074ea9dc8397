"""ggml's own CPU through ctypes: tensors over NumPy's memory, graphs, their results and gradients.

    with Context() as g:
        y = g.add(g.leaf(a), g.leaf(b))  # ggml_add; bool, int, float are C's, Long is int64_t
        (found,) = g.compute(y)

The libraries are those that llama-cpp-python has built. LLAMA_CPP_LIB_PATH, which that package
reads too, names another folder. ggml ends the process where sources do not fit an op.
"""

import ctypes
import os
from ctypes import POINTER, c_bool, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
from extras import need

from pyggml.graph.dtypes import BY_NUMBER
from pyggml.graph.tensor import Tensor, leaf

Long = c_int64
N_THREADS = 2
MOST = 1 << 28  # bytes of a context, of which only those that are written to are taken


class GgmlTensor(ctypes.Structure):
    """ggml.h's struct ggml_tensor up to its data."""

    _fields_ = (
        *(("type", c_int), ("buffer", c_void_p), ("ne", c_int64 * 4), ("nb", c_size_t * 4)),
        *(("op", c_int), ("op_params", c_int32 * 16), ("flags", c_int32), ("src", c_void_p * 10)),
        *(("view_src", c_void_p), ("view_offs", c_size_t), ("data", c_void_p)),
    )


class _Settings(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


@cache
def library(name):
    """One of ggml-base, ggml-cpu and llama; what needs it is skipped where it is not there."""
    folder = os.environ.get("LLAMA_CPP_LIB_PATH")
    folder = Path(folder or Path(need("llama_cpp").__file__).parent / "lib")
    path = next((p for p in folder.glob(f"*{name}.*") if p.suffix != ".a"), None)
    assert path, f"{folder} holds no library {name}"
    return ctypes.CDLL(str(path))


AT = POINTER(GgmlTensor)


@cache
def _function(name, result=AT):
    found = getattr(library("ggml-base"), f"ggml_{name}")
    found.restype = result
    return found


def _as_c(value):
    for kind, c in ((bool, c_bool), (int, c_int), (float, c_float)):
        if isinstance(value, kind):
            return c(value)
    return value


def sizes(shape):
    """NumPy's shape as ggml's four sizes, innermost first."""
    return (*reversed(shape), 1, 1, 1, 1)[:4]


def longs(shape):
    """The same as int64_t."""
    return map(Long, sizes(shape))


def numbers(t):
    """What a ggml tensor holds, as an array of four axes; of quantised types the bytes."""
    t = t.contents
    dtype = BY_NUMBER[t.type]
    shape, strides = list(t.ne), list(t.nb)
    if dtype.quantised:
        shape[0], strides[0] = dtype.row_bytes(shape[0]), 1
    if 0 in shape:
        return np.zeros(shape[::-1], dtype.numpy)
    n_bytes = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + dtype.numpy.itemsize
    raw = np.frombuffer((ctypes.c_uint8 * n_bytes).from_address(t.data), np.uint8)
    return np.ndarray(shape[::-1], dtype.numpy, raw, strides=strides[::-1]).copy()


class Context:
    """A ggml context; every other name is the function of ggml with it, given the context."""

    def __init__(self, node=None):
        """node: pyggml's, whose twin is built here; builders look at its shapes."""
        self.node = node
        self._arrays = []  # of leaves, which ggml does not own
        self._context = _function("init", c_void_p)(_Settings(MOST, None, False))
        self._at = c_void_p(self._context)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        _function("free", None)(self._at)

    def __getattr__(self, name):
        return lambda *values: _function(name)(self._at, *map(_as_c, values))

    def leaf(self, t):
        """A tensor over the memory of pyggml's leaf, or of an array, with its strides."""
        if not isinstance(t, Tensor):
            t = leaf(t)
        _function("set_no_alloc", None)(self._at, c_bool(True))
        new = self.new(t.dtype, t.shape)
        _function("set_no_alloc", None)(self._at, c_bool(False))
        self._arrays.append(t.data)
        new.contents.data = t.data.ctypes.data
        strides = sizes(t.strides)
        for i, (n, stride) in enumerate(zip(sizes(t.shape), strides, strict=True)):
            if n > 1 and i < len(t.shape):
                new.contents.nb[i] = stride
            elif i:
                new.contents.nb[i] = new.contents.nb[i - 1] * new.contents.ne[i - 1]
        return new

    def new(self, dtype, shape):
        """A tensor of ggml's own memory, which holds anything."""
        return self.new_tensor_4d(dtype.number, *map(Long, sizes(shape)))

    def reshape(self, x, *shape):
        """x without gaps, of this shape in NumPy's order; one size may be -1."""
        known = -prod(shape)
        n = prod(x.contents.ne)
        shape = tuple(n // known if size == -1 else size for size in shape)
        return self.cont_4d(x, *map(Long, sizes(shape)))

    def part(self, x, first, shape):
        """x's memory, which has no gaps, from its number `first` on, as this shape."""
        (n0, n1, n2, n3), size = sizes(shape), x.contents.nb[0]
        steps = (size * n0, size * n0 * n1, size * n0 * n1 * n2, first * size)
        return self.view_4d(x, Long(n0), Long(n1), Long(n2), Long(n3), *map(c_size_t, steps))

    def change(self, name, *values):
        """Call a function of ggml that takes no context."""
        _function(name, None)(*map(_as_c, values))

    def compute(self, *results):
        """The numbers of these tensors."""
        graph = self.new_graph()
        for t in results:
            _function("build_forward_expand", None)(graph, t)
        self._run(graph)
        return [numbers(t) for t in results]

    def gradients(self, y, seed, sources):
        """d Σ seed·y for each source."""
        for t in sources:
            _function("set_param", None)(t)
        loss = self.sum(self.mul(y, seed))
        _function("set_loss", None)(loss)
        graph = self.new_graph_custom(c_size_t(2048), True)
        _function("build_forward_expand", None)(graph, loss)
        self.build_backward_expand(graph, None)
        _function("graph_reset", None)(graph)
        self._run(graph)
        return [numbers(_function("graph_get_grad")(graph, t)) for t in sources]

    def _run(self, graph):
        compute = library("ggml-cpu").ggml_graph_compute_with_ctx
        assert compute(self._at, graph, c_int(N_THREADS)) == 0
