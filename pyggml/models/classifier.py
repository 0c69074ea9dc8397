"""What may follow the pooling of a text: a classifier, which scores it, and dense matrices.

Each is in a model where its file has the tensors. A reranker reads a question and a document as one
text; its score is the first of the classifier's outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pyggml.graph.tensor import Shape, Tensor
from pyggml.models.config import ModelConfig, Reader
from pyggml.models.net import Net
from pyggml.models.norm import LayerNorm
from pyggml.models.part import Part
from pyggml.models.weights import Tensors, matrix, merge_tensors
from pyggml.ops import soft_max, tanh

_MOST_LABELS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier(Part):
    """softmax?(cls.output · norm?(activation(cls · x))), of a text's vector x; each step if there.

    pooling      of the texts that it scores
    n_hidden     rows of cls, 0 for none
    n_labels     rows of cls.output, 0 for none
    norm         follows the activation, or None
    softmax      labels are probabilities, as of Qwen 3's "yes" and "no"
    """

    n_embd: int
    pooling: str
    n_hidden: int
    n_labels: int
    activation: Callable[[Tensor], Tensor]
    norm: LayerNorm | None
    softmax: bool

    branch = ""

    def tensors(self, at: str) -> Tensors:
        sizes = {"cls": (self.n_hidden, self.n_embd)}
        sizes["cls.output"] = (self.n_labels, self.n_hidden or self.n_embd)
        parts = [matrix(name, *size, usual=False) for name, size in sizes.items() if size[0]]
        return merge_tensors([*parts, self.norm.tensors("") if self.norm else {}])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        if self.n_hidden:
            x = self.activation(net.linear("cls", x))
            x = self.norm(net, "", x) if self.norm else x
        x = net.linear("cls.output", x) if self.n_labels else x
        return soft_max(x) if self.softmax else x


def _rows(shape: Shape) -> int:
    """Of a matrix, 0 if there is none. One of a single row may lie in a file as a vector."""
    if not shape:
        return 0
    return 1 if len(shape) == 1 else shape[0]


def read_classifier(
    r: Reader,
    c: ModelConfig,
    *,
    activation: Callable[[Tensor], Tensor] = tanh,
    mean: bool = False,
    softmax: bool = False,
    eps: float = 0.0,
) -> Classifier | None:
    """The classifier of a file that has one. mean: texts are pooled so where the file does not say.
    eps: of its norm, if it may have one."""
    rows = [_rows(r.shapes.get(f"{name}.weight", ())) for name in ("cls", "cls.output")]
    usual = "mean" if mean else "last" if c.causal else "cls"
    pooling = r.pooling("classifier.pooling_type")
    if not any(rows) or max(rows) > _MOST_LABELS:
        return None
    return Classifier(
        n_embd=c.n_embd,
        pooling="mean" if pooling == "mean" else usual,
        n_hidden=rows[0],
        n_labels=rows[1],
        activation=activation,
        norm=LayerNorm("cls.norm", rows[0], eps, ("weight",))
        if "cls.norm.weight" in r.shapes
        else None,
        softmax=softmax,
    )


@dataclass(frozen=True, slots=True)
class Dense(Part):
    """dense_3 · dense_2 · x, of a text's vector x (sentence-transformers' Dense modules)."""

    sizes: tuple[tuple[str, int, int], ...]  # of each matrix: name, rows, columns

    branch = ""

    def tensors(self, at: str) -> Tensors:
        return merge_tensors(matrix(name, n, m, usual=False) for name, n, m in self.sizes)

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        for name, *_ in self.sizes:
            x = net.linear(name, x)
        return x


def read_dense(r: Reader, c: ModelConfig) -> Dense | None:
    """The dense matrices of a file that has both."""
    shapes = [r.shapes.get(f"{name}.weight", ()) for name in ("dense_2", "dense_3")]
    if any(len(shape) != 2 for shape in shapes):
        return None
    n = shapes[0][0]
    return Dense((("dense_2", n, c.n_embd), ("dense_3", c.n_embd, n)))
