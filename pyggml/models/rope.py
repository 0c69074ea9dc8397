"""Rotary positions (RoPE): hyperparameters, frequency factors and tables of angles."""

from dataclasses import dataclass, replace
from math import log
from typing import Any

from pyggml.graph.tensor import Tensor
from pyggml.models.config import LONG_FACTORS, Reader
from pyggml.models.net import Net
from pyggml.models.weights import Tensors, TensorSpec
from pyggml.ops import (
    add,
    log_temperature,
    mul,
    narrow,
    reshape,
    rope_apply,
    rope_table,
    scale,
    step,
)

_SAME = ("rope_freqs.weight", "rope_freqs.weight")
_SHORT_AND_LONG = ("rope_factors_short.weight", LONG_FACTORS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions on the first n_dims features of a head. Names as in ggml's `rope_ext`.

    mode      "normal" (pairs 2i, 2i + 1) or "neox" (pairs i, i + n_dims/2)
    factors   names of two tensors (n_dims/2,), divisors of the frequencies: the first for sequences
              of up to n_ctx_orig tokens, the second for longer ones; none: no divisors. As in
              transformers; llama.cpp chooses by the context that it allocates
    n_factors length of these tensors, if only their first numbers are used
    """

    mode: str
    n_dims: int
    freq_base: float
    freq_scale: float = 1.0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    n_ctx_orig: int = 0
    factors: tuple[()] | tuple[str, str] = _SAME
    n_factors: int = 0

    def tensors(self) -> Tensors:
        """The tensors of the factors. A file may lack rope_freqs, the one for all contexts."""
        shape = (self.n_factors or self.n_dims // 2,)
        spec = TensorSpec(shape, optional=self.factors == _SAME)
        return dict.fromkeys(self.factors, spec)

    def __call__(self, net: Net, x: Tensor, offset: int = 0) -> Tensor:
        """x (T, heads, d), rotated from feature `offset` on. Layers with equal hyperparameters
        share one table."""
        return rope_apply(x, net.once(self, lambda: self._table(net)), self.mode, offset)

    def further(self, net: Net, x: Tensor, offset: int = 0) -> Tensor:
        """x, rotated before, turned by as many positions more as the inputs say: without YaRN's or
        the file's magnitude, which it has already."""
        yarn = 1 + 0.1 * log(1 / self.freq_scale) if self.ext_factor else 1.0
        return replace(self, attn_factor=1 / yarn)(net, x, offset)

    def divided_by_yarn(self, multiplier: float) -> "Rope":
        """The same; where YaRN lengthens the context, with its magnitude divided by
        1 + 0.1 · multiplier · ln(factor)."""
        if not self.ext_factor or self.freq_scale >= 1:
            return self
        magnitude = 1 - 0.1 * multiplier * log(self.freq_scale)
        return replace(self, attn_factor=self.attn_factor / magnitude)

    def _table(self, net: Net) -> Tensor:
        short, long = self.factors or (None, None)
        if short == long or net.n_ctx <= self.n_ctx_orig:
            return self._table_of(net, short).named("rope table")
        length = reshape(net.inputs.length, (-1, 1, 1))
        is_long = step(scale(length, 1, -self.n_ctx_orig))  # 1 or 0, so that a sum chooses exactly
        is_short = scale(is_long, -1, 1)
        of_short = mul(self._table_of(net, short), is_short)
        return add(of_short, mul(self._table_of(net, long), is_long)).named("rope table")

    def _table_of(self, net: Net, name: str | None) -> Tensor:
        """The table with the factors of this name."""
        factors = None if name is None else net.weights.get(name)
        if factors is not None and self.n_factors:
            factors = narrow(factors, 0, 0, self.n_dims // 2)
        return rope_table(
            net.inputs.positions,
            factors,
            n_dims=self.n_dims,
            freq_base=self.freq_base,
            freq_scale=self.freq_scale,
            ext_factor=self.ext_factor,
            attn_factor=self.attn_factor,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            n_ctx_orig=self.n_ctx_orig,
        )


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries are multiplied by 1 + strength · ln(1 + floor((position + first) / every))."""

    strength: float
    every: int
    first: int = 0

    def __call__(self, net: Net, q: Tensor) -> Tensor:
        return mul(q, net.once(self, lambda: self._factors(net)))

    def _factors(self, net: Net) -> Tensor:
        rows = log_temperature(net.inputs.positions, self.strength, self.every, self.first)
        return reshape(rows, (-1, 1, 1))


def read_temperature(r: Reader, every: int | None = None) -> Temperature | None:
    """The temperature of queries, if the file has one. every: positions of a step; None: the file
    has their number."""
    strength = r.number("attention.temperature_scale", 0.0, 0.0, 1e3)
    if not strength:
        return None
    if every is None:
        every = r.count("attention.temperature_length", 0, least=1, most=1 << 24)
    return Temperature(strength, every)


def check_sections(r: Reader, rope: Rope, interleaved: bool = False) -> None:
    """Refuse rope.dimension_sections that leave a rotary pair without a section.

    The sections are the numbers of pairs that turn by a token's time, height, width and another
    number. In text the first three equal the position, and the other is 0. interleaved: pairs have
    time, height and width by turns, and where two of them have had all of theirs, time: Qwen3-VL's
    24, 20 and 20 of 64. (llama.cpp does not turn these, the slowest: 4e-4 by position 1,000.)
    """
    sections = r.counts("rope.dimension_sections", 4, least=0, most=1 << 12)
    pairs = range(rope.n_dims // 2)
    if interleaved:
        fits = sum(sections[:3]) >= len(pairs) or all(i < 3 * sections[i % 3] for i in pairs)
    else:
        fits = all(i % max(sum(sections), 1) < sum(sections[:3]) for i in pairs)
    if not fits:
        r.faults.append(
            f"rope.dimension_sections are {sections}, wanted time, height or width for each of "
            f"{len(pairs)} pairs"
        )


def read_rope(r: Reader, size: int, mode: str, apart: bool = False) -> Rope:
    """The rotation of heads of `size` features, or of the first n_dims of them.

    Scaling as in llama.cpp's context: YaRN's own magnitude factor is cancelled. apart: layers with
    a window may rotate another number of features; see `read_local_rope`.
    """
    kind = r.word("rope.scaling.type", "linear", ("none", "linear", "yarn", "longrope"))
    legacy = r.number("rope.scale_linear", 0.0, 0.0, 1e6)
    factor = r.number("rope.scaling.factor", legacy, 0.0, 1e6)
    freq_scale = 1.0 if kind == "none" or factor == 0 else 1.0 / factor
    attn_factor = r.number("rope.scaling.attn_factor", 1.0, 1e-3, 1e3)
    yarn = kind == "yarn"
    if yarn and freq_scale > 1:  # below a factor of 1 YaRN has no magnitude, yet ggml divides by it
        attn_factor /= 1.0 + 0.1 * log(1.0 / freq_scale)
    n_dims = _read_n_dims(r, "rope.dimension_count", size, size)
    if not apart:
        r.count("rope.dimension_count_swa", n_dims, least=n_dims, most=n_dims)
    return Rope(
        mode=mode,
        factors=_SHORT_AND_LONG if set(_SHORT_AND_LONG) & r.shapes.keys() else _SAME,
        n_dims=n_dims,
        freq_base=r.number("rope.freq_base", 10000.0, 1.0, 1e12),
        freq_scale=freq_scale,
        ext_factor=1.0 if yarn else 0.0,
        attn_factor=attn_factor,
        n_ctx_orig=r.original_context(),
    )


def read_local_rope(r: Reader, rope: Rope, size: int, base: float = 10000.0, **more: Any) -> Rope:
    """The rotation of layers with a window, with heads of `size` features, beside that of others:
    of a base of its own, by default `base`, without scaling and without the file's factors.

    more: fields that differ further from those of other layers.
    """
    usual: dict[str, Any] = {
        "n_dims": _read_n_dims(r, "rope.dimension_count_swa", rope.n_dims, size),
        "freq_base": r.number("rope.freq_base_swa", base, 1.0, 1e12),
        "freq_scale": 1.0,
        "factors": (),
    }
    return replace(rope, **usual | more)


def _read_n_dims(r: Reader, key: str, default: int, size: int) -> int:
    """How many features of heads of `size` are rotated."""
    n_dims = r.count(key, default, most=1 << 12)
    if n_dims % 2 or n_dims > size:
        r.faults.append(f"{key} is {n_dims}, wanted even and at most {size}")
    return n_dims
