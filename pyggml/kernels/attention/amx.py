"""The path `amx`: attention in tiles, its products on Intel's tile registers.

Forward, scores are made of split numbers, nearly as exact as float32; the other products round
their factors to bfloat16, as those with weights do. Backward, all factors are rounded, those of the
scores too: training has kept in bfloat16 what q and k are computed from.
"""

from typing import ClassVar

import numpy as np

from pyggml.jit import kernel
from pyggml.jit.frames import Floats3
from pyggml.kernels.attention.amx_tile import (
    BR,
    COLUMNS,
    REGISTERS,
    SPLIT,
    RegisterTiles,
    SplitTiles,
    columns_of,
)
from pyggml.kernels.attention.pair_softmax import softmax_rows
from pyggml.kernels.attention.path import AttentionProblem
from pyggml.kernels.attention.tiled import ForwardTiles, tiled_forward
from pyggml.kernels.attention.tiled_back import PairGradients, own_of_pairs, tiled_backward
from pyggml.kernels.gemm.amx.tiles import SIDE


def _takes(p: AttentionProblem) -> bool:
    """Tiles pay off when they are full. Values are as long as keys."""
    rounds = p.compute != "f32" and not p.has_extras
    fits = p.reads_floats and p.value_size == p.head_size
    return rounds and fits and p.n_queries >= SIDE


class TileForward(SplitTiles, ForwardTiles):
    OWN: ClassVar = {"p": (BR, SPLIT.ldp)}
    p: Floats3

    @kernel
    def softmax(f, thread, i, s, o, m, block, starts, stops):
        p = f.p[thread]
        softmax_rows(p, s, o, m, f.norm[thread], block, f.sizes().group, f.scale)
        return p


class TileBackward(RegisterTiles, PairGradients):
    OWN = own_of_pairs(REGISTERS) | {"columns": COLUMNS}
    columns: Floats3

    @kernel
    def key_weights(f, thread, which, window, n_rows):
        to, pairs = f.columns[thread], f.p_pairs[thread] if which else f.ds_pairs[thread]
        columns_of(to, pairs, window, n_rows)
        return to, to.shape[1], np.int64(1)


FORWARD = tiled_forward("amx", TileForward, _takes)
BACKWARD = tiled_backward("amx", lambda p: TileBackward, _takes)
