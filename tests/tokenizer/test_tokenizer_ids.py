"""encode gives llama.cpp's ids: tiny vocabularies in the repository, real ones beside it."""

import json
from pathlib import Path

import numpy as np
import pytest

from pyggml import gguf
from pyggml.tokenizer import from_gguf, from_metadata
from pyggml.tokenizer.kinds import KINDS
from pyggml.tokenizer.pretokenizers import PRETOKENIZERS, pretokenizer

GOLDEN = json.loads(Path(__file__).with_name("llama_cpp_ids.json").read_text())
CASES = [pytest.param(case, id=f"{case['kind']}-{i}") for i, case in enumerate(GOLDEN["cases"])]


@pytest.mark.parametrize("name", list(GOLDEN["pre"]))
def test_every_pretokenizer_cuts_as_llama_cpp(name, tiny):
    tokenizer = from_metadata(tiny("bpe", pre=name))
    for text, ids in zip(GOLDEN["texts"], GOLDEN["pre"][name], strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, (name, text)


def test_golden_ids_cover_every_distinct_pretokenizer_and_every_kind():
    kinds = [part["ggml"] for part in GOLDEN["kinds"].values()]
    names = [*GOLDEN["pre"], "gemma4", *(part["pre"] for part in kinds if "pre" in part)]
    assert {pretokenizer(name) for name in names} == set(PRETOKENIZERS.values())
    assert {"gpt2", "llama", *(part["model"] for part in kinds)} == set(KINDS)


@pytest.mark.quick
@pytest.mark.parametrize("parsed", [False, True])
@pytest.mark.parametrize("name", list(GOLDEN["kinds"]))
def test_every_kind_gives_llama_cpps_ids(name, parsed, tiny):
    """`parsed`: with special tokens, found in the text and put around it."""
    tokenizer, part = from_metadata(tiny(name)), GOLDEN["kinds"][name]
    for text, ids in zip(part["texts"], part["ids"], strict=True):
        assert tokenizer.encode(text, parsed, parsed) == ids[parsed], text


def test_newlines_that_are_a_token_together_stay_together(tiny):
    """Four are none here, and llama.cpp aborts on them; five are, by Gemma's rule alone."""
    gemma, sarvam = from_metadata(tiny("gemma4")), from_metadata(tiny("sarvam-moe"))
    tokens = GOLDEN["kinds"]["gemma4"]["ggml"]["tokens"]
    ids = gemma.encode("a\n\n\n\n\nb", add_special=False)
    assert [tokens[id] for id in ids] == ["a", "\n" * 5, "b"]
    assert [tokens[id] for id in gemma.encode("\n" * 4, add_special=False)] == ["\n\n"] * 2
    assert len(sarvam.encode("\n" * 5, add_special=False)) > 1


def test_a_text_of_one_word_a_million_long(tiny):
    """Linear time; the library's WordPiece and a trie of Python objects would not end."""
    for name in ("bert", "rwkv", "t5", "gemma4", "whitespace"):
        tokenizer, text = from_metadata(tiny(name)), "ab" * 50_000
        assert tokenizer.decode(tokenizer.encode(text)) == text, name


def test_a_file_without_a_name_is_default(tiny):
    text = "12121 '."
    default = from_metadata(tiny("bpe", pre="default")).encode(text)
    assert from_metadata(tiny("bpe", pre=None)).encode(text) == default
    assert from_metadata(tiny("bpe", pre="gpt-2")).encode(text) != default


def test_scores_decide_merges_as_in_llama_cpp(tiny):
    tokenizer = from_metadata(tiny("spm"))
    for text, ids in zip(GOLDEN["spm_texts"], GOLDEN["spm_ids"], strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, text


@pytest.mark.parametrize("case", CASES)
def test_special_tokens_as_in_llama_cpp(case, tiny):
    base = tiny(case["kind"]) | (
        {"tokenizer.ggml.pre": "llama-bpe"} if case["kind"] == "bpe" else {}
    )
    assert from_metadata(base | case["extra"]).encode(*case["call"]) == case["ids"], case["call"]


def test_a_byte_without_a_token_gives_no_id_and_keeps_its_neighbours_apart(tiny):
    whole = from_metadata(tiny("bpe"))
    tokens = ["gap" if t == "B" else t for t in GOLDEN["bpe"]["tokens"]]
    merges = [m for m in GOLDEN["bpe"]["merges"] if "B" not in m.split(" ")]
    lacking = from_metadata(tiny("bpe", tokens=tokens, merges=merges))
    a = whole.encode("a")
    assert lacking.encode("aBa") == a + a
    assert whole.encode("aa") not in (a + a, whole.encode("aBa"))


def test_a_double_merge_counts_where_it_first_stands(tiny):
    # "1 2" comes before "2 1": 121 is 12+1. Were the later double to count, it would be 1+21.
    merges = GOLDEN["bpe"]["merges"]
    doubled = from_metadata(tiny("bpe", pre="gpt-2", merges=[*merges, "1 2"]))
    once = from_metadata(tiny("bpe", pre="gpt-2"))
    assert doubled.encode("121") == once.encode("121")


def test_the_piece_that_sentencepiece_insists_on_is_in_nobodys_way(tiny):
    base = tiny("spm")
    tokens = [*base["tokenizer.ggml.tokens"], "unknown"]
    types = np.append(base["tokenizer.ggml.token_type"], np.int32(4))
    scores = np.append(base["tokenizer.ggml.scores"], np.float32(0))
    tokenizer = from_metadata(tiny("spm", tokens=tokens, token_type=types, scores=scores))
    assert tokenizer.encode("unknown", add_special=False) == [len(tokens) - 1]


def test_int32_scores_and_a_missing_type_array_are_taken(tiny):
    scores = np.array(GOLDEN["spm"]["scores"], np.int32)
    assert from_metadata(tiny("spm", scores=scores)).encode("abc") == from_metadata(
        tiny("spm")
    ).encode("abc")
    plain = from_metadata(tiny("bpe", token_type=None))
    assert plain.token_bytes(4) == b"<ud>"
    assert 4 not in plain.encode("<ud>", parse_special=True)


def test_a_file_with_a_vocabulary_and_no_weights(tiny, tmp_path):
    path = tmp_path / "v.gguf"
    templates = {"": "{{ messages }}", ".tool_use": "{{ tools }}"}
    templates = {f"tokenizer.chat_template{name}": text for name, text in templates.items()}
    gguf.write(path, tiny("bpe") | templates, [])
    by_path = from_gguf(path)
    with gguf.open(path) as file:
        by_file = from_gguf(file)
    assert by_path.encode("It's AB") == by_file.encode("It's AB")
    assert by_path.chat_templates == {"": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert from_metadata(tiny("bpe")).chat_templates == {}


REAL = (
    *("deepseek-llm", "gemma-4", "gpt-2", "llama-bpe", "llama-spm"),
    *("mpt", "phi-3", "qwen2", "refact"),
)


@pytest.mark.parametrize("name", REAL)
def test_real_vocabularies(name, shared, real):
    path = shared / f"vocab/ggml-vocab-{name}.gguf"
    tokenizer = real(name)
    texts = path.with_name(path.name + ".inp").read_bytes().decode()
    wanted = path.with_name(path.name + ".out").read_text()
    texts = texts.split("\n__ggml_vocab_test__\n")
    wanted = wanted.split("\n")[: len(texts)]  # what follows the last line break is no line
    assert len(texts) == len(wanted) >= 46
    for text, line in zip(texts, wanted, strict=True):
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert ids == [int(id) for id in line.split()], text
        assert tokenizer.decode(ids) == text


def test_the_list_above_has_every_real_vocabulary(shared):
    names = {path.stem.removeprefix("ggml-vocab-") for path in shared.glob("vocab/*.gguf")}
    assert names == set(REAL)


@pytest.mark.parametrize(
    ("name", "plain", "parsed"),
    [
        ("llama-bpe", [128000, 27, 91, 68, 354, 851, 91, 29, 64], [128000, 128009, 64]),
        ("qwen2", [27, 91, 318, 6213, 91, 29, 64], [151645, 64]),
        ("llama-spm", [1, 529, 29989, 29872, 327, 29918, 333, 29989, 29958, 29874], None),
    ],
)
def test_special_tokens_of_real_vocabularies(name, plain, parsed, real):
    tokenizer = real(name)
    text = "<|im_end|>a" if name == "qwen2" else "<|eot_id|>a"
    assert tokenizer.encode(text) == plain
    assert tokenizer.encode(text, parse_special=True) == (parsed or plain)


def test_phi_3_swallows_spaces_after_its_special_tokens(real):
    tokenizer = real("phi-3")
    user, end = (tokenizer.encode(t, False, True)[0] for t in ("<|user|>", "<|end|>"))
    ids = tokenizer.encode("<|user|> \n Hi<|end|>\n<|user|>", True, True)
    assert ids == [1, user, *tokenizer.encode("Hi", add_special=False), end, user]


def test_models_beside_the_repository_have_tokenizers_that_load(shared):
    paths = [*shared.glob("fixtures/*-F16.gguf"), *shared.glob("models/*.gguf")]
    assert len(paths) >= 15
    text = "Es war einmal: 12 Mäuse, “no more”.\n\tEND "
    for path in paths:
        tokenizer = from_gguf(path)
        assert tokenizer.decode(tokenizer.encode(text)) == text, path.name
        assert tokenizer.is_eog(tokenizer.eos_id)
        assert tokenizer.n_vocab in (512, 8192)
