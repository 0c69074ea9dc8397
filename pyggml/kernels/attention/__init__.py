"""Attention and its gradients, without the matrix of all scores.

An AttentionProblem describes what is asked for. `forward_path` and `backward_path` give the path
that serves it: the first of an ordered table that takes it (pyggml.kernels.attention.table). A path
declares its scratch and binds itself to arrays:

    path = forward_path(problem)
    call = path.call(problem, Forward(q, k, …), memory of path.n_bytes(problem))
"""

from pyggml.kernels.attention.path import AttentionPath, AttentionProblem, Backward, Forward
from pyggml.kernels.attention.table import BACKWARD, FORWARD, backward_path, forward_path

__all__ = [
    "BACKWARD", "FORWARD", "AttentionPath", "AttentionProblem", "Backward", "Forward",
    "backward_path", "forward_path",
]  # fmt: skip
