"""A text of any length → its tokens, some at a time, equal to those of the whole.

The text is cut where a token ends whatever follows, which is tried out: what stands around the cut
gives the same tokens with and without what stands after it. The next part is encoded with some text
before it, whose tokens are dropped, so that it begins as it does in the whole.
"""

from collections.abc import Iterator

from pyggml.tokenizer import Tokenizer

MOST = 1 << 15  # characters that are encoded at a time: the library takes 100 bytes for each
_AROUND = 64  # characters on each side of a cut that are tried; few tokens are longer
_TRIED = 512  # places for a cut before more text is read


def token_parts(texts: Iterator[str], tokenizer: Tokenizer, parse: bool) -> Iterator[list[int]]:
    """The ids of the parts. The tokenizer's BOS and EOS stand at the ends of the text alone.

    texts    parts of the text, of any length
    parse    names of special tokens in the text are those tokens
    """
    before, text, is_first, enough = "", "", True, MOST
    for more in texts:
        text += more
        cut = _cut(before + text, tokenizer, parse) - len(before) if len(text) > enough else 0
        if cut > 0:
            yield _part(before, text[:cut], tokenizer, parse, is_first, is_last=False)
            before, text, is_first = (before + text[:cut])[-_AROUND:], text[cut:], False
        enough = MOST if cut > 0 or len(text) <= enough else 2 * len(text)  # not again at once
    yield _part(before, text, tokenizer, parse, is_first, is_last=True)


def _part(
    before: str, text: str, tokenizer: Tokenizer, parse: bool, is_first: bool, is_last: bool
) -> list[int]:
    if is_first and is_last:
        return whole(text, tokenizer, parse)
    ids = _bare(before + text, tokenizer, parse)[len(_bare(before, tokenizer, parse)) :]
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    if is_first and tokenizer.add_bos and bos is not None and not (parse and ids[:1] == [bos]):
        ids = [bos, *ids]
    if is_last and tokenizer.add_eos and eos is not None and not (parse and ids[-1:] == [eos]):
        ids = [*ids, eos]
    return ids


def whole(text: str, tokenizer: Tokenizer, parse: bool) -> list[int]:
    """Ids with BOS and EOS where the tokenizer adds them; one that the text has is not doubled."""
    ids = tokenizer.encode(text, parse_special=parse)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    if parse and tokenizer.add_bos and ids[:2] == [bos, bos]:
        ids = ids[1:]
    if parse and tokenizer.add_eos and ids[-2:] == [eos, eos]:
        ids = ids[:-1]
    return ids


def _bare(text: str, tokenizer: Tokenizer, parse: bool) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=parse)


def _cut(text: str, tokenizer: Tokenizer, parse: bool) -> int:
    """Where the text can be cut, before the end of its last white space; 0 if nowhere."""
    end = len(text) - _AROUND
    for _ in range(_TRIED):
        end = max(text.rfind(" ", _AROUND, end), text.rfind("\n", _AROUND, end))
        if end < 0:
            break
        left, right = text[end - _AROUND : end], text[end : end + _AROUND]
        before, around = (_bare(t, tokenizer, parse) for t in (left, left + right))
        if around[: len(before)] == before:
            return end
    return 0
