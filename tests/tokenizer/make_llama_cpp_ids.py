"""Makes llama_cpp_ids.json: tiny vocabularies, texts, and the ids that llama.cpp gives for them.

python make_llama_cpp_ids.py      needs pyggml and llama-cpp-python

bpe   256 bytes, the bytes of some characters joined, every pair of those characters, and three
      spaces: whether neighbours join shows where a pre-tokenizer cuts. "abst" can only be had as
      a whole piece (ignore_merges). `pre`: name -> ids of each text.
spm   scores with ties, a piece that no pair of pieces makes, byte tokens.
cases special tokens: metadata to set, text, add_special, parse_special, ids.
"""

import ctypes
import json
import random
import tempfile
from itertools import product
from pathlib import Path

import llama_cpp
import numpy as np

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
    one_of_each = {pre: name for name, pre in reversed(PRETOKENIZERS.items())}
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
    }
    for kind, whole in (("bpe", base | {"tokenizer.ggml.pre": "llama-bpe"}), ("spm", spm_base)):
        for case in CASES:
            extra = {f"tokenizer.ggml.{k}": v for k, v in case.get("set", {}).items()}
            extra |= {"general.name": case.get("name", "probe")}
            call = (case["text"], case.get("add", False), case.get("parse", False))
            (found,) = ids(whole | extra, [call])
            golden["cases"].append({"kind": kind, "extra": extra, "call": call, "ids": found})
    path = Path(__file__).with_name("llama_cpp_ids.json")
    path.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
