"""Text → [BOS] ids [EOS] and back.

encode   cut at special tokens (partition) → [space +] each piece → the kind's encoder → ids
decode   bytes of all tokens, joined → UTF-8
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from pyggml import gguf, heap
from pyggml.errors import TokenizerError
from pyggml.gguf.fields import brief
from pyggml.tokenizer.codec import Codec
from pyggml.tokenizer.kinds import (
    KINDS,
    Affixes,
    pair_affixes,
    read_codec,
    read_frame,
    read_pretokenizer,
)
from pyggml.tokenizer.metadata import INPUTS, TEMPLATE, Metadata
from pyggml.tokenizer.offsets import locate
from pyggml.tokenizer.partition import TextPart, partition
from pyggml.tokenizer.special import Specials, read_specials
from pyggml.tokenizer.vocabulary import BYTE_TOKEN, TOKENS, Attr, read_vocabulary, spelling


class Tokenizer:
    """Encodes and decodes texts. Made by `from_gguf`.

    n_vocab                                 number of tokens
    bos_id, eos_id, eot_id, pad_id, unk_id  int, or None where the vocabulary has none
    add_bos, add_eos                        whether `encode` adds them (`bert`: [CLS] and [SEP])
    chat_templates                          name → Jinja2 source; "" is the one without a name
    chat_inputs                             further inputs of these, JSON; "" if there are none
    """

    def __init__(
        self,
        metadata: Metadata,
        specials: Specials,
        codec: Codec,
        make_codec: Callable[[], Codec],
        frame: Affixes,
    ) -> None:
        self.n_vocab = len(specials.attrs)
        self.bos_id = specials.roles["bos"]
        self.eos_id = specials.roles["eos"]
        self.eot_id = specials.roles["eot"]
        self.pad_id = specials.roles["pad"]
        self.unk_id = specials.roles["unk"]
        self.add_bos, self.add_eos = frame.adds_before, frame.adds_after
        self.chat_templates = metadata.variants(TEMPLATE)
        self.chat_inputs = metadata.text(INPUTS) or ""
        self._metadata = metadata
        self._before, self._after = frame.ids(specials.roles)
        self._between = pair_affixes(metadata, frame, specials.roles)
        self._codec, self._make_codec = codec, make_codec
        self._matched, self._ends = specials.matched, specials.ends
        self._attrs, texts = specials.attrs, metadata.strings(TOKENS) or []
        self._spelling = lru_cache(1 << 14)(lambda id: spelling(id, texts[id]))

    @cached_property
    def identity(self) -> str:
        """SHA-256 of what the file says of its tokenizer: the same text has the same ids."""
        return self._metadata.digest()

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """The ids of a text, equal to llama_tokenize's.

        add_special     add BOS if `add_bos`, and EOS if `add_eos`
        parse_special   the names of control tokens in the text become those tokens; otherwise they
                        are plain text. User-defined tokens are always found.

        A byte without a token (some `gpt2` vocabularies lack control characters) gives no id.
        TokenizerError for text with half of a surrogate pair, which UTF-8 cannot hold.
        """
        _check_text(text)
        ids = list(self._before) if add_special else []
        for _, part_ids in self._encode_parts(text, partition(text, self._matched, parse_special)):
            ids += part_ids
        return [*ids, *self._after] if add_special else ids

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text that is to go on, as chats have them: names of control tokens are these
        tokens, BOS comes first where `add_bos`, not twice where the text has it, and no EOS last.

        Raises TokenizerError as `encode`.
        """
        ids = self.encode(text, add_special=False, parse_special=True)
        before = list(self._before)
        return ids if ids[: len(before)] == before else before + ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Two texts as one, as rerankers read a question and a document; control names in them are
        plain text. By the template "rerank" if there is one, which has {query} and {document}, else
        with the special tokens that llama-server puts before, between and after them."""
        if template := self.chat_templates.get("rerank"):
            return self._fill_template(template, {"query": first, "document": second})
        between, after = self._between
        parts = [self.encode(text, add_special=False) for text in (first, second)]
        return [*self._before, *parts[0], *between, *parts[1], *after]

    def _fill_template(self, template: str, texts: Mapping[str, str]) -> list[int]:
        text, plain = "", list[tuple[int, int]]()
        for i, piece in enumerate(re.split(r"\{(query|document)\}", template)):
            filled = texts[piece] if i % 2 else piece
            _check_text(filled)
            plain += [(len(text), len(text) + len(filled))] if i % 2 else []
            text += filled
        parts = partition(text, self._matched, True, plain)
        return [id for _, ids in self._encode_parts(text, parts) for id in ids]

    def encode_with_offsets(
        self, text: str, plain: Sequence[tuple[int, int]] = ()
    ) -> tuple[list[int], np.ndarray]:
        """As `encode` with parse_special and nothing added, with the characters of each token.

        plain: ranges of characters in which the names of control tokens are plain text.
        Offsets are (n, 2) int64, [first, last + 1); tokens that share a character overlap, and a
        space put before a piece of text counts as its first character. Raises TokenizerError as
        `encode`, and where the tokens do not spell the text, as those of `bert`, which normalises.
        """
        _check_text(text)
        ids, offsets = list[int](), [np.empty((0, 2), np.int64)]
        parts = partition(text, self._matched, True, plain)
        for part, part_ids in self._encode_parts(text, parts):
            ids += part_ids
            if part.id is not None:
                offsets.append(np.array([[part.start, part.end]]))
                continue
            spelled = [self.token_bytes(id, special=True) for id in part_ids]
            offsets.append(part.start + locate(text[part.start : part.end], spelled))
        return ids, np.concatenate(offsets)

    def rest(self) -> None:
        """Free what encoding needs, 50 MB of 150,000 tokens; the next `encode` makes it anew."""

        def encode(texts: list[str]) -> list[list[int]]:
            self._codec = self._make_codec()
            return self._codec.encode(texts)

        self._codec = replace(self._codec, encode=encode)
        heap.give_back()

    def control_names(self) -> tuple[str, ...]:
        """The names of tokens that only parse_special finds in a text, the longest first."""
        return tuple(special.text for special in self._matched if special.hidden)

    def special_texts(self) -> dict[str, str]:
        """The texts of BOS, EOS, padding and unknown token, as chat templates name them."""
        roles = {"bos": self.bos_id, "eos": self.eos_id, "pad": self.pad_id, "unk": self.unk_id}
        return {f"{role}_token": self._spelling(id) for role, id in roles.items() if id is not None}

    def _encode_parts(
        self, text: str, parts: list[TextPart]
    ) -> Iterator[tuple[TextPart, Sequence[int]]]:
        """Each part with its ids."""
        texts = [text[part.start : part.end] for part in parts if part.id is None]
        encoded = iter(self._codec.encode(texts))
        for part in parts:
            yield part, next(encoded) if part.id is None else (part.id,)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of ids; invalid UTF-8 becomes U+FFFD.

        special: show control tokens. TokenizerError for an id out of range.

        The space that `encode` puts before a text is removed, also after a leading BOS. So
        decode(encode(text)) == text, except that U+2581 becomes a space, and that `bert` and `t5`
        normalise texts. llama_detokenize differs: it keeps that space after a BOS, and for some
        vocabularies turns " ." into ".".
        """
        ids = list(ids)
        start = 0
        while start < len(ids) and self._attr(ids[start]) & Attr.CONTROL:
            start += 1
        head = b"".join([self.token_bytes(id, special) for id in ids[:start]])
        tail = b"".join([self.token_bytes(id, special) for id in ids[start:]])
        if self._codec.leads:
            tail = tail.removeprefix(b" ")
        return (head + tail).decode("utf-8", "replace")

    def token_bytes(self, id: int, special: bool = False) -> bytes:
        """The bytes of one token, as from llama_token_to_piece. They may be part of a character.

        Control and unknown tokens are empty without `special`; unused tokens are always empty.
        TokenizerError for an id out of range.
        """
        attr, text = self._attr(id), self._spelling(id)
        hidden = attr & (Attr.CONTROL | Attr.UNKNOWN)
        if hidden and not special:
            return b""
        if self._codec.for_all_types:
            return self._codec.piece(text)
        if hidden or attr & Attr.USER_DEFINED:
            return text.encode()
        if attr & Attr.NORMAL:
            return self._codec.piece(text)
        byte = BYTE_TOKEN.fullmatch(text) if attr & Attr.BYTE else None
        return bytes.fromhex(byte[1]) if byte else b""

    def stream(self, special: bool | Collection[int] = False) -> Stream:
        """A decoder of ids one at a time. It does not remove a leading space.

        special: show control tokens, all or these.
        """
        return Stream(self, special)

    def is_eog(self, id: int) -> bool:
        """Whether this token ends a generation: EOS, EOT, and tokens with names of special.ENDS."""
        return id in self._ends

    def _attr(self, id: int) -> int:
        if not 0 <= id < self.n_vocab:
            raise TokenizerError(f"there is no token {id}, the vocabulary has {self.n_vocab}")
        return int(self._attrs[id])


class Stream:
    """Ids → text, one id at a time. The bytes of an incomplete character wait for the rest."""

    def __init__(self, tokenizer: Tokenizer, special: bool | Collection[int]) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, id: int) -> str:
        """The text completed by this token; may be empty."""
        shown = self._special if isinstance(self._special, bool) else id in self._special
        return self._decoder.decode(self._tokenizer.token_bytes(id, shown))

    def flush(self) -> str:
        """The end of the text: U+FFFD for an incomplete character. The next `feed` starts anew."""
        return self._decoder.decode(b"", final=True)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"the text has half of a surrogate pair at character {error.start}"
        ) from None


def from_gguf(source: str | os.PathLike[str] | gguf.GGUFFile) -> Tokenizer:
    """The tokenizer of a GGUF file, given by its path or open. The file needs no tensors.

    GGUFError for a damaged file; TokenizerError for an unsupported kind or pre-tokenizer, or an
    inconsistent vocabulary.
    """
    if not isinstance(source, gguf.GGUFFile):
        with gguf.open(source) as file:
            return from_gguf(file)
    try:
        return from_metadata({key: field.value for key, field in source.metadata.items()})
    except TokenizerError as error:
        raise TokenizerError(f"{source.path}: {error}") from None


def from_metadata(values: Mapping[str, Any]) -> Tokenizer:
    """As `from_gguf`, from metadata: GGUF keys → values, as from `GGUFFile.get`.

    A list of str may replace a StringArray.
    """
    metadata = Metadata(values)
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in KINDS:
        raise TokenizerError(
            "tokenizer.ggml.model, the kind of tokenizer, is"
            f" {'missing' if kind is None else brief(kind)}, wanted one of {', '.join(KINDS)}"
        )
    pre = read_pretokenizer(kind, metadata)
    vocabulary = read_vocabulary(metadata)
    specials = read_specials(metadata, vocabulary, kind, has_bos=pre is None or pre.has_bos)
    codec = read_codec(kind, metadata, vocabulary, specials.roles, pre)

    def make_codec() -> Codec:
        return read_codec(kind, metadata, read_vocabulary(metadata), specials.roles, pre)

    return Tokenizer(metadata, specials, codec, make_codec, read_frame(kind, metadata, pre))
