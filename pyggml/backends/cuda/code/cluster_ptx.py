"""Instructions of clusters: blocks that run together and write to each other's shared memory.

They need compute capability 9.0. A barrier is one uint64 of shared memory, which counts the bytes
that other blocks send to its block: so no fence waits for all that a block has written. Addresses
count bytes from the start of an array in shared memory, as in ptx.py. Numba's simulator has none
of these.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pyggml.backends.cuda.code.jit import ANY, instruction
from pyggml.backends.cuda.code.ptx import WORD, assemble, plain, shared_address
from pyggml.backends.cuda.runtime.driver import CudaSupportError, cuda
from pyggml.backends.cuda.runtime.simulator import on_card

_SINCE = (9, 0)  # compute capability
MOST_BLOCKS = 8  # of a cluster, on every card that has them


@on_card
def has_clusters() -> bool:
    """Whether this card has clusters; True where there is no card, and kernels only compile."""
    try:
        return bool(cuda.get_current_device().compute_capability >= _SINCE)
    except CudaSupportError:
        return True


def clusters_of(n: int) -> Any:
    """Of the kernel whose own code calls it, n blocks along x are a cluster."""

    @instruction(types.void)
    def clusters(builder):
        notes = cgutils.get_or_insert_named_metadata(builder.module, "nvvm.annotations")
        for axis, size in zip("xyz", (n, 1, 1), strict=True):
            name = ir.MetaDataString(builder.module, f"cluster_dim_{axis}")
            note = [builder.function, name, ir.Constant(WORD, size)]
            notes.add(builder.module.add_metadata(note))

    return clusters


@instruction(types.void, ANY, types.uint32)
def expect_bytes(builder, barrier, n_bytes):
    """Let a barrier (one uint64 of shared memory) expect so many bytes, which blocks of the
    cluster send."""
    text = (
        "mbarrier.init.shared::cta.b64 [$0], 1; "
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1; "
        "fence.mbarrier_init.release.cluster;"
    )
    assemble(builder, text, "r,r,~{memory}", [shared_address(builder, barrier), n_bytes])


@instruction(types.void, ANY)
def await_bytes(builder, barrier):
    """Wait until all bytes that a barrier expects have come."""
    text = (
        "{ .reg .pred done; again: "
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], 0; "
        "@!done bra again; }"
    )
    assemble(builder, text, "r,~{memory}", [shared_address(builder, barrier)])


@instruction(types.void, ANY, types.int64, ANY, types.uint32, types.float32)
def send(builder, shared, at, barrier, block, x):
    """Send a float32 to byte `at` of an array in the shared memory of a block of the cluster.
    That block's barrier counts its bytes."""
    text = (
        "{ .reg .u32 there, counter; mapa.shared::cluster.u32 there, $0, $2; "
        "mapa.shared::cluster.u32 counter, $1, $2; "
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 "
        "[there], $3, [counter]; }"
    )
    places = shared_address(builder, shared, at), shared_address(builder, barrier)
    assemble(builder, text, "r,r,r,f,~{memory}", [*places, block, x])


arrive_in_cluster = plain("barrier.cluster.arrive.relaxed;")
await_cluster = plain("barrier.cluster.wait;")
