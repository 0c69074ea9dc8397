"""Makes llama_cpp_ids.json: tiny vocabularies, texts, and the ids that llama.cpp gives for them.

python make_llama_cpp_ids.py      needs pyggml and llama-cpp-python

bpe   256 bytes, the bytes of some characters joined, every pair of those characters, and three
      spaces: whether neighbours join shows where a pre-tokenizer cuts. "abst" can only be had as
      a whole piece (ignore_merges). `pre`: name -> ids of each text.
spm   scores with ties, a piece that no pair of pieces makes, byte tokens.
cases special tokens: metadata to set, text, add_special, parse_special, ids.
kinds the others: tokenizer.ggml keys, texts, ids of each as [plain, with all special tokens].
"""

import ctypes
import io
import json
import random
import re
import tempfile
from itertools import product
from pathlib import Path

import llama_cpp
import numpy as np
import sentencepiece
from conftest import metadata_of

from pyggml import gguf
from pyggml.tokenizer.bpe import BYTE_OF
from pyggml.tokenizer.pretokenizers import PRETOKENIZERS

CHARS = [*" \n\t\r", *"abABst", *"12", *".,'/", *"éλ世に한١²", "\u0301", "\u3000", "\u00a0"]
SPECIAL = [*("<s>", "</s>", "<|im_end|>", "<|endoftext|>"), *("<ud>", "abcd", "xab", "<unk>")]
CONTROL, USER_DEFINED, UNKNOWN, BYTE = 3, 4, 2, 6
TYPES = [*[CONTROL] * 4, *[USER_DEFINED] * 3, UNKNOWN]


def bpe():
    char_of = {byte: char for char, byte in BYTE_OF.items()}
    spelled = ["".join(char_of[b] for b in c.encode()) for c in CHARS]
    merges = []
    for word in spelled:
        merges += [(word[:i], word[i]) for i in range(1, len(word))]
    merges += [*product(spelled, spelled), ("\u0120\u0120", "\u0120")]
    merges = list(dict.fromkeys(merges))
    tokens = dict.fromkeys([*BYTE_OF, *(a + b for a, b in merges), "abst", "\u0120abst"])
    return [*SPECIAL, *tokens], [f"{a} {b}" for a, b in merges]


def spm():
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    pieces = {"\u2581": -9, "a": -9, "b": -9, "c": -9, "d": -9, "é": -9, ".": -9}
    pieces |= {"ab": -1, "bc": -1, "cd": -2, "abc": -3, "\u2581a": -1, "\u2581ab": -4, "aa": -2}
    pieces |= {"aaa": -2, "\u2581\u2581": -1, "dx": -3, "abab": -5, "\u2581\u2581\u2581\u2581": -2}
    tokens = [*SPECIAL, *byte_tokens, *pieces]
    scores = [0.0] * (len(SPECIAL) + 256) + [float(s) for s in pieces.values()]
    return tokens, scores


def characters():
    """Merges of characters: of all pairs of some, of newlines, and bytes for the others."""
    chars = [*"\u2581\nabst1.'", "é", "世", "\u0301"]
    merges = [*product(chars, chars), ("\u2581\u2581", "\u2581"), ("\n\n", "\n")]
    byte_tokens = [f"<0x{b:02X}>" for b in range(256) if b not in (0x09, 0xA0)]
    words = ["\n\n\n\n\n", "abst", "\u2581the"]
    tokens = dict.fromkeys([*byte_tokens, *chars, *(a + b for a, b in merges), *words])
    tokens = [*SPECIAL, *tokens]
    merges = [f"{a} {b}" for a, b in merges]
    return {"tokens": tokens, "merges": merges, "token_type": types(tokens).tolist()}


def unigram(rng):
    """Scores that make long pieces win here and lose there, and a table of replacements."""
    pieces = {c: rng.uniform(-12, -8) for c in ["\u2581", *"abcdst1.'", "é", "世"]}
    for n in (2, 2, 2, 3, 3, 4, 5):
        for _ in range(20):
            word = "".join(rng.choices(["\u2581", *"abcdst1x"], k=n))
            pieces.setdefault(word, rng.uniform(-6 * n, -4 * n + 2))
    tokens = ["<pad>", "</s>", "<unk>", "<ud>", "<0x41>", "pad\u2581pad", *pieces]
    kinds = [3, 3, 2, 4, 6, 5] + [1] * len(pieces)
    scores = [0.0, 0.0, 0.0, -99.0, 0.0, -10000.0, *pieces.values()]
    return {
        "tokens": tokens, "token_type": kinds, "scores": np.float32(scores).tolist(),
        "precompiled_charsmap": charsmap().hex(), "add_space_prefix": True,
    }  # fmt: skip


def charsmap():
    """SentencePiece's own table of some replacements, from a model that it trains on nothing."""
    rules = {"e\u0301": "é", "\u00a0": " ", "\n": " ", "①": "1", "ab\u0301": "b", "½": "1.2"}
    rules |= {"\u200b": "", "A": "a", "<\u0338": "1", "Z": "<ud>"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rules.tsv"
        lines = ("\t".join(" ".join(f"{ord(c):X}" for c in s) for s in r) for r in rules.items())
        path.write_text("\n".join(lines) + "\n")
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["ab cd ef gh"] * 9), model_writer=model, vocab_size=13,
            normalization_rule_tsv=str(path), minloglevel=2,
        )  # fmt: skip
    return charsmap_of(model.getvalue())


def charsmap_of(model):
    """ModelProto.normalizer_spec.precompiled_charsmap, fields 3 and 2 of wire type 2."""
    for wanted in (3, 2):
        model = dict(fields(model))[wanted]
    return model


def fields(raw):
    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte, at = raw[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    at = 0
    while at < len(raw):
        number, wire = divmod(varint(), 8)
        n = {0: 0, 1: 8, 2: None, 5: 4}[wire]
        n = varint() if n is None else n
        if wire == 0:
            varint()
        yield number, raw[at : at + n]
        at += n


def wordpiece():
    firsts = ["ab", "a", "b", "世", ".", "'", "é", "st", "1", "λο", "$"]
    words = [*("\u2581" + word for word in firsts), *("a", "b", "ab", "bst", "s", "t", "é", "1")]
    words += ["γ", "λ"]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<ud>", *words]
    roles = {"bos_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1}
    return {"tokens": tokens, "token_type": [3, 2, 3, 3, 3, 4] + [1] * len(words), **roles}


def rwkv(rng):
    spell = {9: "\\t", 10: "\\n", 13: "\\r", 92: "\\\\", 39: "\\'"}

    def spelled(raw):
        return "".join(spell.get(b, chr(b) if 32 <= b < 127 else f"\\x{b:02x}") for b in raw)

    raws = dict.fromkeys(bytes([b]) for b in range(256))
    for char in "éλ世🙂":
        raws |= {char.encode()[:n]: None for n in range(1, 5)}
    for n in (2, 2, 3, 3, 4, 5, 7):
        raws |= {bytes(rng.choices(b" \n\\abst1'", k=n)): None for _ in range(25)}
    tokens = ["<s>", *map(spelled, raws), "[PAD1]"]
    return {"tokens": tokens, "token_type": [3] + [1] * len(raws) + [5]}


# A text with this makes llama.cpp abort: of two neighbours that may merge, one is white space.
ABORTS = {
    "gemma4": r"(?<!\n)\n{4}(?!\n)|\n{6}",
    "sarvam-moe": r"\n\n",
    "pre whitespace": r"\s\s",
}


def other_kinds(rng):
    roles = {"bos_token_id": 0, "eos_token_id": 1, "unknown_token_id": 7}
    chars, t5 = characters(), {"model": "t5", **unigram(rng)}
    bare = {k: v for k, v in t5.items() if k not in ("precompiled_charsmap", "add_space_prefix")}
    return {
        "gemma4": {"model": "gemma4", **roles, **chars, "add_bos_token": False},
        "sarvam-moe": {"model": "gpt2", "pre": "sarvam-moe", **roles, **chars},
        "pre whitespace": {"model": "gpt2", "pre": "whitespace", **roles, **chars},
        "whitespace": {"model": "whitespace", "pre": "whitespace", **roles, **chars},
        "whitespace lower": {
            "model": "whitespace",
            "pre": "whitespace",
            **roles,
            **chars,
            "normalizer.lowercase": True,
        },
        "t5": t5,
        "t5 bare": bare,
        "t5 merging spaces": t5 | {"remove_extra_whitespaces": True},
        "bert": {"model": "bert", **wordpiece()},
        "bert cased": {"model": "bert", **wordpiece(), "normalizer.lowercase": False},
        "rwkv": {"model": "rwkv", **rwkv(rng)},
    }


def texts_of_kinds(rng):
    chars = [*"   \n\tabcdABst1x.,'$<\\", "é", "e\u0301", "λ", "世", "界", "🙂", "①", "½", "\u0338"]
    chars += ["\u0301", "\u00a0", "\u3000", "\u200b", "\x07", "한", "İ"]
    drawn = ["".join(rng.choices(chars, k=rng.randrange(1, 24))) for _ in range(40)]
    return [
        *drawn,
        "", " ", "\n", "\n\n\n\n\n", "\n\n\n\n", "  a", "a  ", "abst", "abst abst", "a\n\nb",
        "<s>a</s> <ud>  a<unk>", "<ud", "<\u0338<ud>", "[MASK] [CLS]ab", "pad pad", "[PAD1]",
        "\u2581the", "abab'st <0x41>", "ΛΟΓ λογ", "xxxa x", "ab\u0301ab", "a\\nb\\",
        "e\u0301\u0301", "aZa", "<uda", "a<\u0338a<a",
    ]  # fmt: skip


def types(tokens):
    found = [BYTE if t.startswith("<0x") else 1 for t in tokens]
    return np.array(TYPES + found[len(TYPES) :], np.int32)


def ids(metadata, calls):
    """llama.cpp's ids for calls of (text, add_special, parse_special)."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "vocabulary.gguf")
        gguf.write(path, metadata, [])
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    assert model, "llama.cpp refuses the vocabulary"
    vocabulary, found = llama_cpp.llama_model_get_vocab(model), []
    for text, add_special, parse_special in calls:
        raw = text.encode()
        out = (llama_cpp.llama_token * (len(raw) + 8))()
        n = llama_cpp.llama_tokenize(
            vocabulary, raw, len(raw), out, len(out), add_special, parse_special
        )
        assert n >= 0
        found.append(list(out[:n]))
    llama_cpp.llama_model_free(model)
    return found


def texts(rng):
    drawn = ["".join(rng.choices(CHARS, k=rng.randrange(6, 22))) for _ in range(10)]
    return [
        *drawn,
        "abst abst  abst\n\nabst",
        "It's AB'S, 'Tab 'lla's  \n  a\t\n1",
        "12121 1212 121.12²1١1   ",
        " \n \r\n\n  .,/'\n/ ./\n",
        "aAbBAA éλλ世世に한 \u0301a\u0301 .a1,A",
        "'st a'st 'ts    b     a      1",
        "世\u3000,\u00a0\u3000a \u3000\u3000 1a21 a",
    ]


CASES = [
    *(
        {"text": t, "add": a, "parse": p}
        for t in ("a<s>b</s> <ud>  a", "", "<|im_end|>")
        for a in (True, False)
        for p in (True, False)
    ),
    {"text": "xabcd abcd xab", "parse": True},
    {"text": " <ud> \n a <s> \t b<unk> c", "parse": True},
    {"text": "a", "add": True, "set": {"add_bos_token": True, "add_eos_token": True}},
    {"text": "a", "add": True, "set": {"add_bos_token": False, "add_eos_token": True}},
    {"text": "ab a<ud>a", "add": True, "parse": True, "set": {"add_space_prefix": False}},
    {"text": "a <s> \n b</s> \t a<ud>  b<unk> a<|im_end|>  a", "parse": True, "name": "Phi-3 mini"},
]


def main():
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    rng = random.Random(0)
    general = {"general.architecture": "llama", "general.name": "probe"}
    roles = {"bos_token_id": 0, "eos_token_id": 1, "unknown_token_id": 7}
    ggml = {f"tokenizer.ggml.{key}": value for key, value in roles.items()}
    tokens, merges = bpe()
    base = {**general, **ggml, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
    base |= {"tokenizer.ggml.merges": merges, "tokenizer.ggml.token_type": types(tokens)}
    some = texts(rng)
    calls = [(text, False, False) for text in some]
    one_of_each = {pre: name for name, pre in reversed(PRETOKENIZERS.items()) if not pre.characters}
    by_pre = {n: ids({**base, "tokenizer.ggml.pre": n}, calls) for n in one_of_each.values()}
    pieces, scores = spm()
    spm_base = {**general, **ggml, "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces}
    spm_base |= {"tokenizer.ggml.scores": np.array(scores, np.float32)}
    spm_base |= {"tokenizer.ggml.token_type": types(pieces)}
    spm_texts = ["".join(rng.choices(" abcdéx.世", k=rng.randrange(1, 30))) for _ in range(20)]
    golden = {
        "bpe": {"tokens": tokens, "merges": merges, "types": types(tokens).tolist()},
        "texts": some,
        "pre": by_pre,
        "spm": {"tokens": pieces, "scores": scores, "types": types(pieces).tolist()},
        "spm_texts": spm_texts,
        "spm_ids": ids(spm_base, [(text, False, False) for text in spm_texts]),
        "cases": [],
        "kinds": {},
    }
    for kind, whole in (("bpe", base | {"tokenizer.ggml.pre": "llama-bpe"}), ("spm", spm_base)):
        for case in CASES:
            extra = {f"tokenizer.ggml.{k}": v for k, v in case.get("set", {}).items()}
            extra |= {"general.name": case.get("name", "probe")}
            call = (case["text"], case.get("add", False), case.get("parse", False))
            (found,) = ids(whole | extra, [call])
            golden["cases"].append({"kind": kind, "extra": extra, "call": call, "ids": found})
    some = texts_of_kinds(rng)
    for name, part in other_kinds(rng).items():
        whole = general | metadata_of(part)
        texts_of_kind = [t for t in some if not (name in ABORTS and re.search(ABORTS[name], t))]
        found = [
            ids(whole, [(t, special, special) for t in texts_of_kind]) for special in (False, True)
        ]
        kinds = [list(pair) for pair in zip(*found, strict=True)]
        golden["kinds"][name] = {"ggml": part, "texts": texts_of_kind, "ids": kinds}
    path = Path(__file__).with_name("llama_cpp_ids.json")
    path.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
