"""A decoder's graph under construction: weights, inputs, adapters and a cache.

There is no batch axis. The sequences of a batch follow one another in one row of T tokens; each
token has its position and the span of tokens (or cache rows) that it may attend to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

from pyggml.graph import Graph, Notes
from pyggml.graph.dtypes import F32, I32, DType
from pyggml.graph.op import Spec
from pyggml.graph.tensor import Shape, Tensor, zeros
from pyggml.models.balance import Routing
from pyggml.models.batch_rows import BatchRows, Slots
from pyggml.models.low_rank import LoraPair, LoraPairs
from pyggml.models.spots import Run
from pyggml.models.taps import Taps
from pyggml.models.weights import Weights, factor_of
from pyggml.ops import (
    abs_,
    add,
    add_id,
    chunk_span,
    concat,
    cont,
    cpy,
    get_rows,
    mul,
    mul_mat,
    mul_mat_add,
    mul_mat_id,
    narrow,
    neg,
    relu,
    repeat,
    reshape,
    scale,
    set_rows,
    split,
    sub,
    window_span,
)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The leaves that change from run to run, for T tokens.

    tokens      (T,) int32
    positions   (T,) int32, below n_ctx
    span        (T, 2) int32, the keys that a token attends to: [first, last + 1), as indices of
                tokens of this run or, with a cache, of cache rows
    length      (T,) float32, how many tokens each token's sequence has; read by models whose rotary
                factors depend on it
    rows        (T,) int32, the rows of the cache that keep the tokens' keys and values; None where
                these are the positions
    draw        (3,) int32, seed and number of the random draw (pyggml.ops.arithmetic.dropout);
                None where nothing is drawn: everywhere but in training
    noise       (T,) float32, the most that is added to a number of each token's embedding; None
                for no noise
    batch       the rows that the tokens make up; None: one
    slots       the rows that the tokens are of where each run has others: in generation
    causal      whether a token sees no later ones, as ModelConfig says: `fill` keeps to it
    """

    tokens: Tensor
    positions: Tensor
    span: Tensor
    length: Tensor
    n_ctx: int
    rows: Tensor | None = None
    draw: Tensor | None = None
    noise: Tensor | None = None
    batch: BatchRows | None = None
    slots: Slots | None = None
    causal: bool = True

    @classmethod
    def empty(
        cls, n_tokens: int, n_ctx: int | None = None, with_rows: bool = False, causal: bool = True
    ) -> Inputs:
        """Leaves of zeros, filled by pyggml.models.texts.fill; n_ctx is n_tokens by default."""
        return cls(
            zeros((n_tokens,), I32, "tokens"),
            zeros((n_tokens,), I32, "positions"),
            zeros((n_tokens, 2), I32, "span"),
            zeros((n_tokens,), F32, "length"),
            n_ctx or n_tokens,
            zeros((n_tokens,), I32, "rows") if with_rows else None,
            causal=causal,
        )


@dataclass(frozen=True, slots=True)
class Cache:
    """What is kept of earlier tokens, by name; it starts as zeros.

    n_ctx   the most tokens of a sequence
    rows    keys and values (n_rows, n), a row for each token. One sequence has its rows from 0 on;
            of several, each has a stretch of them
    state   tensors of recurrent parts, whose size does not depend on the number of tokens
    """

    n_ctx: int
    rows: Mapping[str, Tensor]
    state: Mapping[str, Tensor]

    @classmethod
    def empty(
        cls,
        rows: Mapping[str, tuple[int, int]],
        state: Mapping[str, Spec],
        n_ctx: int,
        n_rows: int,
        kinds: Mapping[str, DType],
        make: Callable[[Shape, DType, str], Tensor],
    ) -> Cache:
        """What Decoder.rows() and Decoder.state() ask for; kinds: the types of rows by name.
        make: makes each leaf, whose numbers are 0."""
        return cls(
            n_ctx,
            {
                name: make((n_rows, heads * n), kinds[name], name)
                for name, (heads, n) in rows.items()
            },
            {name: make(s.shape, s.dtype, name) for name, s in state.items()},
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return *self.rows.values(), *self.state.values()


@dataclass(slots=True)
class Net:
    """A decoder's graph under construction: what its parts read, and notes for later passes."""

    weights: Weights
    inputs: Inputs
    adapters: Sequence[LoraPairs] = ()
    cache: Cache | None = None
    taps: Taps | None = None
    turn: str = field(default="", init=False)  # before names while blocks run once more
    logits_of: Tensor | None = field(default=None, init=False)  # (n,) int32; None: all tokens
    routings: list[Routing] = field(default_factory=list, init=False)  # of mixtures' layers
    _made: dict[Hashable, Tensor] = field(default_factory=dict, init=False)
    _left: dict[str, Tensor] = field(default_factory=dict, init=False)
    _steps: list[Tensor] = field(default_factory=list, init=False)
    _boundaries: list[Tensor] = field(default_factory=list, init=False)
    _large: list[Tensor] = field(default_factory=list, init=False)

    @property
    def n_ctx(self) -> int:
        """The most tokens of a sequence."""
        return self.inputs.n_ctx if self.cache is None else self.cache.n_ctx

    def linear(self, name: str, x: Tensor, tap: str = "") -> Tensor:
        """x·Wᵀ, plus the adapters' updates, plus the bias, in llama.cpp's order.

        tap: its name as an activation, if not that of the module.
        """
        full = f"{name}.weight"
        w = self.weights[full]
        y = self._scale(name, mul_mat(w, x).named(name))
        for p in self.updates(full):
            down = scale(mul_mat(p.a, p.input(x, self.inputs.draw)), p.scale)
            y = mul_mat_add(y, p.b, down).named(f"{name}+lora")
            if p.magnitude is not None:
                y = mul(self.large(y), p.row_factors(w)).named(f"{name}+dora")
        bias = self.weights.get(f"{name}.bias")
        return self.in_turn(self.tap(tap or name, y if bias is None else add(y, bias)))

    def by_expert(self, name: str, x: Tensor, ids: Tensor) -> Tensor:
        """As `linear`, but row (t, u) of x (T, U or 1, n_in) has the matrix of expert ids[t, u]."""
        full = f"{name}.weight"
        y = self._scale(name, mul_mat_id(self.weights[full], x, ids).named(name), ids)
        for p in self.updates(full):
            down = mul_mat_id(p.a, p.input(x, self.inputs.draw), ids)
            y = add(y, mul_mat_id(p.b, scale(down, p.scale), ids)).named(f"{name}+lora")
        bias = self.weights.get(f"{name}.bias")
        return self.in_turn(self.tap(name, y if bias is None else add_id(y, bias, ids)))

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows ids (T,) of a table, plus the adapters' updates."""
        full = f"{name}.weight"
        y = get_rows(self.weights[full], ids).named(name)
        for p in self.updates(full):
            y = mul_mat_add(y, p.b, scale(get_rows(p.a, ids), p.scale)).named(f"{name}+lora")
        return self.in_turn(self.tap(name, y))

    def _scale(self, name: str, y: Tensor, ids: Tensor | None = None) -> Tensor:
        """y times the scale that a file keeps beside the blocks of a matrix (NVFP4's), if it has
        one: of the matrix, or of each expert."""
        factor = factor_of(self.weights, f"{name}.weight")
        if factor is None:
            return y
        if ids is None:
            return mul(y, factor)
        rows = get_rows(reshape(factor, (factor.shape[0], 1)), reshape(ids, (-1,)))
        return mul(y, reshape(rows, (*ids.shape, 1)))

    def updates(self, full: str) -> Iterator[LoraPair]:
        """The adapters' updates of one tensor."""
        return (pairs[full] for pairs in self.adapters if full in pairs)

    def tap(self, name: str, x: Tensor, n_heads: int = 0) -> Tensor:
        """x, under a name by which it can be read or changed: pyggml.models.taps lists them.

        n_heads: the heads that its numbers belong to; 0: none
        """
        if self.taps is None:
            return x
        return self.taps(f"{self.turn}{name}", x, self._run, n_heads)

    def asks(self, word: str, *names: str) -> bool:
        """Whether one of these activations is read or changed: they are made on demand alone, by
        patterns that have this word in them."""
        full = [f"{self.turn}{name}" for name in names]
        return self.taps is not None and self.taps.asks(word, full)

    def tap_heads(self, at: str, x: Tensor, n: int) -> Tensor:
        """The results (T, n · size) of n heads, which can be read or changed together and, cut out
        and joined again, each by itself."""
        x = self.tap(f"{at}attention", x, n)
        names = [f"{at}attn_head.{i}" for i in range(n)]
        if not self.asks("attn_head", *names):
            return x
        parts = split(x, (x.shape[-1] // n,) * n)
        return reduce(concat, map(self.tap, names, map(cont, parts)))

    @property
    def _run(self) -> Run:
        """The tokens of this graph, as edits choose them."""
        inputs = self.inputs
        if self.cache is not None:
            slots, of = inputs.slots, self.logits_of
            return Run(inputs.positions, None, self.n_ctx, slots, of, self.once)
        rows = inputs.batch or BatchRows(inputs.tokens.shape)
        return Run(inputs.positions, inputs.length, self.n_ctx, rows, self.logits_of, self.once)

    def in_turn(self, x: Tensor) -> Tensor:
        """x, placed before later calls' tensors in the graph's order; every product with a weight
        comes here. Gradients of their common inputs are summed in the reverse order."""
        self._steps.append(x)
        return x

    def boundary(self, x: Tensor) -> Tensor:
        """x, noted as a layer's input or output: kept when the layers are recomputed."""
        self._boundaries.append(x)
        return x

    def large(self, x: Tensor) -> Tensor:
        """x, noted as a large tensor inside a layer: the backward pass may use a rounded copy."""
        self._large.append(x)
        return x

    def graph(self, **outputs: Tensor) -> Graph:
        """The graph of these outputs and of the activations to read, by name, with the notes."""
        notes = Notes(frozenset(self._boundaries), frozenset(self._large))
        read = self.taps.read if self.taps else {}
        return Graph.of(**outputs, **read, steps=self._steps).with_notes(notes)

    def once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """make(), called once for each key; later calls with the key share its tensor."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def leave(self, name: str, x: Tensor) -> Tensor:
        """x, left for later layers under a name."""
        self._left[name] = x
        return x

    def earlier(self, name: str) -> Tensor:
        """What an earlier part left under a name. As a boundary of layers it is kept when they are
        recomputed."""
        return self.boundary(self._left[name])

    def span(self, window: int = 0, chunk: int = 0, symmetric: bool = False) -> Tensor:
        """The span of each token (T, 2); with a window, only its last `window` keys, or half of
        them before it and half behind it; with chunks of so many positions, only the keys of its
        own."""
        whole, at = self.inputs.span, self.inputs.positions
        if symmetric and window:
            return self.once(("both", window), lambda: _around(whole, at, window // 2))
        if chunk:
            return self.once(("chunk", chunk), lambda: chunk_span(whole, at, chunk))
        if not window:
            return whole
        return self.once(("span", window), lambda: window_span(whole, window))

    def distances(self) -> Tensor:
        """−|distance| of tokens, (T, T): ALiBi's bias, before its slopes, of those that see both
        ways. What those of other texts have is read by none."""

        def build() -> Tensor:
            at, n = cpy(self.inputs.positions, F32), self.inputs.positions.shape[0]
            return neg(abs_(sub(repeat(reshape(at, (1, n)), (n, n)), reshape(at, (n, 1)))))

        return self.once("distances", build)

    def cache_rows(self, name: str) -> Tensor:
        """The rows of the cache that the inputs' tokens number, as float32."""
        assert self.cache is not None
        return get_rows(self.cache.rows[f"{self.turn}{name}"], self.inputs.tokens)

    def remember(self, name: str, rows: Tensor) -> Tensor:
        """Rows (T, ...) of this run. With a cache: all its rows, after this run's are written."""
        if self.cache is None:
            return rows
        cache, inputs = self.cache.rows[f"{self.turn}{name}"], self.inputs
        to = inputs.positions if inputs.rows is None else inputs.rows
        written = set_rows(cache, reshape(rows, (rows.shape[0], -1)), to)
        return reshape(written, (cache.shape[0], *rows.shape[1:]))


def _around(span: Tensor, at: Tensor, n: int) -> Tensor:
    """Spans (T, 2), narrowed to n tokens before the token and n behind it; at (T,): its position,
    counted from the first of its span. In float32, exact below 2²⁴."""
    limits, at = cpy(span, F32), reshape(cpy(at, F32), (-1, 1))
    first, end = (cont(narrow(limits, 1, i, 1)) for i in range(2))
    beyond = sub(sub(end, first), scale(at, 1.0, n + 1.0))  # tokens behind the window
    around = concat(add(first, relu(scale(at, 1.0, -float(n)))), sub(end, relu(beyond)))
    return cpy(around, I32)
