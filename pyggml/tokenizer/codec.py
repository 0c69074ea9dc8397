"""The interface of the kinds of tokenizer: text ↔ ids, without special tokens."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Codec:
    """encode         texts → the ids of each, without special tokens
    piece          spelling of a normal token in the vocabulary → its bytes of text
    leads          `encode` puts a space before a text; decoding removes it
    for_all_types  `piece` serves all tokens but control and unknown ones, not only normal ones
    """

    encode: Callable[[list[str]], list[list[int]]]
    piece: Callable[[str], bytes]
    leads: bool = False
    for_all_types: bool = False
