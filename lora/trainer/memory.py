"""The memory of a run, of the host and of other devices, before any is taken."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from pyggml.alloc import Plan
from pyggml.backends import Backend
from pyggml.graph.arrays import is_constant
from pyggml.graph.tensor import Tensor
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.config import TrainConfig
from pyggml.lora.optim import kept_bytes
from pyggml.lora.optim.whole_gradient import bytes_of_whole
from pyggml.lora.ranks import ALONE, Ranks
from pyggml.lora.trainer.gradient import n_gradients
from pyggml.lora.trainer.passes import Passes
from pyggml.model import Model


@dataclass(frozen=True, slots=True)
class RunMemory:
    """Bytes that a run takes: its arena, its parameters and the mapped weights.

    The arena is that of its graphs. The parameters include gradients and moments.
    """

    arena: int
    parameters: int
    weights: int


def largest_mapped(model: Model) -> int:
    """Bytes of the largest weight that stays in the file; 0 if all are trained."""
    weights = (t for t in model.parts.weights.values() if t.op is None and is_constant(t))
    return max((t.n_bytes for t in weights), default=0)


def held_bytes(
    parameters: Parameters, config: TrainConfig, ranks: Ranks = ALONE, on_card: bool = False
) -> int:
    """Bytes of parameters in a run, with their gradients, moments and sums. on_card: of several
    ranks, where each has a card."""
    gradients = round(n_gradients(config, ranks, on_card) * parameters.gradient.nbytes)
    return parameters.n_bytes(gradients + kept_bytes(config, parameters))


@dataclass(frozen=True, slots=True)
class OnDevice:
    """The bytes that a run takes of one device that is open, by part.

    own: of its kernels, libraries and captured graphs
    """

    backend: Backend
    weights: int
    unpacked: int  # of weights that stay in bfloat16 too
    parameters: int  # with gradients and moments
    arena: int
    cache: int  # of the answers
    own: int

    @property
    def n_bytes(self) -> int:
        return sum((self.weights, self.unpacked, self.parameters, self.arena, self.cache, self.own))

    @property
    def lacks(self) -> str | None:
        """A sentence if the device has less memory free than this."""
        memory = self.backend.memory()
        if memory is None or self.n_bytes <= memory[0]:
            return None
        return (
            f"the run needs {self.n_bytes:,} bytes of {self.backend.name}, of whose {memory[1]:,} "
            f"bytes {memory[0]:,} are free"
        )


def on_devices(
    passes: Passes, parameters: Parameters, held: int, cache: Sequence[Tensor] = ()
) -> list[OnDevice]:
    """What each device takes that computes a part of these graphs and is not the host.

    held: bytes of the parameters with their gradients and moments
    cache: of a session, whose blocks' devices hold it
    """
    by_device: list[OnDevice] = []
    devices = passes.training.devices
    own = {t.root for t in (*parameters.operands.values(), *parameters.gradients.values())}
    for backend, plans in passes.plans.items():
        if backend.is_host:
            continue
        leaves = {leaf for part in passes.parts if part.backend is backend for leaf in part.leaves}
        constant = sum(backend.allocation(t.n_bytes) for t in leaves if is_constant(t))
        inputs = sum(t.n_bytes for t in leaves - own if not is_constant(t))
        arena = passes.arena_bytes(backend)
        beside = _bytes_beside_leaves(backend, plans)
        mine = round(held * parameters.share(devices, backend))
        mine += bytes_of_whole(parameters, devices, backend)
        homes = (devices.home(t) or devices.first for t in cache)
        rows = sum(t.n_bytes for t, home in zip(cache, homes, strict=True) if home is backend)
        driver = backend.own(sum(len(p.graph.nodes) for p in plans))
        by_device.append(OnDevice(backend, constant, beside, mine, arena + inputs, rows, driver))
    return by_device


def limit_slots(passes: Passes, parameters: Parameters, held: int) -> None:
    """Have fewer passes under way at once where a device lacks memory for all of them."""
    while passes.n_slots > 1:
        lacks = filter(None, (d.lacks for d in on_devices(passes, parameters, held)))
        if (lack := next(lacks, None)) is None:
            return
        passes.limit_slots(passes.n_slots - 1, f"with {passes.n_slots} {lack}")


def _bytes_beside_leaves(backend: Backend, plans: Iterable[Plan]) -> int:
    """Bytes of what the device keeps beside leaves for the nodes of these plans."""
    nodes = (t for p in plans for t in p.graph.nodes)
    lasting = dict(chain.from_iterable(map(backend.lasting, nodes)))
    return sum(map(backend.allocation, lasting.values()))
