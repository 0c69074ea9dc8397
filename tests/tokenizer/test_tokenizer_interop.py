"""The ids of llama.cpp itself, on random text, for every vocabulary and pre-tokenizer there is."""

import ctypes
import os
import random

import pytest

from pyggml import gguf
from pyggml.tokenizer import from_gguf
from pyggml.tokenizer.pretokenizers import PRETOKENIZERS

pytestmark = pytest.mark.interop

REAL = ["deepseek-llm", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "refact"]
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


class Theirs:
    """llama.cpp's view of a vocabulary."""

    def __init__(self, path):
        self.lib = pytest.importorskip("llama_cpp")
        self.silence = self.lib.llama_log_callback(lambda *_: None)
        self.lib.llama_log_set(self.silence, ctypes.c_void_p(0))
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


def compare_texts(path, n):
    ours, theirs, rng = from_gguf(path), Theirs(path), random.Random(str(path.name))
    for _ in range(n):
        text, add, parse = a_text(rng), rng.random() < 0.5, rng.random() < 0.5
        assert ours.encode(text, add, parse) == theirs.encode(text, add, parse), (text, add, parse)
    return ours, theirs


@pytest.mark.parametrize("name", REAL)
def test_real_vocabularies(name, shared):
    ours, theirs = compare_texts(shared / f"vocab/ggml-vocab-{name}.gguf", 100)
    for id in range(ours.n_vocab):
        for special in (False, True):
            assert ours.token_bytes(id, special) == theirs.piece(id, special), id
        assert ours.is_eog(id) == theirs.lib.llama_vocab_is_eog(theirs.vocabulary, id), id
    for role in ("bos", "eos", "pad"):
        id = getattr(theirs.lib, f"llama_vocab_{role}")(theirs.vocabulary)
        assert getattr(ours, f"{role}_id") == (None if id < 0 else id)


@pytest.mark.parametrize("name", sorted(PRETOKENIZERS))
def test_every_pretokenizer_with_a_real_vocabulary(name, shared, tmp_path):
    with gguf.open(shared / "vocab/ggml-vocab-gpt-2.gguf") as file:
        roles = {"tokenizer.ggml.bos_token_id": 5, "tokenizer.ggml.eos_token_id": 6}
        metadata = {**file.metadata, **roles, "tokenizer.ggml.pre": name}
        gguf.write(tmp_path / f"{name}.gguf", metadata, [])
    compare_texts(tmp_path / f"{name}.gguf", 40)
