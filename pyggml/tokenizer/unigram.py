"""SentencePiece unigram (T5): the segmentation of a text with the highest sum of scores.

Text → replacements (charsmap) → spaces become "▁" (U+2581) → Viterbi. The library `tokenizers`
adds scores in float64, as llama.cpp does; `sentencepiece` uses float32 and differs on long texts.
An unknown character scores 10 less than the worst normal token; adjacent ones become one unknown
token. User-defined tokens score 0; control and byte tokens are excluded.
"""

from typing import Any

import numpy as np

from pyggml.errors import TokenizerError
from pyggml.gguf.fields import brief
from pyggml.tokenizer.charsmap import Charsmap
from pyggml.tokenizer.codec import Codec
from pyggml.tokenizer.metadata import Metadata
from pyggml.tokenizer.spm import SPACE, piece
from pyggml.tokenizer.vocabulary import Attr, Vocabulary

_SEARCHED = Attr.NORMAL | Attr.USER_DEFINED | Attr.UNUSED


def codec(metadata: Metadata, vocabulary: Vocabulary, unknown: int | None) -> Codec:
    """The codec of a vocabulary. TokenizerError without an unknown token or without normal tokens,
    or if the charsmap is damaged."""
    if unknown is None:
        raise TokenizerError("kind 't5' needs an unknown token, and there is none")
    model, charsmap = _model(vocabulary, unknown), _charsmap(metadata, vocabulary)
    merges = metadata.flag("tokenizer.ggml.remove_extra_whitespaces", False)
    leads = metadata.flag("tokenizer.ggml.add_space_prefix", False)

    def normal(text: str) -> str:
        if charsmap is not None:
            text = charsmap.apply(text)
        if merges:
            return "".join(SPACE + word for word in text.split(" ") if word)
        lead = " " if leads and text.strip(" ") else ""
        return (lead + text).replace(" ", SPACE)

    def encode(texts: list[str]) -> list[list[int]]:
        batch = [normal(text) for text in texts]
        return [e.ids for e in model.encode_batch_fast(batch, add_special_tokens=False)]

    return Codec(encode, piece, leads=leads or merges)


def _charsmap(metadata: Metadata, vocabulary: Vocabulary) -> Charsmap | None:
    raw = metadata.raw("tokenizer.ggml.precompiled_charsmap")
    keep = [vocabulary.tokens[id] for id in vocabulary.having(Attr.USER_DEFINED)]
    return None if raw is None else Charsmap(raw, keep)


def _model(vocabulary: Vocabulary, unknown: int) -> Any:
    """The library's model. It scores unknown characters 10 below the worst of *all* tokens, even
    excluded ones. So excluded tokens, and unused ones below every normal token (padding), get the
    worst normal score, and a name with a space, which no text has at this point."""
    from tokenizers import Tokenizer
    from tokenizers.models import Unigram

    attrs, scores = vocabulary.attrs, vocabulary.scores.astype(float)
    normal = scores[attrs & Attr.NORMAL != 0]
    if not len(normal):
        raise TokenizerError("kind 't5' needs normal tokens, and there are none")
    worst = float(normal.min())
    scores[attrs & Attr.USER_DEFINED != 0] = 0.0
    searched = (attrs & _SEARCHED != 0) & (scores >= worst)
    names = [
        text if is_found else f" {i}"
        for i, (text, is_found) in enumerate(zip(vocabulary.tokens, searched.tolist(), strict=True))
    ]
    pairs = list(zip(names, np.where(searched, scores, worst).tolist(), strict=True))
    try:
        return Tokenizer(Unigram(pairs, unknown, False))
    except Exception as error:  # the library has no narrower type
        raise TokenizerError(f"tokenizers refuses the vocabulary: {brief(str(error))}") from None
