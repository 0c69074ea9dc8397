"""The compute type that "auto" means on this machine; see docs/adding-a-compute-path.md."""

from pyggml.jit.isa import CHOSEN
from pyggml.kernels.kernel import Compute

FLOATS: Compute = "bf16" if CHOSEN.bf16 else "f32"  # the fastest products of floats here
# What "auto" stands for on this machine. With AVX-512 but no VNNI, only up to 32 tokens are
# multiplied so.
FASTEST: Compute = "int8" if CHOSEN.vnni or CHOSEN.byte_pairs or CHOSEN.sdot else FLOATS


def rounds(compute: Compute) -> bool:
    """Whether this compute type rounds floats to bfloat16 in products."""
    return (FLOATS if compute == "int8" else compute) == "bf16"


def rounds_matrices(compute: Compute) -> bool:
    """Whether products with a matrix in BF16 round what they multiply with it: as pairs, or for
    tiles."""
    return rounds(compute) or (CHOSEN.tiles and compute != "f32")
