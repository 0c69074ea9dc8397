"""Muon: momentum, made orthogonal, for the matrices of blocks (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/); AdamW for embeddings, the head, norms and biases.

m = μ·m + (1 − μ)·g,   u = μ·m + (1 − μ)·g,   X = u / ‖u‖
five times  X = a·X + (b·S + c·S²)·X,   S = X·Xᵀ                (Newton and Schulz's iteration)
W = W·(1 − α·wd) − α·0.2·√max(rows, columns)·X

μ is β1. The last factor makes a step as long as AdamW's, so that rate and decay are its (Liu et al.
2025, arXiv:2502.16982). Each expert is a matrix of its own.
"""

from math import prod, sqrt

from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Shape, Tensor, zeros
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.config import TrainConfig
from pyggml.lora.optim.adamw import FlatAdamW
from pyggml.ops import add, mul_mat, opt_step_sgd, out_prod, reshape, rms_norm, scale
from pyggml.ops.optim import OPT_STEP_SGD
from pyggml.runtime import Devices, schedule

_QUINTIC, _N_ITERATIONS = (3.4445, -4.7750, 2.0315), 5
_SIZE = 0.2  # the root mean square of AdamW's steps
_NONE = 1e-30  # mean of squares of a gradient that is 0


class FlatMuon(FlatAdamW):
    """One graph for each tensor."""

    is_by_tensor = True

    def __init__(
        self, parameters: Parameters, config: TrainConfig, devices: Devices | None = None
    ) -> None:
        super().__init__(parameters, config, devices)
        self._of_matrices = {rate: zeros((2,), F32, "settings") for rate in self._settings}
        self._mean = zeros((2,), F32, "mean")  # with which SGD's step is that of a running mean
        write(self._mean, (config.beta1 - 1, -1))

    @property
    def work_bytes(self) -> int:
        """Those of the largest matrix, unless they are the training graph's."""
        tensors = self.parameters.tensors
        sizes = {n: t.n_elements for n, t in tensors.items() if _is_matrix(n, t.shape)}
        if not sizes or self.config.step_in_backward:
            return 0
        name = max(sizes, key=lambda n: sizes[n])
        step = self.step_of(name, self.parameters.gradients[name])
        return schedule(Graph.of(step), Devices()).n_bytes

    def begin(self, lr: float, n: int) -> None:
        super().begin(lr, n)
        for rate, settings in self._of_matrices.items():
            write(settings, (rate * lr, self.config.weight_decay))

    def step_of(self, name: str, gradient: Tensor) -> Tensor:
        p, mu = self.parameters, self.config.beta1
        w = p.tensors[name]
        if not _is_matrix(name, w.shape):
            return super().step_of(name, gradient)
        m = opt_step_sgd(p.part(name, p.m), gradient, self._mean)
        step = orthogonal(add(scale(m, mu), scale(gradient, 1 - mu)))
        factor = _SIZE * sqrt(max(w.shape[-2:]))
        return self._step(OPT_STEP_SGD, name, scale(step, factor), self._of_matrices[p.rate(name)])


def orthogonal(x: Tensor) -> Tensor:
    """Matrices (…, rows, columns) with the singular vectors of x, and singular values near 1."""
    n, is_tall, (a, b, c) = prod(x.shape[-2:]), x.shape[-2] > x.shape[-1], _QUINTIC
    rows: Shape = (*x.shape[:-2], n)
    x = reshape(scale(rms_norm(reshape(x, rows), _NONE), n**-0.5), x.shape)
    for _ in range(_N_ITERATIONS):
        s = out_prod(x, x) if is_tall else mul_mat(x, x)
        polynomial = add(scale(s, b), scale(mul_mat(s, s), c))
        moved = mul_mat(polynomial, x) if is_tall else out_prod(x, polynomial)
        x = add(scale(x, a), moved)
    return x


def _is_matrix(name: str, shape: Shape) -> bool:
    return name.startswith("blk.") and len(shape) > 1 and min(shape[-2:]) > 1
