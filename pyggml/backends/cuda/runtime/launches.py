"""Launches: a kernel with its grid, its stream and its arguments, as a Call.

Kernels walk their elements or rows in steps of the grid, so that any grid is right. The simulator
runs each thread of a block as a Python thread: there, grids are small.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.simulator import small
from pyggml.graph.call import Call

THREADS = 256  # of a block; a power of two, and the most that block_sum and its like take
_MOST_THREADS, _WARP = small(THREADS, 4), small(32, 4)
_MOST_BLOCKS = small(132 * 16)  # some rounds of the multiprocessors of a large card
_MOST_ROW_BLOCKS = small(1 << 16)
_SHORT = small(256, 0)  # a row that gets a warp, not a block
_ROWS_OF_BLOCK = THREADS // _WARP  # where they are so short


def launch(
    kernel: Any,
    grid: Any,
    block: Any,
    stream: Any,
    *arguments: Any,
    shared_bytes: int = 0,
    writes: Sequence[Any] | None = None,
) -> Call:
    """A call that launches the kernel on the stream. Grid and block as Numba takes them.

    writes: the arrays among its arguments that it writes; by default, all that its node may write
    """
    return Call(_launch, kernel, (grid, block, stream, shared_bytes), arguments, writes)


def per_element(
    kernel: Any, n: int, stream: Any, *arguments: Any, writes: Sequence[Any] | None = None
) -> Call:
    """A launch for n elements: `for i in range(cuda.grid(1), n, cuda.gridsize(1))`.

    writes: as `launch` has it
    """
    blocks = max(1, min(-(-n // _MOST_THREADS), _MOST_BLOCKS))
    return launch(kernel, blocks, _MOST_THREADS, stream, *arguments, writes=writes)


def per_result(kernel: Any, site: CudaSite, *further: Any) -> Call:
    """The same for a node's result: the kernel takes it, the sources, and what is further given."""
    return per_element(kernel, site.out.size, site.stream, site.out, *site.src, *further)


def per_row(
    kernel: Any, n_rows: int, n: int, stream: Any, *arguments: Any, most: int = _MOST_ROW_BLOCKS
) -> Call:
    """A launch for rows of n elements, a block for each:
    `for row in range(cuda.blockIdx.x, n_rows, cuda.gridDim.x)`.  most: blocks"""
    threads = _WARP
    while threads < min(n, _MOST_THREADS):
        threads *= 2
    return launch(kernel, max(1, min(n_rows, most)), threads, stream, *arguments)


def per_rows(
    kernel: Any, n_rows: int, n: int, stream: Any, *arguments: Any, most: int = _MOST_ROW_BLOCKS
) -> Call:
    """The same, and a warp for each row of at most 256 elements:
    `for row in range(first_row(), n_rows, rows_apart())`, see blocks.py."""
    if n > _SHORT:
        return per_row(kernel, n_rows, n, stream, *arguments, most=most)
    blocks = rows_at_once(n_rows, n, most) // _ROWS_OF_BLOCK
    return launch(kernel, blocks, (_WARP, _ROWS_OF_BLOCK), stream, *arguments)


def rows_at_once(n_rows: int, n: int, most: int) -> int:
    """Rows that the threads of `per_rows` begin with, of `most` blocks at most."""
    together = _ROWS_OF_BLOCK if n <= _SHORT else 1
    return max(1, min(-(-n_rows // together), most)) * together


def threads_of_row(n: int) -> int:
    """The threads that per_rows gives a row of n elements, if n is more than 128; else a warp's."""
    return _WARP if n <= _SHORT else _MOST_THREADS


def in_turn(*calls: Call) -> Call:
    """A node's calls, one after the other."""
    return Call(_in_turn, *calls)


def of_library(
    function: Any, *arguments: Any, reads: Sequence[Any], writes: Sequence[Any], keeps: Any = None
) -> Call:
    """A call of a library that puts work on the stream, and the arrays that it reads and writes.

    keeps: what else must live as long as the call
    """
    return Call(_of_library, function, arguments, reads, writes, keeps)


def steps(call: Call) -> Iterator[Call]:
    """The calls, each one launch or one call of a library, that a node's call makes in turn."""
    if call.kernel is _in_turn:
        for one in call.arguments:
            yield from steps(one)
    else:
        yield call


def launches(call: Call) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The kernel and the arguments of each launch of a node's call."""
    for step in steps(call):
        if step.kernel is _launch:
            kernel, _, arguments, _ = step.arguments
            yield kernel, arguments


def arrays(step: Call) -> tuple[Sequence[Any], Sequence[Any] | None]:
    """The arrays that a step may touch, and those that it writes, None if that is not known."""
    if step.kernel is _of_library:
        _, _, reads, writes, _ = step.arguments
        return (*reads, *writes), writes
    if step.kernel is _launch:
        _, _, arguments, writes = step.arguments
        return tuple(_arrays_in(arguments)), writes
    return tuple(_arrays_in(step.arguments)), None


def _arrays_in(arguments: tuple[Any, ...]) -> Iterator[Any]:
    for one in arguments:
        if isinstance(one, tuple):
            yield from _arrays_in(one)
        elif hasattr(one, "__cuda_ndarray__"):
            yield one


def _launch(
    kernel: Any, configuration: tuple[Any, ...], arguments: tuple[Any, ...], _writes: Any
) -> None:
    kernel[configuration](*arguments)


def _of_library(function: Any, arguments: tuple[Any, ...], *_kept: Any) -> None:
    function(*arguments)


def _in_turn(*calls: Call) -> None:
    for call in calls:
        call()
