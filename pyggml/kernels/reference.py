"""How the CPU computes an op without a kernel: by its reference, in NumPy and float64."""

from collections.abc import Iterable

import numpy as np

from pyggml.backends.kit import kernels
from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, DType
from pyggml.graph.tensor import Tensor
from pyggml.kernels.kernel import Kernel, Site
from pyggml.quants import dequantize


def in_float64(data: np.ndarray, dtype: DType) -> np.ndarray:
    """What a reference reads of memory of a type: floats and packed rows as float64, integers as
    they are."""
    if dtype.quantised or dtype is BF16:
        wide = dequantize(data if data.ndim else data[None], dtype.name)
        data = wide.reshape(*data.shape[:-1], wide.shape[-1]) if data.ndim else wide.reshape(())
    return data.astype(np.float64) if data.dtype.kind == "f" else data


def lacks_of_reference(node: Tensor) -> str | None:
    """Why the reference of a node's op cannot stand for a kernel; None if it can."""
    assert node.op is not None
    if node.saved or node.op.changes or node.is_write:
        return "no kernel is declared, and its reference makes no more than the result"
    return None


def result_of(node: Tensor, sources: Iterable[np.ndarray]) -> np.ndarray:
    """What the reference makes of a node's sources; ShapeError if not of the node's shape."""
    assert node.op is not None
    with np.errstate(all="ignore"):  # as kernels are: infinity and NaN are results
        result = np.asarray(node.op.ref(*sources, **node.params))
    if result.shape != node.shape:
        raise ShapeError(
            f"{node.op.name}: its reference gave shape {result.shape}, wanted {node.shape}"
        )
    return result


def _run(site: Site) -> Call:
    return Call(_compute, site.node, site.out, site.src)


def _compute(node: Tensor, out: np.ndarray, src: tuple[np.ndarray, ...]) -> None:
    out[...] = result_of(node, (in_float64(a, s.dtype) for a, s in zip(src, node.src, strict=True)))


BY_REFERENCE: Kernel = kernels.DeviceKernel(_run)
