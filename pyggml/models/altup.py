"""AltUp: a residual stream of several vectors, of which a layer works on one (Baykal et al. 2023,
arXiv:2301.13310, as in Gemma 3n).

AltUpStreams   after the embedding: x (T, n_embd) -> the stream (T, n, n_embd)
AltUp          a block: predicts the stream, works on its first vector, corrects all by the result
AltUpMerge     before the last norm: the stream -> (T, n_embd)
"""

from dataclasses import dataclass

from pyggml.graph.tensor import Tensor
from pyggml.models.block import named_branch
from pyggml.models.net import Net
from pyggml.models.norm import Norm
from pyggml.models.part import Part
from pyggml.models.per_layer import PerLayerInput
from pyggml.models.weights import Tensors, TensorSpec, latent_matrix, matrix, merge_tensors
from pyggml.ops import (
    add,
    concat,
    div,
    mul,
    mul_mat,
    narrow,
    out_prod,
    permute,
    repeat,
    repeat_back,
    reshape,
    rms_norm_mul,
    scale,
    sqr,
    sqrt,
    sub,
    sum_rows,
    tanh,
    transpose,
)


@dataclass(frozen=True, slots=True)
class _Streams(Part):
    """A part with a matrix `name` for each vector of the stream but the first."""

    name = ""
    n_embd: int
    n: int

    branch = ""

    def tensors(self, at: str) -> Tensors:
        return latent_matrix(f"{at}{self.name}", self.n - 1, self.n_embd, self.n_embd)


@dataclass(frozen=True, slots=True)
class AltUpStreams(_Streams):
    """x, then n - 1 products of x, as long as x."""

    name = "altup_proj"

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        n_tokens, n_embd = x.shape
        w = reshape(net.weights[f"{at}{self.name}.weight"], (-1, n_embd))
        rest = reshape(mul_mat(w, x), (n_tokens, self.n - 1, n_embd))
        for p in net.updates(f"{at}{self.name}.weight"):
            down = mul_mat(reshape(p.a, (-1, n_embd)), p.input(x, net.inputs.draw))
            down = permute(reshape(scale(down, p.scale), (n_tokens, self.n - 1, -1)), (1, 0, 2))
            rest = add(rest, permute(mul_mat(p.b, down), (1, 0, 2)))
        first = reshape(x, (n_tokens, 1, n_embd))
        return concat(first, _as_long_as(first, rest), 1)


@dataclass(frozen=True, slots=True)
class AltUpMerge(_Streams):
    """The mean of the first vector and products of the others, as long as it."""

    name = "altup_unembd_proj"

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        first = narrow(x, 1, 0, 1)
        rest = permute(narrow(x, 1, 1, self.n - 1), (1, 0, 2))
        y = mul_mat(net.weights[f"{at}{self.name}.weight"], rest)
        for p in net.updates(f"{at}{self.name}.weight"):
            down = scale(mul_mat(p.a, p.input(rest, net.inputs.draw)), p.scale)
            y = add(y, mul_mat(p.b, down))
        all_of_it = concat(first, _as_long_as(first, permute(y, (1, 0, 2))), 1)
        total = repeat_back(all_of_it, (x.shape[0], 1, self.n_embd))
        return scale(reshape(total, (x.shape[0], self.n_embd)), 1 / self.n)


def _as_long_as(first: Tensor, vectors: Tensor) -> Tensor:
    """Vectors (T, n, n_embd), scaled to the length of the first (T, 1, n_embd)."""
    return div(mul(vectors, _length(first)), _length(vectors))


def _length(x: Tensor) -> Tensor:
    return sqrt(sum_rows(sqr(x)))


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUp(Part):
    """p = x + predict(x), y = body(p_0), x' = p + correct(y) (y - p_0); then the others of x' get
    what the layer's own input makes of altup_correct_scale · x'_0.

    predict(x) is a sum of x's vectors for each of them, correct(y) a factor for each. Their weights
    are products of what the router makes of one vector: tanh(altup_router norm(x) / n_embd).

    body   x (T, n_embd) -> (T, n_embd)
    n      vectors of the stream
    norm   of the router
    own    the layer's own input
    """

    body: Part
    n_embd: int
    n: int
    norm: Norm
    own: PerLayerInput

    branch = ""

    def tensors(self, at: str) -> Tensors:
        n = self.n
        predict, correct = (
            matrix(f"{at}altup_{name}_coef", rows, n, bias=False, usual=False)
            for name, rows in (("predict", n * n), ("correct", n))
        )
        router = latent_matrix(f"{at}altup_router", n, self.n_embd)
        factor = {f"{at}altup_correct_scale.weight": TensorSpec((self.n_embd,))}
        parts = (part.tensors(at) for part in (self.norm, self.body, self.own))
        return merge_tensors([router, predict, correct, factor, *parts])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        p = self._predict(net, at, x)
        y = self._correct(net, at, p, self.body(net, at, self._vector(p)))
        first = self._vector(y)
        own = self.own(net, at, mul(first, net.weights[f"{at}altup_correct_scale.weight"]))
        own = named_branch(net, at, self.own, own)
        rest = add(narrow(y, 1, 1, self.n - 1), reshape(own, (x.shape[0], 1, self.n_embd)))
        return concat(narrow(y, 1, 0, 1), rest, 1)

    def _vector(self, x: Tensor) -> Tensor:
        """The first vector of the stream, (T, n_embd)."""
        return reshape(narrow(x, 1, 0, 1), (x.shape[0], self.n_embd))

    def _route(self, net: Net, at: str, x: Tensor, tap: str) -> Tensor:
        """The router's weights (T, n) of x (T, n_embd)."""
        normal = rms_norm_mul(x, net.weights[f"{at}{self.norm.name}.weight"], self.norm.eps)
        routed = net.linear(f"{at}altup_router", scale(normal, 1 / self.n_embd), f"{at}{tap}")
        return tanh(routed)

    def _predict(self, net: Net, at: str, x: Tensor) -> Tensor:
        modes = self._route(net, at, self._vector(x), "altup_before")
        factors = reshape(net.linear(f"{at}altup_predict_coef", modes), (-1, self.n, self.n))
        return add(out_prod(x, transpose(factors)), x)

    def _correct(self, net: Net, at: str, p: Tensor, y: Tensor) -> Tensor:
        modes = self._route(net, at, y, "altup_after")
        factors = scale(net.linear(f"{at}altup_correct_coef", modes), 1.0, 1.0)
        news = reshape(sub(y, self._vector(p)), (-1, 1, self.n_embd))
        return add(mul(repeat(news, p.shape), reshape(factors, (-1, self.n, 1))), p)
