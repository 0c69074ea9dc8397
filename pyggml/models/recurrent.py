"""Common to recurrent parts: their states in the cache, and the short causal convolution."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pyggml.graph.op import Spec
from pyggml.graph.tensor import Shape, Tensor, leaf, zeros
from pyggml.models.net import Net
from pyggml.models.part import Part
from pyggml.models.weights import Tensors, TensorSpec
from pyggml.ops import add, after, reshape, set_rows, ssm_conv, ssm_scan


def initial(net: Net, name: str, shape: Shape) -> Tensor:
    """The state before the first token of a run: the cache's, or zeros."""
    if net.cache is not None:
        return net.cache.state[name]
    return net.once(("zeros", shape), lambda: zeros(shape, name="no state"))


def keep_state(net: Net, name: str, y: Tensor) -> Tensor:
    """y, the result of a recurrent op. With a cache: after its final state is written there."""
    if net.cache is None:
        return y
    state = net.cache.state[name]
    rows = leaf(np.arange(state.shape[0], dtype=np.int32), "all rows")
    return after(y, set_rows(state, y.saved[0], rows))


def scan_from_state(
    net: Net, at: str, shape: Shape, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor
) -> Tensor:
    """The selective scan from the kept state of this shape on."""
    state = initial(net, f"{at}ssm_state", shape)
    y = ssm_scan(state, x, dt, a, b, c, net.inputs.positions).named(f"{at}ssm_scan")
    return keep_state(net, f"{at}ssm_state", y)


@dataclass(frozen=True, slots=True)
class CausalConv(Part):
    """A convolution over the last `width` tokens, for each of n channels, plus a bias.

    apart   the file's tensor has one more axis, of one element, between the two
    """

    name: str
    n: int
    width: int
    bias: bool
    apart: bool = False

    def tensors(self, at: str) -> Tensors:
        shape = (self.n, 1, self.width) if self.apart else (self.n, self.width)
        tensors = {f"{at}{self.name}.weight": TensorSpec(shape, unpacked=True)}
        return tensors | ({f"{at}{self.name}.bias": TensorSpec((self.n,))} if self.bias else {})

    def state(self, at: str) -> Mapping[str, Spec]:
        return {f"{at}{self.name}.state": Spec((self.width - 1, self.n))}

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        name = f"{at}{self.name}"
        state = initial(net, f"{name}.state", (self.width - 1, self.n))
        taps = net.weights[f"{name}.weight"]
        taps = reshape(taps, (self.n, self.width)) if self.apart else taps
        y = ssm_conv(state, x, taps, net.inputs.positions)
        y = keep_state(net, f"{name}.state", y.named(name))
        return add(y, net.weights[f"{name}.bias"]) if self.bias else y
