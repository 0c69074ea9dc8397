"""Patterns written so that no text takes time quadratic in its length cut as the plain ones do."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from pyggml.tokenizer.pretokenizers import PRETOKENIZERS, THREES_FROM_RIGHT

THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
PLAIN = {
    "threes": (THREES_FROM_RIGHT, (rf"[^\p{{N}}]+(?:{THREES})?|{THREES}",)),
    "superbpe": (
        PRETOKENIZERS["superbpe"].patterns,
        (r"\p{N}+", r"\p{N}+?(?=(?:[0-9]{3})+(?![0-9]))"),
    ),
    "jais-2": (
        PRETOKENIZERS["jais-2"].patterns,
        (PRETOKENIZERS["jais-2"].patterns[0].replace(r"(?=\s)(?<![^\S\r\n]{512})", ""),),
    ),
}
PARTS = [
    *["a", "!", " ", "\n", "\t", "\u3000", "\r\n", "²", "١", "1", "12", "123", "1234", "12345"]
]
PARTS += [" " * n for n in (255, 511, 512, 513, 1500)]


def pieces(patterns, text):
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", list(PLAIN))
@given(parts=st.lists(st.sampled_from(PARTS), max_size=12))
def test_the_pieces_are_those_of_the_plain_patterns(name, parts):
    found, plain = PLAIN[name]
    assert found != plain
    assert pieces(found, "".join(parts)) == pieces(plain, "".join(parts))


LONG = {
    "digits": "1" * 300_000,
    "digits of two alphabets": "1234²" * 60_000,
    "arabic digits": "١" * 300_000,
    "spaces": "\u3000" * 1_000_000,
    "spaces and a word": " " * 300_000 + "a",
    "letters": "a" * 300_000,
}


@pytest.mark.parametrize("text", LONG.values(), ids=list(LONG))
@pytest.mark.parametrize("name", ["tiny_aya", "afmoe", "superbpe", "jais-2"])
def test_a_long_run_takes_no_quadratic_time(name, text):
    start = time.process_time()
    found = pieces(PRETOKENIZERS[name].patterns, text)
    assert time.process_time() - start < 10
    assert "".join(found) == text
    if set(text) == {"1"}:
        assert len(found) == 100_000
