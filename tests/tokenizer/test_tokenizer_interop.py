"""The ids of llama.cpp itself, on random text, for every vocabulary and pre-tokenizer there is."""

import ctypes
import io
import os
import random
import re
from collections import Counter
from functools import cache

import numpy as np
import pytest
import sentencepiece
from extras import need
from hypothesis import given
from hypothesis import strategies as st

from pyggml import gguf
from pyggml.tokenizer import from_gguf
from pyggml.tokenizer.pretokenizers import PRETOKENIZERS

pytestmark = pytest.mark.interop

REAL = ["deepseek-llm", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2"]
REAL += ["refact"]
WORDS = [
    *["the", "The", "THE", "don't", "DON'T", "we'll", "it'S", "ça", "Übergröße", "fooBar", "!!!"],
    *[
        "λόγος",
        "ΛΟΓΟΣ",
        "привет",
        "世界",
        "漢字かな",
        "カタカナ",
        "한국어",
        "ไทย",
        "हिन्दी",
        "🙂",
        "…",
    ],
    *[
        "e\u0301",
        "\u0301a",
        "１２３",
        "½",
        "²",
        "1234567",
        "12",
        "3,141",
        "$5",
        "“q”",
        "、。",
        "//",
    ],
    *["<s>", "</s>", "<unk>", "<|im_end|>", "<0x41>", "IMGIMGABZ", "<sentinel:12>", "{}"],
    *["\u200d", "\u3000", "\u00a0", "\u0085", "\x1c"],
]
GAPS = ["", " ", "  ", "   ", "\n", "\t", " \n ", "\r\n", "\n\n", "'", "1", "\u3000"]


def a_text(rng):
    if rng.random() < 0.3:  # any character that both Unicode versions know
        return "".join(chr(rng.randrange(1, 0xD7FF)) for _ in range(20) if rng.random() < 0.8)
    return "".join(rng.choice(WORDS) + rng.choice(GAPS) for _ in range(rng.randrange(1, 30)))


def charsmap_of(model):
    """The table in a ModelProto: its length and its bytes follow the normalizer's name."""
    start = model.index(b"nmt_nfkc\x12") + 9
    n = shift = 0
    while True:
        byte, start = model[start], start + 1
        n |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return model[start : start + n]


SILENCE = []  # what llama.cpp calls must outlive the tests: it writes on, for other tests too


class Theirs:
    """llama.cpp's view of a vocabulary."""

    def __init__(self, path):
        self.lib = need("llama_cpp")
        silence = self.lib.llama_log_callback(lambda *_: None)
        SILENCE.append(silence)
        self.lib.llama_log_set(silence, ctypes.c_void_p(0))
        params = self.lib.llama_model_default_params()
        params.vocab_only = True
        self.model = self.lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            pytest.skip("this llama.cpp does not know the pre-tokenizer")
        self.vocabulary = self.lib.llama_model_get_vocab(self.model)

    def encode(self, text, add_special, parse_special):
        raw = text.encode()
        ids = (self.lib.llama_token * (len(raw) + 8))()
        n = self.lib.llama_tokenize(
            self.vocabulary, raw, len(raw), ids, len(ids), add_special, parse_special
        )
        assert n >= 0
        return list(ids[:n])

    def piece(self, id, special):
        buffer = ctypes.create_string_buffer(1024)
        n = self.lib.llama_token_to_piece(self.vocabulary, id, buffer, 1024, 0, special)
        return buffer.raw[:n]


def compare_texts(path, n, a_text=a_text):
    ours, theirs, rng = from_gguf(path), Theirs(path), random.Random(str(path.name))
    for _ in range(n):
        text, add, parse = a_text(rng), rng.random() < 0.5, rng.random() < 0.5
        assert ours.encode(text, add, parse) == theirs.encode(text, add, parse), (text, add, parse)
    return ours, theirs


@pytest.mark.parametrize("name", REAL)
def test_real_vocabularies(name, shared):
    ours, theirs = compare_texts(shared / f"vocab/ggml-vocab-{name}.gguf", 100)
    compare_tokens(ours, theirs)
    for role in ("bos", "eos", "pad"):
        id = getattr(theirs.lib, f"llama_vocab_{role}")(theirs.vocabulary)
        assert getattr(ours, f"{role}_id") == (None if id < 0 else id)


@cache
def both(path):
    return from_gguf(path), Theirs(path)


CHARACTERS = st.characters(max_codepoint=0xD7FE, exclude_characters="\0")
TEXTS = st.lists(st.text(CHARACTERS, max_size=20) | st.sampled_from([*WORDS, *GAPS]), max_size=12)


@pytest.mark.parametrize("name", REAL)
@given(pieces=TEXTS, add=st.booleans(), parse=st.booleans())
def test_drawn_texts(name, shared, pieces, add, parse):
    ours, theirs = both(shared / f"vocab/ggml-vocab-{name}.gguf")
    text = "".join(pieces)
    assert ours.encode(text, add, parse) == theirs.encode(text, add, parse)


def compare_tokens(ours, theirs):
    for id in range(ours.n_vocab):
        for special in (False, True):
            assert ours.token_bytes(id, special) == theirs.piece(id, special), id
        assert ours.is_eog(id) == theirs.lib.llama_vocab_is_eog(theirs.vocabulary, id), id


# Where white space is left between the pieces of characters, llama.cpp aborts on two in a row.
@pytest.mark.parametrize("name", sorted(n for n, p in PRETOKENIZERS.items() if not p.characters))
def test_every_pretokenizer_with_a_real_vocabulary(name, shared, tmp_path):
    with gguf.open(shared / "vocab/ggml-vocab-gpt-2.gguf") as file:
        roles = {"tokenizer.ggml.bos_token_id": 5, "tokenizer.ggml.eos_token_id": 6}
        metadata = {**file.metadata, **roles, "tokenizer.ggml.pre": name}
        gguf.write(tmp_path / f"{name}.gguf", metadata, [])
    compare_texts(tmp_path / f"{name}.gguf", 40)


GENERAL = {"general.architecture": "llama", "general.name": "probe"}
TINY = ["whitespace", "whitespace lower", "t5", "t5 bare", "t5 merging spaces", "bert"]


@pytest.mark.parametrize("name", [*TINY, "bert cased", "rwkv", "words of bytes"])
def test_tiny_vocabularies_of_every_kind(name, tiny, tmp_path):
    bytewise = name == "words of bytes"
    metadata = tiny("bpe", model="whitespace", pre="gpt-2") if bytewise else tiny(name)
    gguf.write(tmp_path / f"{name}.gguf", GENERAL | metadata, [])
    pieces = [t for t in metadata["tokenizer.ggml.tokens"] if "\\" not in t]

    def a_near_text(rng):
        if rng.random() < 0.5:
            return a_text(rng)
        some = rng.choices([*pieces, *" \n<é", "e\u0301"], k=rng.randrange(1, 30))
        return "".join(some).replace("\u2581", rng.choice(["\u2581", " ", ""]))

    ours, theirs = compare_texts(tmp_path / f"{name}.gguf", 400, a_near_text)
    if not name.startswith("whitespace"):  # whose pieces llama.cpp takes for bytes
        compare_tokens(ours, theirs)


@pytest.mark.parametrize("spaces", [False, True])
def test_a_unigram_model_with_the_usual_normalisation(spaces, shared, tmp_path):
    """Trained here; its table of replacements is NFKC with T5's changes, 240 kB."""
    lines = (shared / "data/wikitext2-valid.txt").read_text().splitlines()[:2000]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=2000, minloglevel=2,
        normalization_rule_name="nmt_nfkc", model_type="unigram", pad_id=3,
    )  # fmt: skip
    learned = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    n = learned.get_piece_size()
    kinds = [3 if learned.is_control(i) else 2 if learned.is_unknown(i) else 1 for i in range(n)]
    ggml = {
        "model": "t5",
        "tokens": [learned.id_to_piece(i) for i in range(n)] + ["[PAD9]", "<extra>"],
        "scores": np.array([learned.get_score(i) for i in range(n)] + [-1e4, 0], np.float32),
        "token_type": np.array([*kinds, 5, 4], np.int32),
        "precompiled_charsmap": np.frombuffer(charsmap_of(model.getvalue()), np.int8),
        "unknown_token_id": learned.unk_id(), "eos_token_id": learned.eos_id(),
        "add_space_prefix": True, "remove_extra_whitespaces": spaces,
    }  # fmt: skip
    path = tmp_path / f"unigram-{spaces}.gguf"
    gguf.write(path, GENERAL | {f"tokenizer.ggml.{k}": v for k, v in ggml.items()}, [])
    compare_tokens(*compare_texts(path, 300))
    ours, theirs = from_gguf(path), Theirs(path)
    text = "\n".join(lines[:500])
    assert ours.encode(text, True, False) == theirs.encode(text, True, False)


@pytest.mark.parametrize("lower", [False, True])
def test_a_vocabulary_of_words(lower, shared, tmp_path):
    """WordPiece with the words of a text, their ends, and all characters of the text."""
    text = (shared / "data/tinyshakespeare.txt").read_text()[:200_000]
    words = re.findall(r"\w+|[^\w\s]", text.lower() if lower else text)
    common = [word for word, _ in Counter(words).most_common(1500)]
    ends = [word[n:] for word in common for n in (1, 2, 3) if len(word) > n]
    special, firsts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], ["\u2581" + w for w in common]
    tokens = dict.fromkeys([*special, *firsts, *ends, *map(chr, range(33, 0x250))])
    ggml = {
        "model": "bert", "tokens": list(tokens), "normalizer.lowercase": lower,
        "token_type": np.array([3, 2, 3, 3, 3] + [1] * (len(tokens) - 5), np.int32),
        "bos_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1,
    }  # fmt: skip
    path = tmp_path / f"words-{lower}.gguf"
    gguf.write(path, GENERAL | {f"tokenizer.ggml.{k}": v for k, v in ggml.items()}, [])
    compare_tokens(*compare_texts(path, 300))
    ours, theirs = from_gguf(path), Theirs(path)
    assert ours.encode(text, True, False) == theirs.encode(text, True, False)
