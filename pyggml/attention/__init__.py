"""Attention and its gradients, without the matrix of all scores.

A Problem says what is asked for; `forward_path` and `backward_path` find the path that serves it,
the first of an ordered table that takes it (pyggml.attention.table). A path says what scratch it
needs and binds itself to arrays:

    path = forward_path(problem)
    call = path.call(problem, Forward(q, k, …), memory of path.n_bytes(problem))
"""

from pyggml.attention.path import Backward, Forward, Path, Problem
from pyggml.attention.table import BACKWARD, FORWARD, backward_path, forward_path

__all__ = [
    "BACKWARD",
    "FORWARD",
    "Backward",
    "Forward",
    "Path",
    "Problem",
    "backward_path",
    "forward_path",
]
