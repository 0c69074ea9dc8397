"""SentencePiece BPE by scores: spaces become "▁" (U+2581), then pairs merge, the highest score
first.

The library `sentencepiece` encodes, with a ModelProto written here:

    ModelProto        1 pieces*  2 trainer_spec  3 normalizer_spec
    SentencePiece     1 piece: string  2 score: float  3 type: enum
    TrainerSpec       3 model_type: 2 = BPE  35 byte_fallback: bool
    NormalizerSpec    1 name: string  3 add_dummy_prefix  4 remove_extra_whitespaces: bool

Every token but the byte tokens is a normal piece, because llama.cpp merges to tokens of all types.
"""

from pyggml.errors import TokenizerError
from pyggml.gguf.fields import brief
from pyggml.tokenizer.codec import Codec
from pyggml.tokenizer.metadata import Metadata
from pyggml.tokenizer.vocabulary import Vocabulary

SPACE = "\u2581"
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
NORMAL, UNKNOWN, BYTE = b"\x18\x01", b"\x18\x02", b"\x18\x06"  # SentencePiece.type
BYTE_FALLBACK = b"\x98\x02\x01"
TRAINER = b"\x18\x02" + BYTE_FALLBACK
VERBATIM = b"\x18\x00\x20\x00"  # no dummy prefix, no collapsing of spaces


def codec(metadata: Metadata, vocabulary: Vocabulary) -> Codec:
    """The codec of a vocabulary. TokenizerError if a byte token is missing: text would get lost."""
    missing = sorted(BYTE_TOKENS - vocabulary.ids.keys())
    if missing:
        raise TokenizerError(
            f"{len(missing)} of the 256 byte tokens are missing, the first is {missing[0]}"
        )
    from sentencepiece import SentencePieceProcessor

    try:
        processor = SentencePieceProcessor(model_proto=model_proto(vocabulary))
    except RuntimeError as error:
        raise TokenizerError(f"sentencepiece refuses the vocabulary: {brief(str(error))}") from None

    leads = metadata.flag("tokenizer.ggml.add_space_prefix", True)

    def encode(texts: list[str]) -> list[list[int]]:
        return [processor.encode(" " + text if leads else text) for text in texts]

    return Codec(encode, piece, leads=leads)


def model_proto(vocabulary: Vocabulary) -> bytes:
    """The vocabulary as sentencepiece's model file, plus the unknown piece it requires."""
    scores = vocabulary.scores.astype("<f4").tobytes()
    parts = []
    for i, text in enumerate(vocabulary.tokens):
        kind = BYTE if text in BYTE_TOKENS else NORMAL
        score = b"\x15" + scores[4 * i : 4 * i + 4]
        parts.append(_field(1, _field(1, text.encode()) + score + kind))
    unknown = "unknown"
    while unknown in vocabulary.ids:
        unknown += "-"
    parts.append(_field(1, _field(1, unknown.encode()) + UNKNOWN))
    parts += [_field(2, TRAINER), _field(3, _field(1, b"identity") + VERBATIM)]
    return b"".join(parts)


def _field(number: int, payload: bytes) -> bytes:
    """A protobuf field of wire type 2: tag, length as a varint, bytes."""
    length, varint = len(payload), bytearray()
    while length > 127:
        varint.append(length & 127 | 128)
        length >>= 7
    return bytes((number << 3 | 2, *varint, length)) + payload


def piece(text: str) -> bytes:
    """The bytes of a normal token."""
    return text.replace(SPACE, " ").encode()
