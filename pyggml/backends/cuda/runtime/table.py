"""The table of kernels: the op's name -> Kernel. Each family enters its own when it is imported."""

from __future__ import annotations

import importlib

from pyggml.backends.cuda.runtime.kernel import Kernel

FAMILIES = (
    "arith",
    "conv",
    "delta_net",
    "dropout",
    "embedding",
    "experts",
    "few",
    "glu",
    "head",
    "heads",
    "layout",
    "losses",
    "next_token",
    "norm",
    "norm_mul",
    "norm_rope",
    "optim",
    "order",
    "pool",
    "products",
    "reduce",
    "resample",
    "rope",
    "rows",
    "softmax",
    "ssm_conv",
    "ssm_scan",
    "triangular",
    "unary",
    "window",
    "wkv",
)

_KERNELS: dict[str, Kernel] = {}


def declare(name: str, kernel: Kernel) -> None:
    """Enter the kernel of the op with this name."""
    if name in _KERNELS:
        raise ValueError(f"op {name!r} has two kernels")
    _KERNELS[name] = kernel


def kernels() -> dict[str, Kernel]:
    """All kernels by op; the first call imports their families."""
    for family in ("attention", *(f"ops.{name}" for name in FAMILIES)):
        importlib.import_module(f"pyggml.backends.cuda.{family}")
    return _KERNELS
