"""Cross entropy of rows of logits x, one number for each row.

cross_entropy_by_row      L_i = w_i·(ln Σ e^x − x[target_i])

Losses that are more than a sum over tokens use it. `cross_entropy_rows` is the sum of its terms.
"""

from __future__ import annotations

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NO_SETTINGS, Memory, Spec, op
from pyggml.graph.tensor import Tensor, leaf
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.arithmetic.arith import mul
from pyggml.ops.loss.loss import (
    cross_entropies,
    cross_entropy_rows_back,
    cross_entropy_rows_samples,
    expect_targets,
    log_softmax,
    rows_fit,
)


def cross_entropy_by_row(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The terms of `cross_entropy_rows`, (n,) F32.

    logits (n, n_vocab) F32, targets (n,) I32, weights (n,) F32. The kernel raises PyggmlError if
    a target is outside the vocabulary, whatever its weight.
    """
    return CROSS_ENTROPY_BY_ROW(logits, targets, weights)


def _spec(logits: Tensor, targets: Tensor, weights: Tensor) -> Spec:
    rows_fit("cross_entropy_by_row", logits, targets, weights)
    return Spec(targets.shape)


def _compute(out: np.ndarray, x: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> None:
    expect_targets(targets, x.shape[1])
    np.multiply(weights, cross_entropies(x, targets), out=out, casting="same_kind")


def _run(site: Site) -> Call:
    return Call(_compute, site.out, *site.src)


def _ref(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.asarray(-weights * log_softmax(logits)[np.arange(len(targets)), targets])


def _grad(node: Tensor, d: Tensor) -> tuple[Tensor | None, ...]:
    """dlogits_i = dy_i · weight_i · (softmax(logits_i) - target_i)

    This is cross_entropy_rows_back with each row's weight multiplied by its d.
    """
    logits, targets, weights = node.src
    one = leaf(np.ones((), np.float32))
    return cross_entropy_rows_back(one, logits, targets, mul(weights, d)), None, None


CROSS_ENTROPY_BY_ROW = op(
    name="cross_entropy_by_row",
    ggml=GGMLOp.CUSTOM,
    spec=_spec,
    ref=_ref,
    grad=_grad,
    samples=cross_entropy_rows_samples,
    refuses=NO_SETTINGS,
    memory=Memory.FRESH,
    costly=True,
)
cpu_kernel(CROSS_ENTROPY_BY_ROW, _run)
