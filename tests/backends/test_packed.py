"""Words of packed weights: what a lane of the card's products reads is what the CPU unpacks."""

import numpy as np
import pytest

from pyggml._jit import BlockCode
from pyggml.quants import QUANTS, dequantize

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from pyggml.backends.cuda.packed import groups_of, source_of

NAMES = [
    name
    for name, quant in QUANTS.items()
    if quant.dtype.quantised and not isinstance(quant.decode, BlockCode)
]


def word_at(raw, at, n=4):
    return np.uint64(int.from_bytes(bytes(raw[at : at + n]), "little"))


def look_up(indices, *words):
    table = b"".join(int(word).to_bytes(4, "little") for word in words)
    chosen = (table[byte] for byte in int(indices).to_bytes(4, "little"))
    return np.uint64(int.from_bytes(bytes(chosen), "little"))


def half_e8m0(e):
    return np.ldexp(np.float32(1), int(e) - 128)


KNOWN = {
    "ZERO": np.float32(0),
    "load_byte": lambda raw, at: word_at(raw, at, 1),
    "load_short": lambda raw, at: word_at(raw, at, 2),
    "load_half": lambda raw, at: np.frombuffer(bytes(raw[at : at + 2]), np.float16)[0].astype("f4"),
    **dict.fromkeys(("load_word", "load_shorts", "load_bytes"), word_at),
    "as_float": lambda word: np.uint32(word).view(np.float32),
    "half_e8m0": half_e8m0,
    "look_up": look_up,
}


class Wide:
    """NumPy whose whole numbers are wide, as the results of Numba's are."""

    int32 = staticmethod(lambda x: np.int64(np.uint64(x).astype(np.uint32).view(np.int32)))
    uint32 = staticmethod(lambda x: np.uint64(np.uint64(x) & np.uint64(0xFFFFFFFF)))
    float32 = np.float32


@pytest.mark.parametrize("name", NAMES)
def test_the_words_of_a_block_are_its_weights(name):
    block_bytes = QUANTS[name].dtype.block_bytes
    raw = np.random.default_rng(7).integers(0, 256, block_bytes, np.uint8)
    with np.errstate(all="ignore"):
        wanted = dequantize(raw, name)
        known = {**KNOWN, "np": Wide}
        exec(source_of(name), known)
        found = np.empty((len(groups_of(name)), 2, 4, 4), np.float32)
        for q in range(4):
            for group, parts in zip(found, known["unpack"](raw, 0, q), strict=True):
                *words, first, second, minimum = parts
                second = second if groups_of(name)[0].scales[0] else first
                for half, scale in enumerate((first, second)):
                    bytes_ = (int(words[half]) & 0xFFFFFFFF).to_bytes(4, "little")
                    group[half, q] = scale * np.frombuffer(bytes_, np.int8).astype("f4") + minimum
    np.testing.assert_allclose(found.reshape(-1), wanted.reshape(-1), rtol=1e-6, equal_nan=True)
