"""A graph under construction: inputs, weights, adapters and a cache.

A batch is one row of tokens: sequences lie one after the other, and each token carries its position
and the range of tokens (or cache rows) it may attend to. No axis for the batch is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pyggml.dtypes import F32, I32
from pyggml.graph import Graph, Notes
from pyggml.models.weights import Weights
from pyggml.op import Spec
from pyggml.ops import (
    add,
    add_id,
    get_rows,
    mul_mat,
    mul_mat_add,
    mul_mat_id,
    reshape,
    scale,
    set_rows,
    window_span,
)
from pyggml.tensor import Tensor, zeros


@dataclass(frozen=True, slots=True)
class LoraPair:
    """A low-rank update of one matrix: y += scale · B(A x), A (r, n_in), B (n_out, r).

    Experts have one A and one B each: A (n_expert, r, n_in), B (n_expert, n_out, r). A table's
    update is row i += scale · B A[i], A (n_rows, r), B (n, r).
    """

    a: Tensor
    b: Tensor
    scale: float


# Full tensor name, such as "blk.0.attn_q.weight" -> the update that its product gets.
LoraPairs = Mapping[str, LoraPair]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a graph reads anew on every run; T tokens.

    tokens (T,) int32, positions (T,) int32, span (T, 2) int32: the first key a token sees and the
    one past the last, counted in tokens of this run or, with a cache, in cache rows. Positions are
    below n_ctx.
    """

    tokens: Tensor
    positions: Tensor
    span: Tensor
    n_ctx: int

    @classmethod
    def empty(cls, n_tokens: int, n_ctx: int | None = None) -> Inputs:
        """Leaves to fill, see pyggml.model.fill; n_ctx is n_tokens unless it is given."""
        return cls(
            zeros((n_tokens,), I32, "tokens"),
            zeros((n_tokens,), I32, "positions"),
            zeros((n_tokens, 2), I32, "span"),
            n_ctx or n_tokens,
        )


@dataclass(frozen=True, slots=True)
class Cache:
    """What is kept of earlier tokens, by name: the state that each part of a decoder asks for.

    Keys and values are (n_ctx, n) F16, a row for each position; a part whose memory does not grow
    with the context asks for another shape, in F32. All start as zeros.
    """

    n_ctx: int
    state: Mapping[str, Tensor]

    @classmethod
    def empty(cls, state: Mapping[str, Spec], n_ctx: int, exact: bool = False) -> Cache:
        """A cache for n_ctx tokens; `state` is Decoder.state(n_ctx). exact: all of it in F32."""
        return cls(
            n_ctx,
            {n: zeros(s.shape, F32 if exact else s.dtype, n) for n, s in state.items()},
        )


@dataclass(slots=True)
class Net:
    """A decoder being built: what its parts have at hand, and what is noted on the way."""

    weights: Weights
    inputs: Inputs
    adapters: Sequence[LoraPairs] = ()
    cache: Cache | None = None
    _made: dict[Hashable, Tensor] = field(default_factory=dict, init=False)
    _steps: list[Tensor] = field(default_factory=list, init=False)
    _boundaries: list[Tensor] = field(default_factory=list, init=False)
    _large: list[Tensor] = field(default_factory=list, init=False)

    @property
    def n_ctx(self) -> int:
        """How many tokens a sequence may have here; a model may read them by this length."""
        return self.inputs.n_ctx if self.cache is None else self.cache.n_ctx

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x·Wᵀ with every adapter's update and the bias, if there are any (llama.cpp's order)."""
        full = f"{name}.weight"
        y = mul_mat(self.weights[full], x).named(name)
        for p in self._pairs(full):
            y = mul_mat_add(y, p.b, scale(mul_mat(p.a, x), p.scale)).named(f"{name}+lora")
        bias = self.weights.get(f"{name}.bias")
        return self.in_turn(y if bias is None else add(y, bias))

    def by_expert(self, name: str, x: Tensor, ids: Tensor) -> Tensor:
        """As `linear`, each row of x (T, U or 1, n_in) with the matrix of expert ids[t, u]."""
        full = f"{name}.weight"
        y = mul_mat_id(self.weights[full], x, ids).named(name)
        for p in self._pairs(full):
            update = mul_mat_id(p.b, scale(mul_mat_id(p.a, x, ids), p.scale), ids)
            y = add(y, update).named(f"{name}+lora")
        bias = self.weights.get(f"{name}.bias")
        return self.in_turn(y if bias is None else add_id(y, bias, ids))

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """The rows of a table that ids (T,) name, with every adapter's update of them."""
        full = f"{name}.weight"
        y = get_rows(self.weights[full], ids).named(name)
        for p in self._pairs(full):
            y = mul_mat_add(y, p.b, scale(get_rows(p.a, ids), p.scale)).named(f"{name}+lora")
        return self.in_turn(y)

    def _pairs(self, full: str) -> Iterator[LoraPair]:
        """The updates of one tensor."""
        return (pairs[full] for pairs in self.adapters if full in pairs)

    def in_turn(self, x: Tensor) -> Tensor:
        """x, computed before what is handed here later, as products with weights are; the gradient
        of what several such tensors read is summed in the reverse order."""
        self._steps.append(x)
        return x

    def boundary(self, x: Tensor) -> Tensor:
        """x, noted as what one layer hands to the next: kept where layers are computed again."""
        self._boundaries.append(x)
        return x

    def large(self, x: Tensor) -> Tensor:
        """x, noted as large and inside a layer: the backward pass may read a rounded copy."""
        self._large.append(x)
        return x

    def graph(self, out: Tensor) -> Graph:
        """The graph of a tensor built here, with what was noted."""
        notes = Notes(frozenset(self._boundaries), frozenset(self._large))
        return Graph.of(out, steps=self._steps).noted(notes)

    def once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """What `make` gives; made for the first that asks, shared by all who use the same key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def span(self, window: int = 0) -> Tensor:
        """The keys each token sees (T, 2); with a window, at most the last `window` of them."""
        whole = self.inputs.span
        if not window:
            return whole
        return self.once(("span", window), lambda: window_span(whole, window))

    def remember(self, name: str, rows: Tensor) -> Tensor:
        """Rows (T, ...) of this run; with a cache, all of its rows after these entered theirs."""
        if self.cache is None:
            return rows
        cache = self.cache.state[name]
        written = set_rows(cache, reshape(rows, (rows.shape[0], -1)), self.inputs.positions)
        return reshape(written, (cache.shape[0], *rows.shape[1:]))
