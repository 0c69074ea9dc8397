"""The float16 scales of a type's blocks, read out of its decoder: where they lie, what each makes.

A weight is a sum of parts, one for each scale of its block: x = d·q, or x = d·s·q − dmin·m. With
the other scales 0, a block unpacks to the part of one of them. That part is also the slope of x
along a relative change u of the scale, d·(1 + u): so no type needs a formula of its own.
"""

from functools import cache, partial
from typing import Any, cast

import numpy as np

from pyggml.jit import exact
from pyggml.quants.bits import f16_to_float, float_to_f16
from pyggml.quants.layout import Block, Decoder
from pyggml.quants.readers.arrays import ArrayBlock
from pyggml.quants.registry import QUANTS, quant
from pyggml.quants.unpack import UNPACK
from pyggml.quants.whole import share_blocks

_NIBBLES = 4  # of a float16; IQ1_M keeps them in four bytes


class _ScalesSeen(ArrayBlock):
    """Blocks with one bit each, after whose decoder `patterns` has the bits of each float16."""

    def __init__(self, block_bytes: int, block: int) -> None:
        n = 8 * block_bytes
        raw = np.packbits(np.eye(n, dtype=np.uint8), axis=1, bitorder="little")
        super().__init__(raw, np.zeros((n, block), np.float32))
        self.patterns: list[np.ndarray] = []  # uint16 (8 · block_bytes,) each

    def f16(self, offset: int, n: int = 1) -> np.ndarray:
        self.patterns += [*self._numbers(offset, n, "<u2").T]
        return super().f16(offset, n)

    def half(self, ints: np.ndarray) -> np.ndarray:
        self.patterns += [*ints.astype(np.uint16).T]
        return super().half(ints)


def _places(decoder: Decoder, block_bytes: int, block: int) -> list[tuple[int, ...]]:
    """For each whole float16 of a block its 16 bits' numbers, the lowest first."""
    seen = _ScalesSeen(block_bytes, block)
    with np.errstate(all="ignore"):
        decoder(seen)
    bits = [[np.flatnonzero(p >> i & 1) for i in range(16)] for p in seen.patterns]
    whole = [tuple(int(b[0]) for b in each) for each in bits if all(b.size == 1 for b in each)]
    return [*dict.fromkeys(whole)]


@cache
def scale_places(name: str) -> np.ndarray:
    """int64 (n_scales, 4, 2): the nibbles of each scale of a block, the lowest first, by byte and
    first bit. None of MXFP4 and NVFP4, whose scales are no float16, nor of plain types."""
    q = quant(name)
    bits = _places(q.decode, q.dtype.block_bytes, q.dtype.block) if q.dtype.quantised else []
    nibbles = [[divmod(each[i], 8) for i in range(0, 16, 4)] for each in bits]
    places = np.array(nibbles, np.int64).reshape(-1, _NIBBLES, 2)
    places.flags.writeable = False
    return places


class _OneScale:
    """A block whose other float16 scales are 0. Types with several have them as whole float16."""

    def __init__(self, block: Block, place: int) -> None:
        self._block, self._place = block, place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    def f16(self, offset: int, n: int = 1) -> Any:
        is_kept = offset == self._place
        return self._block.f16(offset, n) if is_kept else self._block.constant(0.0)


def parts_of(name: str) -> list[Decoder]:
    """For each scale of a type's blocks, the decoder of the part that it makes of the weights."""
    decoder, places = quant(name).decode, scale_places(name)[:, 0, 0].tolist()
    if len(places) == 1:
        return [decoder]
    return [partial(_decode_one, decoder, at) for at in places]


def _decode_one(decoder: Decoder, place: int, block: Block) -> None:
    decoder(cast(Block, _OneScale(block, place)))


def types_with_scales() -> list[str]:
    """The types whose blocks have float16 scales."""
    return [name for name in QUANTS if len(scale_places(name))]


@exact
def _bits(block, place):
    bits = 0
    for i in range(_NIBBLES):
        bits |= ((np.int64(block[place[i, 0]]) >> place[i, 1]) & 15) << (4 * i)
    return bits


@exact
def _put(block, place, bits):
    for i in range(_NIBBLES):
        byte, at = place[i, 0], place[i, 1]
        rest = np.int64(block[byte]) & ~(15 << at)
        block[byte] = np.uint8(rest | ((bits >> (4 * i)) & 15) << at)


@exact
def _rescale(blocks, u, places):
    for b in range(blocks.shape[0]):
        for k in range(places.shape[0]):
            d = f16_to_float(np.uint16(_bits(blocks[b], places[k])))
            new = float_to_f16(np.float32(d * np.float32(np.float32(1) + u[b, k])))
            _put(blocks[b], places[k], np.int64(new))


@exact
def _keep_one(blocks, places, kept):
    """Make all scales but one 0."""
    for b in range(blocks.shape[0]):
        for k in range(places.shape[0]):
            if k != kept:
                _put(blocks[b], places[k], 0)


def rescale(raw: np.ndarray, u: np.ndarray, name: str, out: np.ndarray | None = None) -> np.ndarray:
    """Blocks with each scale d as the float16 nearest to d·(1 + u).

    raw: uint8 (…, row_bytes); u: float32 (…, blocks of a row, scales of a block), without gaps.
    Returns uint8 like raw, or `out`.
    """
    q, places = quant(name), scale_places(name)
    out = np.empty(raw.shape, np.uint8) if out is None else out
    np.copyto(out, raw)
    blocks = out.reshape(-1, q.dtype.block_bytes)
    changes = u.reshape(len(blocks), len(places))

    def work(start: int, stop: int) -> None:
        _rescale(blocks[start:stop], changes[start:stop], places)

    share_blocks(len(blocks), q.dtype.block, work)
    return out


def scale_sums(raw: np.ndarray, dw: np.ndarray, name: str, out: np.ndarray) -> None:
    """Write to `out` the slopes along u of Σ dw·W, where W is what `rescale` makes at u = 0.

    raw: uint8 (…, row_bytes); dw: float32, of the weights; out: float32 like u. All without gaps.
    """
    q, places = quant(name), scale_places(name)
    blocks = raw.reshape(-1, q.dtype.block_bytes)
    slopes, sums = dw.reshape(-1, q.dtype.block), out.reshape(-1, len(places))

    def work(start: int, stop: int) -> None:
        part = np.empty((stop - start, q.dtype.block), np.float32)
        for k in range(len(places)):
            own = blocks[start:stop]
            if len(places) > 1:
                own = own.copy()
                _keep_one(own, places, k)
            UNPACK[name](part, own, len(own))
            np.einsum("bi,bi->b", part, slopes[start:stop], out=sums[start:stop, k])

    share_blocks(len(blocks), q.dtype.block, work)
