"""Memory that nodes write over: who must run before the writer, and what comes too late.

A tensor stands for its numbers at the time when it was made. A node that writes into another
tensor's memory ends that time: every reader of the old numbers runs before it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import numpy as np

from pyggml.errors import GraphError
from pyggml.graph.op import SAVED, changed_by
from pyggml.graph.tensor import Tensor

Writer = tuple[Tensor, int, int]  # a node, and the first byte and the end of what it changes
Piece = tuple[Tensor, int, int]  # an owner of memory, and there the first byte and the end


def last_write(t: Tensor) -> Tensor:
    """The tensor that wrote the numbers of t: t itself unless it is a view. A view that stands
    after a node that changes its memory shows what that node wrote."""
    while t.is_view:
        t, *earlier = t.src
        if earlier and (writers := [w for w in earlier if t.root in changed_by(w)]):
            return writers[-1]
    return t


def maker(t: Tensor) -> Tensor:
    """The node whose kernel wrote the numbers of t; a leaf is its own."""
    t = last_write(t)
    return t.src[0] if t.op is SAVED else t


def readers_of_overwritten(tensors: Iterable[Tensor]) -> Mapping[Tensor, Sequence[Tensor]]:
    """The readers of the old numbers, for each node that writes into another tensor's memory."""
    writes = {t: last_write(t.src[0]) for t in tensors if t.base is not None and t.is_write}
    if not writes:
        return {}
    overwritten, readers = set(writes.values()), defaultdict[Tensor, list[Tensor]](list)
    changed = {t.root for t in writes}
    for t in tensors:
        for s in t.src:
            if (s.base or s) not in changed:  # of most
                continue
            old = last_write(s)
            if old in overwritten and writes.get(t) is not old and t not in readers[old][-1:]:
                readers[old].append(t)
    return {t: readers[old] for t, old in writes.items()}


def refuse_late_reads(order: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """GraphError if a node, run in this order, or an output needs numbers that an earlier node
    has written over. Writers that share a tensor (`Op.shares`) may stand side by side."""
    changing = [t for t in order if t.op is not None and (t.op.changes or t.is_write)]
    if not changing:
        return
    changed = {root for t in changing for root in changed_by(t)}
    writers = defaultdict[Tensor, list[Writer]](list)  # of each memory, in their order
    for t in order:
        if t.op is None or t.is_view or t.op is SAVED:
            continue
        for s in t.src:
            memory = s.base or s
            if memory in changed and (late := _overwriter(s, writers[memory], t)) is not None:
                raise GraphError(
                    f"{t!r} needs the numbers of {s!r}, but {late!r} has written over them"
                )
        if t.base is not None or t.op.changes:
            for root, first, end in changed_pieces(t):
                writers[root].append((t, first, end))
    for s in outputs:
        if s.root in changed and (late := _overwriter(s, writers[s.root])) is not None:
            raise GraphError(
                f"the output {s!r} is written over by {late!r}: give a copy of it, dup(…)"
            )


def _overwriter(
    s: Tensor, writers: Sequence[Writer], reader: Tensor | None = None
) -> Tensor | None:
    """The last of these writers after s's own that changes what a reader needs of it."""
    own, (start, end) = last_write(s), _bytes_of(s)
    for writer, first, last in reversed(writers):
        if writer is own:
            break
        apart = last <= start or end <= first  # of most: a run's gradients lie in one leaf
        if not apart and not _share(own, writer, reader) and _overlap(s, writer):
            return writer
    return None


def _bytes_of(t: Tensor) -> tuple[int, int]:
    """Where the bytes of t lie in its memory: from the first to the end of the last."""
    return t.offset, t.offset + extent(t)


def piece_of(t: Tensor) -> Piece:
    """Where a tensor lies."""
    return t.root, *_bytes_of(t)


def changed_pieces(node: Tensor) -> list[Piece]:
    """The memory that a node's kernel changes, other than its own result: windows of leaves too."""
    further = node.op.changes if node.op is not None else ()
    return [piece_of(t) for t in ([node] * node.is_write + [node.src[i] for i in further])]


def meet(pieces: Iterable[Piece], further: Iterable[Piece]) -> bool:
    """Whether one of the pieces has a byte of a further one."""
    return any(
        a is b and first < end and start < last
        for (a, first, last), (b, start, end) in product(pieces, further)
    )


def _share(own: Tensor, writer: Tensor, reader: Tensor | None) -> bool:
    """Whether both write into a tensor side by side: `own` and `writer`, or its reader and
    `writer`."""
    beside = own if own.is_write else reader
    if beside is None or beside.op is None or writer.op is None:
        return False
    beside_it = own.is_write or (beside.is_write and last_write(beside.src[0]) is own)
    return beside_it and beside.op.shares and writer.op.shares


def _overlap(s: Tensor, writer: Tensor) -> bool:
    """Whether a writer changes an element of s, which lies in the same memory."""
    if not writer.is_write or writer.root is not s.root or (writer.op and writer.op.changes):
        return True  # of what it changes besides, it may change all
    n_bytes = max(t.offset + extent(t) for t in (s, writer))
    memory = np.empty(n_bytes, np.uint8)  # never touched
    return np.shares_memory(_elements(s, memory), _elements(writer, memory))


def extent(t: Tensor) -> int:
    """Bytes from the first element of a window to the end of its last."""
    if not t.n_elements:
        return 0
    blocks = (*t.shape[:-1], t.shape[-1] // t.dtype.block) if t.shape else ()
    steps = sum((n - 1) * step for n, step in zip(blocks, t.strides, strict=True))
    return steps + t.dtype.block_bytes


def _elements(t: Tensor, memory: np.ndarray) -> np.ndarray:
    """The elements of a window, or the blocks of a quantised one, as an array of raw bytes."""
    blocks = (*t.shape[:-1], t.shape[-1] // t.dtype.block) if t.shape else ()
    return np.ndarray(blocks, np.dtype((np.void, t.dtype.block_bytes)), memory, t.offset, t.strides)
