"""A batch of random tokens, for steps of training."""

import numpy as np

from pyggml.lora.data import WindowBatch


def random_batch(n_sequences: int, n_ctx: int, n_vocab: int) -> WindowBatch:
    """Causal sequences of random tokens in one row, every position trained."""
    n = n_sequences * n_ctx
    ids = np.random.default_rng(0).integers(0, n_vocab, n + 1).astype(np.int32)
    positions = np.tile(np.arange(n_ctx, dtype=np.int32), n_sequences)
    first = np.repeat(np.arange(n_sequences, dtype=np.int32) * n_ctx, n_ctx)
    span = np.stack([first, first + positions + 1], axis=1)
    weights, length = np.full(n, 1 / n, np.float32), np.full(n, n_ctx, np.float32)
    return WindowBatch(ids[:-1], positions, span, ids[1:], weights, length)
