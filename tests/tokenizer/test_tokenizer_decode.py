"""decode undoes encode; pieces joined one by one are the whole."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import printed

from pyggml.errors import TokenizerError
from pyggml.tokenizer import from_metadata
from pyggml.tokenizer.bpe import BYTE_OF

GOLDEN = json.loads(Path(__file__).with_name("llama_cpp_ids.json").read_text())
TEXT = st.text() | st.text("abAB .,'\n\t12<s>ud|é世\u0301\u3000", max_size=60)
BYTE_LEVEL = ["qwen2", "llama3", "deepseek-llm", "gpt-4o", "tiny_aya", "superbpe", "chameleon"]


@functools.cache
def bpe(pre):
    part = GOLDEN["bpe"]
    return from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": part["tokens"],
            "tokenizer.ggml.merges": part["merges"],
            "tokenizer.ggml.token_type": np.array(part["types"], np.int32),
            "tokenizer.ggml.bos_token_id": 0,
        }
    )


@functools.cache
def spm(spaced=True):
    part = GOLDEN["spm"]
    return from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": part["tokens"],
            "tokenizer.ggml.scores": np.array(part["scores"], np.float32),
            "tokenizer.ggml.token_type": np.array(part["types"], np.int32),
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.add_space_prefix": spaced,
        }
    )


@pytest.mark.parametrize("pre", BYTE_LEVEL)
@given(text=TEXT)
def test_byte_level_round_trip(pre, text):
    assert bpe(pre).decode(bpe(pre).encode(text)) == text


@pytest.mark.parametrize("spaced", [True, False])
@given(text=TEXT)
def test_spm_round_trip_up_to_its_space_character(spaced, text):
    without = text.replace("<ud>", "").replace("abcd", "").replace("xab", "")
    wanted = without.replace("\u2581", " ")
    assert spm(spaced).decode(spm(spaced).encode(without)) == wanted


@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "llama-bpe", "deepseek-llm", "llama-spm"])
@given(text=TEXT)
def test_real_round_trip(name, real, text):
    wanted = text.replace("\u2581", " ") if name == "llama-spm" else text
    assert real(name).decode(real(name).encode(text)) == wanted


# Bytes that the tiny vocabulary of characters has no token for, and spellings of special tokens.
KEPT = TEXT.filter(lambda t: not {9, 0xA0} & set(t.encode()))


@pytest.mark.parametrize("name", ["gemma4", "sarvam-moe"])
@given(text=KEPT)
def test_round_trip_of_merges_of_characters(kind, name, text):
    assert kind(name).decode(kind(name).encode(text)) == text.replace("\u2581", " ")


@given(text=TEXT | st.text("ab\n \\st1'é🙂世"))
def test_round_trip_of_the_longest_tokens(kind, text):
    """Its control token is found in any text, so it is shown here."""
    assert kind("rwkv").decode(kind("rwkv").encode(text), special=True) == text


@pytest.mark.parametrize("name", ["t5", "t5 bare"])
@given(text=st.text(" abcdst1.'é世"))
def test_round_trip_of_unigrams(kind, name, text):
    if name == "t5" and not text.strip(" "):
        text = ""  # there the space before a text comes with its first word
    assert kind(name).decode(kind(name).encode(text)) == text


@given(text=st.text("abst '.1éλογ世\n"))
def test_words_survive_a_second_round(kind, text):
    """WordPiece keeps no white space, and nothing of a word that it does not know."""
    tokenizer = kind("bert")
    ids = [id for id in tokenizer.encode(text, False) if id != tokenizer.unk_id]
    assert tokenizer.encode(tokenizer.decode(ids), False) == ids


@given(ids=st.lists(st.integers(0, len(GOLDEN["bpe"]["tokens"]) - 1)), special=st.booleans())
def test_a_stream_gives_what_decode_gives(ids, special):
    stream = bpe("qwen2").stream(special)
    fed = "".join(stream.feed(id) for id in ids)
    assert fed + stream.flush() == bpe("qwen2").decode(ids, special)


def test_a_stream_holds_back_half_a_character():
    stream = spm().stream()
    one, two, three = (spm().encode("世")[i] for i in (-3, -2, -1))
    assert [stream.feed(one), stream.feed(two), stream.feed(three)] == ["", "", "世"]
    assert stream.feed(one) == "" and stream.flush() == "\ufffd"
    assert stream.feed(two) == "\ufffd", "flush starts anew"


def test_bytes_of_each_kind_of_token():
    tokens = GOLDEN["bpe"]["tokens"]
    ids = {text: i for i, text in enumerate(tokens)}
    for char, byte in BYTE_OF.items():
        assert bpe("qwen2").token_bytes(ids[char]) == bytes([byte])
    assert bpe("qwen2").token_bytes(ids["Ġabst"]) == b" abst"
    for hidden in ("<s>", "<unk>", "<|im_end|>"):
        assert bpe("qwen2").token_bytes(ids[hidden]) == b""
        assert bpe("qwen2").token_bytes(ids[hidden], special=True) == hidden.encode()
    assert bpe("qwen2").token_bytes(ids["<ud>"]) == b"<ud>"


def test_bytes_of_spm_tokens():
    ids = {text: i for i, text in enumerate(GOLDEN["spm"]["tokens"])}
    assert spm().token_bytes(ids["<0xE4>"]) == b"\xe4"
    assert spm().token_bytes(ids["\u2581ab"]) == b" ab"


def test_an_unused_token_has_no_bytes_and_a_strange_character_its_own(tiny):
    tokens = [*GOLDEN["bpe"]["tokens"], "pad", "a \u200d"]
    types = np.array([*GOLDEN["bpe"]["types"], 5, 1], np.int32)
    tokenizer = from_metadata(tiny("bpe", tokens=tokens, token_type=types))
    assert tokenizer.token_bytes(len(tokens) - 2, special=True) == b""
    assert tokenizer.token_bytes(len(tokens) - 1) == "a \u200d".encode()


def test_the_space_before_a_text_goes_and_others_stay():
    tokenizer, x = spm(), "  a  b "
    ids = tokenizer.encode(x)
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids) == x == tokenizer.decode(ids[1:])
    assert tokenizer.decode(ids, special=True) == "<s>" + x
    stream = tokenizer.stream()
    assert "".join(map(stream.feed, ids)) == " " + x
    assert spm(False).decode(spm(False).encode(" a")) == " a"


@pytest.mark.parametrize("id", [-1, len(GOLDEN["bpe"]["tokens"])])
def test_an_id_out_of_range_is_named(id):
    for call in (bpe("qwen2").token_bytes, lambda i: bpe("qwen2").decode([i])):
        with pytest.raises(TokenizerError, match=f"no token {id}"):
            call(id)


def test_the_libraries_are_imported_only_for_the_kind_that_needs_them(tiny, tmp_path):
    from pyggml import gguf

    for kind in ("bpe", "spm"):
        gguf.write(tmp_path / f"{kind}.gguf", tiny(kind), [])
    script = """
import sys, pyggml.tokenizer
heavy = {"tokenizers", "sentencepiece"}
print(sorted(heavy & sys.modules.keys()))
pyggml.tokenizer.from_gguf(sys.argv[1]).encode("a")
print(sorted(heavy & sys.modules.keys()))
"""
    for kind, library in (("bpe", "tokenizers"), ("spm", "sentencepiece")):
        said = printed(script, tmp_path / f"{kind}.gguf")
        assert said.split("\n")[:2] == ["[]", f"['{library}']"]
