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

from pyggml.backends.cuda.code.jit import intrinsic
from pyggml.backends.cuda.code.ptx import plain, shared_address

_WORD, _LONG, _FLOAT, _NOTHING = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.VoidType()
_START = ir.Constant(_LONG, 0)


def clusters_of(n: int) -> Any:
    """Of the kernel whose own code calls it, n blocks along x are a cluster."""

    @intrinsic
    def clusters(typing):
        def emit(context, builder, signature, arguments):
            notes = cgutils.get_or_insert_named_metadata(builder.module, "nvvm.annotations")
            for axis, size in zip("xyz", (n, 1, 1), strict=True):
                name = ir.MetaDataString(builder.module, f"cluster_dim_{axis}")
                note = [builder.function, name, ir.Constant(_WORD, size)]
                notes.add(builder.module.add_metadata(note))
            return context.get_dummy_value()

        return types.void(), emit

    return clusters


@intrinsic
def expect_bytes(typing, barrier, n_bytes):
    """Let a barrier (one uint64 of shared memory) expect so many bytes, which blocks of the
    cluster send."""

    def emit(context, builder, signature, arguments):
        array, n = arguments
        address = shared_address(context, builder, barrier, (array, _START))
        form = ir.FunctionType(_NOTHING, [_WORD, _WORD])
        text = (
            "mbarrier.init.shared::cta.b64 [$0], 1; "
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1; "
            "fence.mbarrier_init.release.cluster;"
        )
        builder.asm(form, text, "r,r,~{memory}", [address, n], True)
        return context.get_dummy_value()

    return types.void(barrier, types.uint32), emit


@intrinsic
def await_bytes(typing, barrier):
    """Wait until all bytes that a barrier expects have come."""

    def emit(context, builder, signature, arguments):
        place = arguments[0], _START
        address = shared_address(context, builder, barrier, place)
        form = ir.FunctionType(_NOTHING, [_WORD])
        text = (
            "{ .reg .pred done; again: "
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], 0; "
            "@!done bra again; }"
        )
        builder.asm(form, text, "r,~{memory}", [address], True)
        return context.get_dummy_value()

    return types.void(barrier), emit


@intrinsic
def send(typing, shared, at, barrier, block, x):
    """Send a float32 to byte `at` of an array in the shared memory of a block of the cluster.
    That block's barrier counts its bytes."""

    def emit(context, builder, signature, arguments):
        array, at, counted_by, block, x = arguments
        address = shared_address(context, builder, shared, (array, at))
        place = counted_by, _START
        counter = shared_address(context, builder, barrier, place)
        form = ir.FunctionType(_NOTHING, [_WORD, _WORD, _WORD, _FLOAT])
        text = (
            "{ .reg .u32 there, counter; mapa.shared::cluster.u32 there, $0, $2; "
            "mapa.shared::cluster.u32 counter, $1, $2; "
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 "
            "[there], $3, [counter]; }"
        )
        builder.asm(form, text, "r,r,r,f,~{memory}", [address, counter, block, x], True)
        return context.get_dummy_value()

    return types.void(shared, types.int64, barrier, types.uint32, types.float32), emit


arrive_in_cluster = plain("barrier.cluster.arrive.relaxed;")
await_cluster = plain("barrier.cluster.wait;")
