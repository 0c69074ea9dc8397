"""Branches side by side: the steps of some nodes, and for which others each of them waits.

The products of q, k and v, LoRA's products beside each of them, and the unpacking of the next
weight share no memory but what all of them read, so a card runs them at the same time. What a step
touches is known when it is bound: a kernel reaches memory through the arrays among its arguments
alone. It writes only to those that its node may change: the result, saved tensors, scratch, and
sources that the op changes. All others it reads. Where a plan gives the same memory to two tensors,
steps wait that could run together; hence `CudaBackend.room`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pyggml.backends.cuda.runtime.driver import address
from pyggml.backends.cuda.runtime.early import leads, read_early
from pyggml.backends.cuda.runtime.kernel import BoundCall, CudaSite
from pyggml.backends.cuda.runtime.launches import arrays, steps
from pyggml.backends.cuda.runtime.waits import Range, StepAccess, Waits, waits
from pyggml.graph.call import Call


def side_by_side(calls: Sequence[BoundCall]) -> tuple[list[Call], Callable[[], Waits]]:
    """The steps of all calls; and what tells, for each, the earlier ones that it waits for."""
    every = [step for call in calls for step in steps(call)]
    return every, lambda: waits(_accesses(calls))


def _accesses(calls: Iterable[BoundCall]) -> Iterator[StepAccess]:
    """Of each step."""
    for call in calls:
        may_change = ranges(written_arrays(call.site)) if call.site else ()
        for step in steps(call):
            yield _access(step, may_change)


def may_begin_early(calls: Sequence[BoundCall], before: Waits) -> list[bool]:
    """For each step: whether it may begin before the steps that it waits for have ended (early.py).

    What it reads early must be written by none before it but such as have ended when one of these
    releases it: those that this one waits for itself, unless it leads.
    """
    may_begin, writers = list[bool](), list[tuple[Range, int]]()
    # Of each step, bits of all steps that have ended when it releases others, and when it ends.
    released, ended = list[int](), list[int]()
    every = [step for call in calls for step in steps(call)]
    for i, (step, access) in enumerate(zip(every, _accesses(calls), strict=True)):
        early, over, awaited = read_early(step), 0, 0
        for j in before[i]:
            over |= released[j]
            awaited |= ended[j] | 1 << j
        may_begin.append(
            early is not None
            and all(over >> j & 1 or not r.meets(w) for r in ranges(early) for w, j in writers)
        )
        writers += ((w, i) for w in access.writes)
        released.append(over if leads(step) else awaited)
        ended.append(awaited)
    return may_begin


def written_arrays(site: CudaSite) -> Iterator[Any]:
    """The arrays that a node's kernels may write."""
    yield site.out
    yield from site.saved
    yield site.scratch
    if site.fills_shared:
        yield site.shared
    assert site.node.op is not None
    for i in site.node.op.changes:
        yield site.src[i]


def _access(step: Call, may_change: Sequence[Range]) -> StepAccess:
    touched, written = arrays(step)
    if written is not None:
        return StepAccess(ranges(touched), ranges(written))
    reads: list[Range] = []
    writes: list[Range] = []
    for r in ranges(touched):
        (writes if any(r.meets(c) for c in may_change) else reads).append(r)
    return StepAccess(reads, writes)


def ranges(may_begin: Iterable[Any]) -> list[Range]:
    """Where arrays lie; those without elements lie nowhere."""
    sizes = ((a, a.size * a.dtype.itemsize) for a in may_begin)
    return [Range(address(a), address(a) + n) for a, n in sizes if n]
