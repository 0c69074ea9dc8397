"""Calls captured into a graph that the card starts at once."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from pyggml.backends.cuda.runtime.driver import CudaAPIError, direct, driver, free_what_is_gone
from pyggml.backends.cuda.runtime.failures import is_failure, ran_out
from pyggml.backends.cuda.runtime.simulator import small

_CAPTURED = small(2, 0)  # the call that is captured; the simulator captures none
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: memory may be freed meanwhile
_SET = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES
_PROGRAMMATIC = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC

_Calls = Sequence[Callable[[], None]]
_Joint = tuple[_Calls, Callable[[], None]] | None


class Capture:
    """Calls on a stream, started at once from the second time on.

    The first time each is launched by itself: that compiles what is not compiled yet, which cannot
    be captured; `prepare` is called before. The second time they are captured into a CUDA graph
    (1.25 µs a node, where a launch from Python takes 80). Calls that cannot be captured are always
    launched.

    waits: tells, for each call, the numbers of those that end before it begins; the card may run it
    beside all others. Without `waits` each call waits for the one before.
    early: tells, of these, which calls may begin before those have ended (early.py); where the
    driver refuses, none does.
    joined: tells, of calls that wait for none, which are captured as one instead, and that one.
    """

    def __init__(
        self,
        calls: Iterable[Callable[[], None]],
        stream: Any,
        waits: Callable[[], Sequence[tuple[int, ...]]] | None = None,
        early: Callable[[Sequence[tuple[int, ...]]], Sequence[bool]] | None = None,
        prepare: Callable[[], None] | None = None,
        joined: Callable[[Any], _Joint] | None = None,
    ) -> None:
        self.calls, self.waits, self.early = tuple(calls), waits, early
        self._joined = joined
        self._joint: _Joint = None  # as long as the graph, which reads its memory
        self._stream, self._prepare = stream, prepare
        self._times, self._graph = 0, None

    def __call__(self) -> None:
        self._times += 1
        if self._times == 1 and self._prepare:
            self._prepare()
        if self._times == _CAPTURED:
            self._graph = self._capture()
            if self._graph is None and self.early is not None:
                self.early = None
                self._graph = self._capture()
        if self._graph is None:
            self._launch()
        else:
            direct.cuGraphLaunch(self._graph, self._stream.handle)

    def _launch(self) -> None:
        for call in self.calls:
            call()

    def _launch_to_capture(self, waits: Sequence[tuple[int, ...]], early: Sequence[bool]) -> None:
        """Each call's nodes get edges from the last nodes of those that it waits for."""
        if self.waits is None:
            self._launch()
            return
        members, whole = self._joint or ((), None)
        of_joint: list[Any] = []
        if whole is not None:
            _set_next(self._stream, [], is_early=False)
            whole()
            of_joint = _next(self._stream)
        last: list[list[Any]] = []  # of each call
        within = {*map(id, members)}
        for call, before, is_early in zip(self.calls, waits, early, strict=True):
            if id(call) in within:
                last.append(of_joint)
                continue
            _set_next(self._stream, [node for i in before for node in last[i]], is_early)
            call()
            last.append(_next(self._stream))

    def _capture(self) -> Any:
        """The graph, ready to start; None if a call cannot be captured.

        Raises what the driver or a library says if there is too little memory.
        """
        from cuda.bindings.driver import CUstreamCaptureMode

        free_what_is_gone()
        waits = self.waits() if self.waits else [()] * len(self.calls)
        early = self.early(waits) if self.early else [False] * len(waits)
        free = [c for c, before in zip(self.calls, waits, strict=True) if not before]
        self._joint = self._joined(free) if self.waits and self._joined else None
        stream = self._stream.handle
        driver.cuStreamBeginCapture(stream, CUstreamCaptureMode(_RELAXED))
        try:
            self._launch_to_capture(waits, early)
            graph = driver.cuStreamEndCapture(stream)
        except BaseException as error:  # Ctrl-C, too
            with suppress(CudaAPIError):  # so that the stream takes launches again
                driver.cuGraphDestroy(driver.cuStreamEndCapture(stream))
            if not is_failure(error) or ran_out(error):
                raise
            return None
        try:
            executable = driver.cuGraphInstantiate(graph, 0)
        except CudaAPIError as error:
            if self.early is None or ran_out(error):
                raise
            return None
        finally:
            driver.cuGraphDestroy(graph)
        weakref.finalize(self, _destroy, executable).atexit = False
        return executable


def _next(stream: Any) -> list[Any]:
    """The nodes for which the next node that is captured will wait."""
    return list(driver.cuStreamGetCaptureInfo(stream.handle)[3])


def _set_next(stream: Any, nodes: Sequence[Any], is_early: bool) -> None:
    """Let the next node that is captured wait for these, or if all are kernels, begin early and
    wait by itself."""
    from cuda.bindings import driver as bindings

    nodes = list({int(node): node for node in nodes}.values())
    # Bindings of CUDA 13 also take data of each edge; those of 12 have a second name for that.
    name = "cuStreamUpdateCaptureDependencies"
    has_two = hasattr(bindings, f"{name}_v2")
    of_edges: tuple[Any, ...] = () if has_two else (None,)
    kernel = bindings.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    if is_early and nodes and all(driver.cuGraphNodeGetType(node) == kernel for node in nodes):
        edge = bindings.CUgraphEdgeData()
        edge.from_port = edge.type = _PROGRAMMATIC  # when all blocks have released others
        name, of_edges = f"{name}_v2" if has_two else name, ([edge] * len(nodes),)
    getattr(driver, name)(stream.handle, nodes, *of_edges, len(nodes), _SET)


def _destroy(graph: Any) -> None:
    with suppress(CudaAPIError):
        driver.cuGraphExecDestroy(graph)
