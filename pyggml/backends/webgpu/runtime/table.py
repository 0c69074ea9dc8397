"""The table of kernels: the op's name -> Kernel. Each family enters its own when it is imported."""

from __future__ import annotations

import importlib

from pyggml.backends.webgpu.runtime.kernel import Kernel

FAMILIES = (
    "attention",
    "dropout",
    "elementwise",
    "experts",
    "head",
    "layout",
    "losses",
    "norm",
    "optim",
    "order",
    "products",
    "reduce",
    "rope",
    "rope_table",
    "rows",
    "softmax",
    "ssm_conv",
)

_KERNELS: dict[str, Kernel] = {}


def declare(name: str, kernel: Kernel) -> None:
    """Enter the kernel of the op with this name."""
    if name in _KERNELS:
        raise ValueError(f"op {name!r} has two kernels")
    _KERNELS[name] = kernel


def kernels() -> dict[str, Kernel]:
    """All kernels by op; the first call imports their families."""
    for family in FAMILIES:
        importlib.import_module(f"pyggml.backends.webgpu.ops.{family}")
    return _KERNELS
