"""The circuits of attention heads (Elhage et al. 2021): which tokens a head looks for, and what it
writes when it has found one.

qk_circuit       what a query and a key score, as a matrix of the two residual streams
ov_circuit       what a head adds for a residual stream that it reads
promoted_tokens  the tokens whose logits a head raises most where it reads a token
copying_score    whether a head raises the logit of the token that it reads

Matrices multiply rows from the right: x @ left @ right. They stand as two factors of the rank of a
head, (n_embd, size) and (size, n_embd), and no product of vocabulary × vocabulary is ever made.
A norm counts as its weight: the stream that a circuit reads is x / rms(x), or (x − mean x) / std x.
Biases are left out, updates by adapters are not.
"""

from dataclasses import dataclass

import numpy as np

from pyggml.errors import ConfigError, DataError
from pyggml.graph.arrays import write
from pyggml.graph.tensor import leaf
from pyggml.lab.linear import (
    Branch,
    attention_branch,
    check_head,
    embeddings,
    exact,
    matrix_columns,
    matrix_rows,
    norm_weight,
    pass_norm,
    read_norm,
    refusal,
    refuse_between,
    unembed,
)
from pyggml.model import Model
from pyggml.models import Inputs, Net
from pyggml.models.attention import Attention
from pyggml.models.norm import LayerNorm, Norm
from pyggml.runtime import run

_ROWS = 4096  # of the embedding that are multiplied at a time


@dataclass(frozen=True, slots=True, eq=False)
class Factored:
    """A matrix (n, m) of low rank: left (n, r) @ right (r, m), float64."""

    left: np.ndarray
    right: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[1]

    def full(self) -> np.ndarray:
        """All of it, (n, m)."""
        return np.asarray(self.left @ self.right)

    def eigenvalues(self) -> np.ndarray:
        """(r,) complex, the largest first: all that are not 0. ConfigError if n is not m."""
        if self.shape[0] != self.shape[1]:
            raise ConfigError(f"a matrix of {self.shape} has no eigenvalues")
        values = np.linalg.eigvals(self.right @ self.left)
        return values[np.argsort(-np.abs(values))]

    def singular_values(self) -> np.ndarray:
        """(r,), the largest first: all that are not 0."""
        left, right = np.linalg.qr(self.left)[1], np.linalg.qr(self.right.T)[1]
        return np.linalg.svd(left @ right.T, compute_uv=False)


def ov_circuit(model: Model, layer: int, head: int) -> Factored:
    """What a head adds (…, n_embd) for a stream x (…, n_embd) that it reads: x @ left @ right.

    Heads that share keys and values, as in grouped-query attention, have the same left. Of a block
    that normalises what attention gives, as gemma2, that norm's weight counts and its scale does
    not. Raises ConfigError for a head that there is not, and where heads are no matrices: gates and
    norms of values or of what heads give, keys of other blocks, latent keys.
    """
    check_head(model, layer, head)
    model = exact(model)
    branch, part = attention_branch(model, layer)
    refuse_between(model, layer)
    if part.v_norm is not None:
        raise refusal(model, layer, "normalises values, so that no matrix makes them")
    at, h = f"blk.{layer}.", part.heads
    left = _reading(model, branch, part, at, "v", head // (h.n // h.n_kv))
    right = matrix_columns(model, f"{at}attn_output", head * h.value_size, h.value_size)
    for norm in branch.after:
        assert isinstance(norm, Norm)
        right = pass_norm(model, norm, at, right)
    return Factored(left, branch.factor * right.astype(np.float64))


def qk_circuit(model: Model, layer: int, head: int, distance: int = 0) -> Factored:
    """The score of a query's stream x and a key's stream y: x @ left @ right @ y, before softmax.

    distance: how many tokens the key lies before the query; rotary positions turn the two apart by
    it, and where there are none it changes nothing. Norms of queries and keys (qwen3) count as
    their weights: the score is then up to a positive factor for each query and each key. ALiBi's
    bias, softcaps and temperatures are left out. Raises ConfigError for a head that there is not, a
    distance outside the model's context, and heads that are no matrices.
    """
    check_head(model, layer, head)
    if not 0 <= distance < model.config.n_ctx:
        raise ConfigError(
            f"distance is {distance}, wanted 0 to {model.config.n_ctx - 1}, in the model's context"
        )
    model = exact(model)
    branch, part = attention_branch(model, layer)
    at, h = f"blk.{layer}.", part.heads
    q = _reading(model, branch, part, at, "q", head)
    k = _reading(model, branch, part, at, "k", head // (h.n // h.n_kv))
    q = _rotation_at(model, part, at, part.q_norm, q, head, distance)
    k = _rotation_at(model, part, at, part.k_norm, k, head // (h.n // h.n_kv), 0)
    return Factored((part.scale or h.size**-0.5) * q, k.T)


def promoted_tokens(
    model: Model, layer: int, head: int, token: int, n: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """The n tokens (n,) int64 whose logits a head raises most where it attends to `token`, and by
    how much (n,) float64, up to one positive factor: that of the norms.

    The token is read as it is embedded, without what earlier blocks add to it. Raises DataError
    for a token outside the vocabulary, ConfigError as `ov_circuit` does.
    """
    ids = model.check_tokens([token])
    if not 1 <= n <= model.config.n_vocab:
        raise DataError(f"n is {n}, wanted 1 to the {model.config.n_vocab} tokens there are")
    circuit = ov_circuit(model, layer, head)
    model = exact(model)
    (logits,) = unembed(model, embeddings(model, ids) @ circuit.left @ circuit.right)
    best = np.argsort(-logits, kind="stable")[:n]
    return best, logits[best].astype(np.float64)


def copying_score(model: Model, layer: int, head: int) -> float:
    """Σ λ / Σ |λ| of the eigenvalues of embedding · OV · unembedding (n_vocab, n_vocab): 1 for a
    head that raises the logits of what it reads, −1 for one that lowers them.

    As in Elhage et al. 2021. The matrix has the rank of a head's size, so that its eigenvalues are
    those of a matrix of that size.
    Raises ConfigError as `ov_circuit` does.
    """
    circuit = ov_circuit(model, layer, head)
    model = exact(model)
    out = unembed(model, circuit.right)  # (size, n_vocab)
    inner = np.zeros((len(out), len(out)))
    for first in range(0, model.config.n_vocab, _ROWS):
        ids = np.arange(first, min(first + _ROWS, model.config.n_vocab))
        inner += out[:, ids].astype(np.float64) @ (embeddings(model, ids) @ circuit.left)
    values = np.linalg.eigvals(inner)
    return float(values.sum().real / np.abs(values).sum())


def _reading(
    model: Model, branch: Branch, part: Attention, at: str, name: str, head: int
) -> np.ndarray:
    """What makes a head's query, key or value of the normalised stream: (n_embd, size) float64."""
    size = part.heads.value_size if name == "v" else part.heads.size
    if part.fused_qkv:
        sizes = part.sizes
        before = {"q": 0, "k": sizes["q"], "v": sizes["q"] + sizes["k"]}[name]
        rows = matrix_rows(model, f"{at}attn_qkv", before + head * size, size)
    else:
        lacks = name == "v" and f"{at}attn_v.weight" not in model.parts.weights
        rows = matrix_rows(model, f"{at}attn_{'k' if lacks else name}", head * size, size)
    rows = rows.astype(np.float64)
    for norm in reversed(branch.before):
        assert isinstance(norm, Norm)
        rows = read_norm(model, norm, at, rows)
    return rows.T


def _rotation_at(
    model: Model, part: Attention, at: str, norm: Norm | None, x: np.ndarray, head: int, to: int
) -> np.ndarray:
    """Rows (n, size) of queries or keys as they are scored at position `to`: rotated, and times the
    weight of their norm, before or after."""
    if part.norms_last:
        return _scale(model, at, norm, _rotate(model, part, x, to), head)
    return _rotate(model, part, _scale(model, at, norm, x, head), to)


def _rotate(model: Model, part: Attention, x: np.ndarray, to: int) -> np.ndarray:
    if part.rope is None:
        return x
    inputs = Inputs.empty(len(x), to + 1)
    write(inputs.positions, np.full(len(x), to))
    write(inputs.length, np.full(len(x), to + 1))
    net = Net(model.parts.weights, inputs)
    (y,) = run(part.rope(net, leaf(x.astype(np.float32)[:, None])), devices=model.devices)
    return y[:, 0].astype(np.float64)


def _scale(model: Model, at: str, norm: Norm | None, x: np.ndarray, head: int) -> np.ndarray:
    """Rows (n, size) of one head times the weight of the norm of all heads, or of each."""
    if norm is None:
        return x
    w = norm_weight(model, norm, at)
    size = x.shape[1]
    if w.size > size:
        w = w.reshape(-1, size)[head]
    if isinstance(norm, LayerNorm) and norm.size == size:
        x = x - x.mean(axis=-1, keepdims=True)
    return x * w
