"""BPE on the words between white space; white space is dropped (jina-embeddings-v2-base-zh)."""

from pyggml.tokenizer import bpe
from pyggml.tokenizer.characters import SPACES, lower_case
from pyggml.tokenizer.codec import Codec
from pyggml.tokenizer.metadata import Metadata
from pyggml.tokenizer.pretokenizers import Pretokenizer
from pyggml.tokenizer.vocabulary import Vocabulary


def codec(metadata: Metadata, vocabulary: Vocabulary, pre: Pretokenizer) -> Codec:
    """The codec of a vocabulary. TokenizerError as from `bpe.codec`."""
    inner = bpe.codec(vocabulary, pre)
    lower = metadata.flag("tokenizer.ggml.normalizer.lowercase", not pre.characters)
    table = _Table(lower)

    def encode(texts: list[str]) -> list[list[int]]:
        cut = [text.translate(table).split(" ") for text in texts]
        encoded = iter(inner.encode([word for words in cut for word in words]))
        return [[id for _ in words for id in next(encoded)] for words in cut]

    return Codec(encode, inner.piece)


class _Table(dict[int, str]):
    """Code point → itself, its lower case, or a space."""

    def __init__(self, lower: bool) -> None:
        self._lower = lower

    def __missing__(self, point: int) -> str:
        char = chr(point)
        lower = " " if char in SPACES else lower_case(char) if self._lower else char
        self[point] = lower
        return lower
