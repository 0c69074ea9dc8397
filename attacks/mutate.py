"""Random changes of bytes: flips, odd numbers, parts that are cut, repeated or foreign.

Every change comes of one seeded generator, so an input is made again by its seed and its number.
"""

import random
from collections.abc import Sequence

# Counts and lengths at which a parser's arithmetic turns: sizes of types, and their neighbours.
_ODD = [0, 1, 2, 7, 8, 31, 32, 127, 128, 255, 256, 32767, 32768, 65535, 65536]
_ODD += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
_MOST_CHANGES = 6


def mutate(rng: random.Random, seeds: Sequence[bytes], words: Sequence[bytes], most: int) -> bytes:
    """One of the seeds after 1 to 6 changes, `most` bytes at most.

    words   parts that the format gives a meaning, put in anywhere
    """
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, _MOST_CHANGES)):
        rng.choice(_CHANGES)(rng, data, seeds, words)
    return bytes(data[:most])


def _flip(rng: random.Random, data: bytearray, *_: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(rng: random.Random, data: bytearray, *_: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)


def _number(rng: random.Random, data: bytearray, *_: Sequence[bytes]) -> None:
    n = rng.choice((1, 2, 4, 8))
    at = rng.randrange(len(data) + 1)
    value = rng.choice(_ODD) + rng.randint(-1, 1)
    data[at : at + n] = (value % (1 << 8 * n)).to_bytes(n, "little")


def _digits(rng: random.Random, data: bytearray, *_: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    data[at : at + rng.randint(0, 4)] = str(rng.choice(_ODD) * rng.choice((1, -1))).encode()


def _cut(rng: random.Random, data: bytearray, *_: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    del data[at : at + rng.choice((1, 2, 4, 8, 32, 1 << 20))]


def _repeat(rng: random.Random, data: bytearray, *_: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    part = data[at : at + rng.choice((1, 4, 8, 64))]
    data[at:at] = part * rng.choice((1, 2, 50))


def _splice(
    rng: random.Random, data: bytearray, seeds: Sequence[bytes], _: Sequence[bytes]
) -> None:
    other = rng.choice(seeds)
    start = rng.randrange(len(other) + 1)
    data[rng.randrange(len(data) + 1) :] = other[start:]


def _word(rng: random.Random, data: bytearray, _: Sequence[bytes], words: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    word = rng.choice(words) if words else rng.randbytes(4)
    data[at : at + rng.choice((0, len(word)))] = word


_CHANGES = (_flip, _set, _number, _digits, _cut, _repeat, _splice, _word)
