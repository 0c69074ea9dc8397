"""Decoders with attention and one feed-forward part a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

import numpy as np

from peers.peer import Peer

Parts = Iterable[tuple[str, np.ndarray]]

TANH = "gelu_pytorch_tanh"  # llama.cpp has no other for these
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
RMS_NORM = {"attention.layer_norm_rms_epsilon": 1e-6}


def rows_beside(n_head: dict[str, int]) -> Callable[[str, np.ndarray], Parts]:
    """Rows of q and k in the order of "normal" rotary pairs: ending of a name -> heads."""

    def convert(name: str, array: np.ndarray) -> Parts:
        for ending, n in n_head.items():
            if name.endswith((f"{ending}.weight", f"{ending}.bias")):
                pairs = array.reshape(n, 2, -1, *array.shape[1:])
                return [(name, pairs.swapaxes(1, 2).reshape(array.shape))]
        return [(name, array)]

    return convert


def grouped(ending: str, n_kv: int, n_q: int) -> Callable[[str, np.ndarray], Parts]:
    """Rows of a packed matrix that lie by groups of n_q queries, a key and a value -> q, k, v."""

    def convert(name: str, array: np.ndarray) -> Parts:
        if not name.endswith((f"{ending}.weight", f"{ending}.bias")):
            return [(name, array)]
        groups = array.reshape(n_kv, n_q + 2, -1, *array.shape[1:])
        parts = (groups[:, :n_q], groups[:, n_q], groups[:, n_q + 1])
        return [(name, np.concatenate([p.reshape(-1, *array.shape[1:]) for p in parts]))]

    return convert


QK_BESIDE = rows_beside({"q_proj": 4, "k_proj": 2})

GPTNEOX = [
    Peer(
        name=f"gptneox{name}",
        architecture="gptneox",
        model="GPTNeoXForCausalLM",
        config={"hidden_act": TANH, "rotary_pct": 0.5, "use_parallel_residual": parallel},
        keys=LAYER_NORM
        | {"rope.dimension_count": 4, "use_parallel_residual": parallel}
        | {"attention.head_count_kv": None},
        convert=grouped("query_key_value", 4, 1),
    )
    for name, parallel in (("", True), ("-sequential", False))
]

DENSE: list[Peer] = list(chain(GPTNEOX))
