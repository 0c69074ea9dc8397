"""Steps of the optimisers on parameters in 16 bits, rounded by chance: see ops/optim_half.py. The
random bits of each number are the host's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.ptx import bf16_bits
from pyggml.backends.cuda.ops.dropout import philox
from pyggml.backends.cuda.ops.layout.copies import bf16_to_float
from pyggml.backends.cuda.ops.optim import bind_8_bits, number_step, steps_by_8_bits
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F16, DType
from pyggml.jit.tasks import SHARE
from pyggml.ops.arithmetic.dropout import EIGHTH
from pyggml.ops.optim import STEPS


@device
def _bits(i, draw, stream):
    """16 random bits of number i: those that round_by_draw draws."""
    share, at = i // SHARE, i % SHARE
    words, eighth = philox(at % EIGHTH, share, stream, draw), at // EIGHTH
    return np.uint32((words[eighth % 4] >> np.uint64(eighth // 4 * 16)) & np.uint64(0xFFFF))


@device
def _to_bf16(x, i, draw, stream):
    u = np.float32(x).view(np.uint32)
    if (u & np.uint32(0x7F800000)) == np.uint32(0x7F800000):
        return bf16_bits(np.float32(x))
    return np.uint16((u + _bits(i, draw, stream)) >> np.uint32(16))


@device
def _to_f16(x, i, draw, stream):
    """As float32, which is stored as the half that it is."""
    u, r = np.float32(x).view(np.uint32), _bits(i, draw, stream)
    size = np.uint32(u & np.uint32(0x7FFFFFFF))
    if size < np.uint32(0x38800000):
        units = np.float64(size.view(np.float32)) * 2.0**24 + np.float64(r) / 65536
        size = np.float32(np.float64(np.int64(units)) * 2.0**-24).view(np.uint32)
    elif size < np.uint32(0x7F800000):
        size = np.uint32((size + (r >> np.uint32(3))) & np.uint32(0xFFFFE000))
    return np.uint32((u & np.uint32(0x80000000)) | size).view(np.float32)


@device
def _of_f16(x):
    return np.float32(x)


def _steps_by(number: Callable, widen: Callable, narrow: Callable) -> Any:
    @kernel
    def run(out, p, sources, draw, stream):
        """out and p are the same memory."""
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = narrow(number(widen(p[i]), i, sources), i, draw, stream)

    return run


def _bind_step(kernels: dict[DType, Any], site: CudaSite) -> Call:
    (p, *sources, draw), stream = site.src, np.uint64(site.node.params["stream"])
    return per_element(
        kernels[site.node.dtype], site.out.size, site.stream, site.out, p, tuple(sources),
        draw, stream,
    )  # fmt: skip


def _bind_8bit(site: CudaSite) -> Call:
    (*sources, draw), stream = site.src, np.uint64(site.node.params["stream"])
    return bind_8_bits(_BY_8_BITS[site.node.dtype], site, sources, draw, stream)


_TYPES = {BF16: (bf16_to_float, _to_bf16), F16: (_of_f16, _to_f16)}
_BY_8_BITS = {kind: steps_by_8_bits(*of_kind) for kind, of_kind in _TYPES.items()}
declare("opt_step_adamw_8bit_half", _bind_8bit)
for _name, _of in STEPS.items():
    _kernels = {kind: _steps_by(number_step(_of), *of_kind) for kind, of_kind in _TYPES.items()}
    declare(f"{_name}_half", partial(_bind_step, _kernels))
