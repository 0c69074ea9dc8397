"""The mixers of Mamba, FalconMamba and Jamba, where each channel has a state (1 × N), and of
PLaMo 2, where each head has a state (P × N)."""

from collections.abc import Mapping
from dataclasses import dataclass

from pyggml.graph.op import Spec
from pyggml.graph.tensor import Shape, Tensor
from pyggml.models.config import Reader, rms_eps
from pyggml.models.net import Net
from pyggml.models.norm import RmsNorm
from pyggml.models.part import Part
from pyggml.models.recurrent import CausalConv, scan_from_state
from pyggml.models.weights import Tensors, TensorSpec, matrix, merge_tensors
from pyggml.ops import add, halve, mul, reshape, silu, split, swiglu


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba(Part):
    """ssm_out(silu(z) · (scan(u) + d · u)), u = silu(conv(x')), (x', z) = ssm_in(x).

    dt_rank   rank of the map from u to the step sizes of all channels
    eps       epsilon of RMS norms of dt, B and C; 0: no norms
    weighted  these norms have weights (Jamba); those of FalconMamba have none
    """

    n_embd: int
    n_inner: int
    n_state: int
    dt_rank: int
    width: int
    eps: float = 0.0
    weighted: bool = False

    @property
    def _conv(self) -> CausalConv:
        return CausalConv("ssm_conv1d", self.n_inner, self.width, bias=True)

    @property
    def _norms(self) -> tuple[RmsNorm, ...]:
        has = ("weight",) if self.weighted else ()
        sizes = {"dt": self.dt_rank, "b": self.n_state, "c": self.n_state}
        return tuple(RmsNorm(f"ssm_{x}_norm", n, self.eps, has) for x, n in sizes.items())

    @property
    def _state(self) -> Shape:
        return self.n_inner, 1, self.n_state

    def tensors(self, at: str) -> Tensors:
        n, n_state = self.n_inner, self.n_state
        return merge_tensors(
            [
                matrix(f"{at}ssm_in", 2 * n, self.n_embd, bias=False),
                self._conv.tensors(at),
                matrix(f"{at}ssm_x", self.dt_rank + 2 * n_state, n, bias=False),
                *(norm.tensors(at) for norm in self._norms),
                matrix(f"{at}ssm_dt", n, self.dt_rank, bias=True),
                {f"{at}ssm_a": TensorSpec((n, n_state), unpacked=True)},
                {f"{at}ssm_d": TensorSpec((n,))},
                matrix(f"{at}ssm_out", self.n_embd, n, bias=False),
            ]
        )

    def state(self, at: str) -> Mapping[str, Spec]:
        return {**self._conv.state(at), f"{at}ssm_state": Spec(self._state)}

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        x, z = halve(net.linear(f"{at}ssm_in", x))
        x = silu(self._conv(net, at, x))
        y = add(self._scan(net, at, x), mul(x, net.weights[f"{at}ssm_d"]))
        return net.linear(f"{at}ssm_out", swiglu(z, y))

    def _scan(self, net: Net, at: str, x: Tensor) -> Tensor:
        """The selective scan of x (T, n_inner); every channel is a head."""
        sizes = (self.dt_rank, self.n_state, self.n_state)
        dt, b, c = split(net.linear(f"{at}ssm_x", x), sizes)
        if self.eps:
            dt, b, c = (norm(net, at, t) for norm, t in zip(self._norms, (dt, b, c), strict=True))
        b, c = (reshape(t, (x.shape[0], 1, self.n_state)) for t in (b, c))
        of_heads, a = reshape(x, (*x.shape, 1)), net.weights[f"{at}ssm_a"]
        dt = net.linear(f"{at}ssm_dt", dt)
        return reshape(scan_from_state(net, at, self._state, of_heads, dt, a, b, c), x.shape)


def read_mamba(r: Reader, n_embd: int, weighted: bool = False) -> Mamba:
    """The mixer of a file. Its norms are those of ssm.dt_b_c_rms, or have weights."""
    return Mamba(
        n_embd=n_embd,
        n_inner=r.count("ssm.inner_size", most=1 << 17),
        n_state=r.count("ssm.state_size", most=1 << 12),
        dt_rank=r.count("ssm.time_step_rank", most=1 << 16),
        width=r.count("ssm.conv_kernel", least=2, most=64),
        eps=rms_eps(r) if weighted or r.flag("ssm.dt_b_c_rms", False) else 0.0,
        weighted=weighted,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaOfHeads(Part):
    """PLaMo 2's: ssm_out(silu(z) · (scan(u) + d · u)), u = silu(conv(x')); ssm_in(x) is (z, x') of
    each head in turn, and the scan has B, C and the step sizes dt of ssm_x(u), normalised.

    dt_rank   rank of the map from u to the step sizes of all heads
    """

    n_embd: int
    n_inner: int
    n_state: int
    n_head: int
    dt_rank: int
    width: int
    eps: float

    @property
    def _conv(self) -> CausalConv:
        return CausalConv("ssm_conv1d", self.n_inner, self.width, bias=False)

    @property
    def _norms(self) -> tuple[RmsNorm, ...]:
        sizes = {"b": self.n_state, "c": self.n_state, "dt": self.dt_rank}
        return tuple(RmsNorm(f"ssm_{x}_norm", n, self.eps, bare=True) for x, n in sizes.items())

    @property
    def _state(self) -> Shape:
        return self.n_head, self.n_inner // self.n_head, self.n_state

    def tensors(self, at: str) -> Tensors:
        n, n_state = self.n_inner, self.n_state
        return merge_tensors(
            [
                matrix(f"{at}ssm_in", 2 * n, self.n_embd, bias=False),
                self._conv.tensors(at),
                matrix(f"{at}ssm_x", self.dt_rank + 2 * n_state, n, bias=False),
                *(norm.tensors(at) for norm in self._norms),
                matrix(f"{at}ssm_dt", self.n_head, self.dt_rank, bias=True),
                {f"{at}ssm_{x}": TensorSpec((self.n_head,), unpacked=True) for x in "ad"},
                matrix(f"{at}ssm_out", self.n_embd, n, bias=False),
            ]
        )

    def state(self, at: str) -> Mapping[str, Spec]:
        return {**self._conv.state(at), f"{at}ssm_state": Spec(self._state)}

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        n_tokens, (n_head, size, _) = x.shape[0], self._state
        z, x = halve(reshape(net.linear(f"{at}ssm_in", x), (n_tokens, n_head, 2 * size)))
        x = silu(self._conv(net, at, reshape(x, (n_tokens, self.n_inner))))
        y = self._scan(net, at, x)
        return net.linear(f"{at}ssm_out", reshape(swiglu(z, y), (n_tokens, self.n_inner)))

    def _scan(self, net: Net, at: str, x: Tensor) -> Tensor:
        """(T, heads, P): the selective scan plus d · x."""
        sizes = (self.n_state, self.n_state, self.dt_rank)
        parts = split(net.linear(f"{at}ssm_x", x), sizes)
        b, c, dt = (norm(net, at, t) for norm, t in zip(self._norms, parts, strict=True))
        x = reshape(x, (x.shape[0], *self._state[:2]))
        a, d = (reshape(net.weights[f"{at}ssm_{n}"], (self.n_head, 1)) for n in "ad")
        b, c = (reshape(t, (x.shape[0], 1, self.n_state)) for t in (b, c))
        y = scan_from_state(net, at, self._state, x, net.linear(f"{at}ssm_dt", dt), a, b, c)
        return add(y, mul(x, d))


def read_mamba_of_heads(r: Reader, n_embd: int) -> MambaOfHeads:
    """The mixer of a file of PLaMo 2; the rank of its step sizes is llama.cpp's."""
    n_inner = r.count("ssm.inner_size", most=1 << 17)
    n_head = r.count("ssm.time_step_rank", most=1 << 16)
    r.count("ssm.group_count", least=0, most=0)
    if n_inner % n_head:
        r.faults.append(f"ssm.inner_size {n_inner} is no multiple of its {n_head} heads")
        n_head = 1
    return MambaOfHeads(
        n_embd=n_embd,
        n_inner=n_inner,
        n_state=r.count("ssm.state_size", most=1 << 12),
        n_head=n_head,
        dt_rank=max(64, n_embd // 16),
        width=r.count("ssm.conv_kernel", least=2, most=64),
        eps=rms_eps(r),
    )
