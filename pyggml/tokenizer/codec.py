"""What a kind of tokenizer makes of a vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Codec:
    """encode         texts → ids of each, without special tokens
    piece          text of a normal token → the bytes that it stands for
    leads          whether `encode` puts a space before a text, which decoding takes off
    for_all_types  whether `piece` holds for every token but control and unknown ones
    """

    encode: Callable[[list[str]], list[list[int]]]
    piece: Callable[[str], bytes]
    leads: bool = False
    for_all_types: bool = False
