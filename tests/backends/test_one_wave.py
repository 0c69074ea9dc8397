"""The tiles of products of which each multiprocessor of a card takes one."""

import pytest
from extras import need

need("numba_cuda")


@pytest.mark.parametrize(
    ("m", "n", "k", "sizes"),
    [
        (2048, 128, 6152, (32, 64)),
        (2048, 96, 2072, (32, 64)),
        (6144, 128, 2064, (96, 64)),
        (1024, 128, 2072, (32, 64)),  # there is no smaller one
        (512, 128, 2072, None),  # most multiprocessors would have none
        (3072, 128, 2072, None),  # likewise, of the larger tile
        (2048, 128, 12304, None),  # long sums, which several blocks share
        (8192, 128, 2072, None),  # no tile is that large
        (4096, 64, 4096, None),  # cuBLAS chooses for other numbers of rows
        (2048, 129, 2072, None),
    ],
)
def test_a_tile_for_each_multiprocessor(m, n, k, sizes):
    from pyggml.backends.cuda.gemm import one_wave

    tile = None if sizes is None else one_wave._TILES[sizes]
    assert one_wave.tile_of(m, n, k, 132) == tile
    assert one_wave.tile_of(m, n, k, 0) is None
