"""The numbers that RWKV 6 and 7 start from: those of BlinkDL's RWKV-LM, in `RWKV-v5/src/model.py`
(RWKV_Tmix_x060) and `RWKV-v7/train_temp/src/model.py` (RWKV_Tmix_x070), both with
`generate_init_weight`.

Vectors rise or fall along the channels, by a law that changes with the layer. Matrices are
orthogonal; those that write into the residual stream, and the first of each low-rank pair, are 0.
"""

import re
from collections.abc import Callable
from math import sqrt

import numpy as np

from pyggml.graph.tensor import Shape

SIX, SEVEN = "rwkv6", "rwkv7"
HEAD_SIZE = 64  # of published models; llama.cpp takes no shorter ones of RWKV 7
# The exponent of each row of time_mix_lerp_fused, as a multiple of the depth that is left.
_EXPONENTS = {SIX: (1, 1, 1, 0.5, 0.5), SEVEN: (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)}
_VALUES_OF_SIX = 2  # the row of v
_ZERO = re.compile(r"time_mix_(output|[wavg]1|decay_w1)|channel_mix_(value|receptance)")
_NARROW = re.compile(r"time_mix_(w2|decay_w2)")  # of RWKV 6; uniform
_SMALL = re.compile(r"time_mix_(key|gate|[wavg]2)")


def first_numbers(
    name: str,
    shape: Shape,
    architecture: str,
    depth: tuple[int, int],
    size: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """float32 numbers of a tensor, its name without "blk.N." and ".weight".

    depth   the number of the block, and of how many
    size    of a head
    """
    if name == "token_embd":
        return rng.uniform(-1e-4, 1e-4, shape).astype(np.float32)
    if name == "output":
        return _orthogonal(shape, 0.5 * sqrt(max(shape[0] / shape[1], 1)), rng)
    if name.endswith("bias"):
        return np.zeros(shape, np.float32)
    if "lerp" in name:
        return _lerps(name, shape, architecture, depth)
    if len(shape) == 1 or name == "time_mix_first":
        return _vector(name, shape, architecture, depth, size)
    is_unread = name == "time_mix_v1" and depth[0] == 0  # it would stay 0
    if _ZERO.fullmatch(name) and not is_unread:
        return np.zeros(shape, np.float32)
    if architecture == SIX and _NARROW.fullmatch(name):
        return rng.uniform(-0.01, 0.01, shape).astype(np.float32)
    return _orthogonal(shape, 0.1 if _SMALL.fullmatch(name) else 1, rng)


def sizes(architecture: str, width: int) -> dict[str, int]:
    """Hyperparameters of a model of this width, by GGUF's keys without the architecture's name:
    the repository's, by which heads have no number, and ranks grow with √width."""
    own = {"wkv.head_size": HEAD_SIZE, "attention.head_count": 0, "attention.head_count_kv": 0}
    if architecture == SIX:
        rest = {"time_mix_extra_dim": 32, "time_decay_extra_dim": 64, "rescale_every_n_layers": 0}
        return {**own, **rest, "feed_forward_length": 7 * width // 2 // 32 * 32}
    factors = {"decay": 2.5, "iclr": 2.5, "value_residual_mix": 1.7, "gate": 5}
    return own | {
        f"attention.{key}_lora_rank": max(32, round(factor * sqrt(width) / 32) * 32)
        for key, factor in factors.items()
    }


def _orthogonal(shape: Shape, gain: float, rng: np.random.Generator) -> np.ndarray:
    """gain · Q of a random matrix, with orthonormal rows or columns, whichever are fewer."""
    rows, columns = max(shape), min(shape)
    q, r = np.linalg.qr(rng.standard_normal((rows, columns), np.float32))
    q *= gain * np.sign(np.diag(r))
    return np.ascontiguousarray(q if shape[0] == rows else q.T)


def _lerps(name: str, shape: Shape, architecture: str, depth: tuple[int, int]) -> np.ndarray:
    """1 − (channel / n)^exponent: how much of the token before each channel takes."""
    n, left = shape[-1], 1 - depth[0] / depth[1]
    along = np.arange(n) / n
    if name == "time_mix_lerp_fused":
        rows = [1 - along ** (e * left) for e in _EXPONENTS[architecture]]
        if architecture == SIX:
            rows[_VALUES_OF_SIX] -= 0.3 * _place(depth)
        return np.stack(rows).astype(np.float32).reshape(shape)
    is_channel_7 = architecture == SEVEN and name == "channel_mix_lerp_k"
    return (1 - along ** (left**4 if is_channel_7 else left)).astype(np.float32)


def _vector(
    name: str, shape: Shape, architecture: str, depth: tuple[int, int], size: int
) -> np.ndarray:
    """The vectors of a time mix by their laws; a norm of the stream is 1."""
    n, place = int(np.prod(shape)), _place(depth)
    i = np.arange(n)
    along, wave = i / max(n - 1, 1), 2 * (i % size) / max(size - 1, 1) - 1
    wave *= abs(wave)
    slope = along - 0.5
    laws: dict[str, Callable[[], np.ndarray | float]] = {
        "time_mix_ln": lambda: ((1 + depth[0]) / depth[1]) ** 0.7,
        "time_mix_decay": lambda: -6 + 5 * along ** (0.7 + 1.3 * place),
        "time_mix_first": lambda: place * (1 - along) + 0.1 * ((i + 1) % 3 - 1),
        "time_mix_w0": lambda: -5.5 + 6 * along ** (1 + place**0.3) + 2.5 * wave,
        "time_mix_a0": lambda: -0.19 + 0.3 * wave + 0.4 * slope,
        "time_mix_v0": lambda: 0.73 - 0.4 * slope,
        "time_mix_k_k": lambda: 0.71 - 0.1 * slope,
        "time_mix_k_a": lambda: 1.02,
        "time_mix_r_k": lambda: -0.04,
    }
    return np.full(n, laws.get(name, lambda: 1.0)(), np.float32).reshape(shape)


def _place(depth: tuple[int, int]) -> float:
    """0 in the first block, 1 in the last."""
    return depth[0] / max(depth[1] - 1, 1)
