"""ModelOnDevices: the parts of a model, and the devices that compute graphs of them."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

from pyggml.backends import Backend
from pyggml.backends.cpu import CPU
from pyggml.errors import ConfigError
from pyggml.graph import Graph
from pyggml.graph.arrays import array, is_constant
from pyggml.graph.dtypes import BF16, F16, F32, DType
from pyggml.graph.tensor import Tensor, zeros
from pyggml.kernels.gemm import FASTEST
from pyggml.kernels.kernel import Compute
from pyggml.models.build import Parts, build
from pyggml.models.config import ModelConfig
from pyggml.models.low_rank import LoraPairs
from pyggml.models.net import Cache, Inputs, Net
from pyggml.models.placement import Placement, group_of, lack_of, most_layers
from pyggml.models.streaming import WORDS, Streaming, block_bytes, fewest_blocks, stream_blocks
from pyggml.models.taps import Taps
from pyggml.runtime import Arenas, Devices, Program, Schedule, bind, schedule


class ModelOnDevices:
    """`devices` run its graphs: `backends` first, and the CPU for the rest. `release`: free the
    pages of a weight after each use, as training does where memory is scarce. The process stays
    small, at a cost of 0.1 ms a MB."""

    def __init__(
        self, parts: Parts, compute: Compute | Literal["auto"], backends: Sequence[Backend]
    ) -> None:
        self.parts, self.compute = parts, compute
        self.backend = CPU(FASTEST if compute == "auto" else compute)
        self.devices = Devices([*backends, self.backend])
        self.devices.hold(*parts.weights.values())
        self.group(parts.weights)
        weights = filter(is_constant, parts.weights.values())
        self.devices.backends[0].expect(map(array, weights))
        self.adapters: tuple[LoraPairs, ...] = ()
        self.release = False
        self.placement: Placement | None = None  # None: the first device that can computes all
        self.streaming: Streaming | None = None  # None: all weights lie where they are used

    @property
    def rounds(self) -> bool:
        """Whether products with its weights round what they multiply."""
        packed = any(w.dtype is not F32 for w in self.parts.weights.values())
        return packed and self.backend.compute != "f32"

    @property
    def kept_as(self) -> DType:
        """The type in which training keeps a layer's large tensors: rounded if products round."""
        return BF16 if self.rounds else F32

    @property
    def config(self) -> ModelConfig:
        return self.parts.config

    @cached_property
    def batches(self) -> bool:
        """Whether tokens of several sequences can share a pass with a cache: not where recurrent
        parts have one state."""
        return not self.parts.decoder.state()

    @property
    def shifts(self) -> bool:
        """Whether cached tokens can move to other positions. Recurrent states cannot, nor tokens
        to which learned positions were added."""
        return self.batches and not self.parts.decoder.n_positions

    def plan(self, out: Tensor, taps: Taps | None = None) -> Schedule:
        """A graph of this model and of the activations to read, planned; no memory is taken."""
        return schedule(Graph.of(out, *(taps.read.values() if taps else ())), self.devices)

    def program(
        self, out: Tensor, taps: Taps | None = None, arenas: Arenas | None = None
    ) -> Program:
        """The same, bound to memory of its own or to these arenas."""
        return bind(self.plan(out, taps), self.release, arenas)

    # -- where blocks are computed -----------------------------------------------------------------

    def group(self, leaves: Mapping[str, Tensor]) -> None:
        """Note the block that each leaf belongs to, by its name: a device gets both or neither."""
        for name, leaf in leaves.items():
            self.devices.group(group_of(name), leaf)

    def place(self, n_layers: int, shares: Sequence[float] = ()) -> Placement:
        """Have the devices beside the CPU compute the last blocks, and the output if there are more
        layers than blocks, each its share. It holds of graphs that are scheduled from now on.

        Raises ConfigError for shares that are not one for each device.
        """
        devices = self.devices.beside_host
        placement = Placement.of(self.config.n_layer, self.backend, devices, n_layers, shares)
        self.devices.homes, self.devices.first = placement.homes, placement.first
        self.placement = placement
        return placement

    def place_what_fits(
        self, lack: Callable[[], str | None], shares: Sequence[float] = ()
    ) -> Placement:
        """`place` with the most layers that fit. lack: what a device lacks for the layers that are
        placed, as `lack_of` says it."""

        def lack_for(n_layers: int) -> str | None:
            self.place(n_layers, shares)
            return lack()

        n_layers, why = most_layers(self.config.n_layer + 1, lack_for)
        self.placement = replace(self.place(n_layers, shares), why=why)
        return self.placement

    def stream(self, n_blocks: int, why: str = "") -> None:
        """Leave the weights of so many blocks in the file: a device that computes with them gets
        them in every pass, some ahead of their use. Raises ConfigError where no device can."""
        n_all = self.config.n_layer
        self.streaming = stream_blocks(self.parts.weights, self.devices, n_all, n_blocks, why)

    def stream_for(self, lack: str, left: Callable[[], int]) -> None:
        """Stream as few blocks as memory allows. lack: why not none; left: the bytes of the device
        that are left with the blocks that stream when it is called, below 0 if they are too few."""
        self.stream(n_all := self.config.n_layer)
        n = fewest_blocks(block_bytes(self.parts.weights), n_all, left())
        self.stream(max(n, 1), lack)

    def lack_in_use(self) -> str | None:
        """What a device lacks for a pass of 512 tokens over a cache of 4,096."""
        plan = self._plan_in_use()
        return next(filter(None, (lack_of(b, plan.bytes_on(b)) for b in plan.plans)), None)

    def left_in_use(self) -> int:
        """Bytes that the first device has left beside such a pass."""
        device, plan = self.devices.backends[0], self._plan_in_use()
        return (device.memory() or (0, 0))[0] - plan.bytes_on(device)

    def _plan_in_use(self) -> Schedule:
        decoder, c = self.parts.decoder, self.config
        inputs = Inputs.empty(min(512, c.n_ctx), with_rows=True)
        n = min(4096, c.n_ctx)
        kinds = dict.fromkeys(decoder.rows(), F32 if self.compute == "f32" else F16)
        cache = Cache.empty(decoder.rows(), decoder.state(), n, n, kinds, zeros)
        self.group({**cache.rows, **cache.state})
        if decoder.has_output:
            out = build(self.parts, inputs, self.adapters, cache)
        else:
            out = decoder.hidden(Net(self.parts.weights, Inputs.empty(min(512, c.n_ctx))))
        return self.plan(out)

    def place_as_said(
        self, gpu_layers: int | str, shares: Sequence[float], device: str
    ) -> Placement | None:
        """Place a model's blocks, as `load` says. None: on the one device are all."""
        n_all = self.config.n_layer + 1
        devices = self.devices.beside_host
        n = n_all if gpu_layers in ("all", "auto") else gpu_layers
        if isinstance(n, str) or n < 0:
            choice = "wanted the number of blocks on the device, all or auto"
            raise ConfigError([("gpu_layers", f"is {gpu_layers}, {choice}")])
        if not devices and device == "auto":
            about = "and no card can be used: the CPU computes all blocks"
            warnings.warn(f"gpu_layers is {gpu_layers}, {about}", RuntimeWarning, stacklevel=3)
            return None
        if not devices:
            choice = "wanted a device beside the CPU: device cuda, webgpu or auto"
            word = ",".join(f"{share:g}" for share in shares)
            given = ("split", word) if word and gpu_layers == "all" else ("gpu_layers", gpu_layers)
            raise ConfigError([(given[0], f"is {given[1]}, {choice}")])
        if gpu_layers == "auto":
            return self.place_what_fits(self.lack_in_use, shares)
        if n >= n_all and len(devices) == 1 and not shares:
            return None
        return self.place(n, shares)

    def stream_as_said(self, word: str) -> None:
        """Have weights stream, as `load` says."""
        if word not in WORDS:
            raise ConfigError([("stream_weights", f"is {word!r}, known are {', '.join(WORDS)}")])
        if word == "on":
            self.stream(self.config.n_layer)
        if word != "auto" or self.placement is not None:
            return
        device = self.devices.backends[0]
        memory = device.memory()
        weights = sum(w.n_bytes for w in self.parts.weights.values())
        is_tight = device.streamed is not None and memory is not None and 3 * weights > memory[0]
        if is_tight and (lack := self.lack_in_use()):
            self.stream_for(lack, self.left_in_use)
