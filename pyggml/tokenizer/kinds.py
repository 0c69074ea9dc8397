"""tokenizer.ggml.model → the codec, and the special tokens around a text.

kind        codec                            added by default
llama       BPE by scores                    BOS
gpt2        BPE by merges, mostly on bytes   BOS with some pre-tokenizers
whitespace  BPE by merges, on words          BOS with some pre-tokenizers
gemma4      BPE by merges, on characters     BOS, always
t5          unigram                          EOS
bert        WordPiece                        BOS ([CLS]) and SEP, always
rwkv        longest match                    nothing, always

A file's add_bos_token and add_eos_token replace the default, but not where it says "always".
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pyggml.errors import TokenizerError
from pyggml.tokenizer import bpe, rwkv, spm, unigram, whitespace, wordpiece
from pyggml.tokenizer.codec import Codec
from pyggml.tokenizer.metadata import Metadata
from pyggml.tokenizer.pretokenizers import Pretokenizer, pretokenizer
from pyggml.tokenizer.vocabulary import Vocabulary

KINDS = ("gpt2", "llama", "gemma4", "t5", "bert", "rwkv", "whitespace")
_SEPARATED = ("jina-v1-en", "jina-v2-code", "roberta-bpe")  # pre-tokenizers that add a separator
_PRETOKENIZED = ("gpt2", "whitespace")
Roles = Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class Affixes:
    """The special tokens around a text: BOS before it, that with the role `after` behind it."""

    adds_before: bool
    adds_after: bool
    after: str = "eos"

    def ids(self, roles: Roles) -> tuple[list[int], list[int]]:
        """The ids before and after a text. TokenizerError if such a token is missing."""
        before = [_require(roles, "bos")] if self.adds_before else []
        after = [_require(roles, self.after)] if self.adds_after else []
        return before, after


def _require(roles: Roles, role: str) -> int:
    id = roles[role]
    if id is None:
        raise TokenizerError(f"a text is to have a {role} token added, but there is no {role}")
    return id


def pair_affixes(metadata: Metadata, frame: Affixes, roles: Roles) -> tuple[list[int], list[int]]:
    """The special tokens between two texts that are read as one, and those behind the second: EOS
    and a separator, and EOS, where the tokenizer adds them."""
    wordpiece = frame.after == "sep"
    sep = [id for id in [roles["sep"]] if id is not None]
    eos = sep if roles["eos"] is None else [roles["eos"]]
    ends = metadata.flag("tokenizer.ggml.add_eos_token", not wordpiece and frame.adds_after)
    pre = metadata.text("tokenizer.ggml.pre")
    separates = metadata.flag("tokenizer.ggml.add_sep_token", wordpiece or pre in _SEPARATED)
    after = [id for id in eos if id is not None] if ends else []
    return [*after, *(sep if separates else [])], after


def read_pretokenizer(kind: str, metadata: Metadata) -> Pretokenizer | None:
    """The pre-tokenizer; None for kinds without one. TokenizerError for an unknown name."""
    if kind == "gemma4":
        return pretokenizer("gemma4")
    return pretokenizer(metadata.text("tokenizer.ggml.pre")) if kind in _PRETOKENIZED else None


def read_codec(
    kind: str, metadata: Metadata, vocabulary: Vocabulary, roles: Roles, pre: Pretokenizer | None
) -> Codec:
    """The codec of this kind. TokenizerError if the vocabulary is unsuitable for it."""
    match kind:
        case "llama":
            return spm.codec(metadata, vocabulary)
        case "t5":
            return unigram.codec(metadata, vocabulary, roles["unk"])
        case "bert":
            return wordpiece.codec(metadata, vocabulary, roles["unk"])
        case "rwkv":
            return rwkv.codec(vocabulary)
    assert pre is not None
    if kind == "whitespace":
        return whitespace.codec(metadata, vocabulary, pre)
    return bpe.codec(vocabulary, pre)


def read_frame(kind: str, metadata: Metadata, pre: Pretokenizer | None) -> Affixes:
    if kind == "rwkv":
        return Affixes(False, False)
    if kind == "bert":
        return Affixes(True, True, "sep")
    before = metadata.flag("tokenizer.ggml.add_bos_token", pre.add_bos if pre else kind == "llama")
    after = metadata.flag("tokenizer.ggml.add_eos_token", kind == "t5")
    return Affixes(before or (pre is not None and pre.always_bos), after)
