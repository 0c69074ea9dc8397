"""The mixer of Mamba 2: each head has a state (P × N) with one decay."""

from collections.abc import Mapping
from dataclasses import dataclass

from pyggml.graph.op import Spec
from pyggml.graph.tensor import Shape, Tensor
from pyggml.models.config import Reader, rms_eps
from pyggml.models.net import Net
from pyggml.models.part import Part
from pyggml.models.recurrent import CausalConv, scan_from_state
from pyggml.models.weights import Tensors, TensorSpec, matrix, merge_tensors
from pyggml.ops import add, mul, reshape, rms_norm, silu, split, swiglu

# Keys of small models with it.
STATES: dict[str, object] = {
    "ssm.inner_size": 512,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 2,
    "ssm.conv_kernel": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(Part):
    """ssm_out(norm(silu(z) · (scan(u) + d · u))), with a norm over each of n_groups groups.

    (z, xBC, dt) = ssm_in(x), (u, B, C) = silu(conv(xBC)).

    normed   whether there is that norm
    """

    n_embd: int
    n_inner: int
    n_state: int
    n_head: int
    n_groups: int
    width: int
    eps: float
    normed: bool = True

    @property
    def _conv(self) -> CausalConv:
        n = self.n_inner + 2 * self.n_groups * self.n_state
        return CausalConv("ssm_conv1d", n, self.width, bias=True)

    @property
    def _state(self) -> Shape:
        return self.n_head, self.n_inner // self.n_head, self.n_state

    def tensors(self, at: str) -> Tensors:
        n, h, groups = self.n_inner, self.n_head, self.n_groups
        norm = TensorSpec((groups, n // groups), unpacked=True)
        return merge_tensors(
            [
                matrix(f"{at}ssm_in", n + self._conv.n + h, self.n_embd, bias=False),
                self._conv.tensors(at),
                {f"{at}ssm_dt.bias": TensorSpec((h,))},
                {f"{at}ssm_{x}": TensorSpec((h, 1), unpacked=True) for x in "ad"},
                {f"{at}ssm_norm.weight": norm} if self.normed else {},
                matrix(f"{at}ssm_out", self.n_embd, n, bias=False),
            ]
        )

    def state(self, at: str) -> Mapping[str, Spec]:
        return {**self._conv.state(at), f"{at}ssm_state": Spec(self._state)}

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        n_tokens, n = x.shape[0], self.n_inner
        z, xbc, dt = split(net.linear(f"{at}ssm_in", x), (n, self._conv.n, self.n_head))
        dt = add(dt, net.weights[f"{at}ssm_dt.bias"])
        y = self._scan(net, at, silu(self._conv(net, at, xbc)), dt)
        y = swiglu(z, reshape(y, (n_tokens, n)))
        if self.normed:
            y = rms_norm(reshape(y, (n_tokens, self.n_groups, -1)), self.eps)
            y = reshape(mul(y, net.weights[f"{at}ssm_norm.weight"]), (n_tokens, n))
        return net.linear(f"{at}ssm_out", y)

    def _scan(self, net: Net, at: str, xbc: Tensor, dt: Tensor) -> Tensor:
        """(T, heads, P): the selective scan plus d · x."""
        n_tokens, groups = xbc.shape[0], self.n_groups * self.n_state
        x, b, c = split(xbc, (self.n_inner, groups, groups))
        x = reshape(x, (n_tokens, *self._state[:2]))
        b, c = (reshape(t, (n_tokens, self.n_groups, self.n_state)) for t in (b, c))
        y = scan_from_state(net, at, self._state, x, dt, net.weights[f"{at}ssm_a"], b, c)
        return add(y, mul(x, net.weights[f"{at}ssm_d"]))


def read_mamba2(r: Reader, n_embd: int) -> Mamba2:
    """The mixer of a file."""
    n_inner = r.count("ssm.inner_size", most=1 << 17)
    n_head = r.count("ssm.time_step_rank", most=1 << 16)
    groups = r.count("ssm.group_count", most=1 << 12)
    if n_inner % n_head or n_inner % groups or n_head % groups:
        r.faults.append(
            f"ssm.inner_size {n_inner}, time_step_rank {n_head} and group_count {groups}: wanted "
            "heads that divide the inner size, and groups that divide the heads"
        )
        n_head = groups = 1
    return Mamba2(
        n_embd=n_embd,
        n_inner=n_inner,
        n_state=r.count("ssm.state_size", most=1 << 12),
        n_head=n_head,
        n_groups=groups,
        width=r.count("ssm.conv_kernel", least=2, most=64),
        eps=rms_eps(r),
    )
