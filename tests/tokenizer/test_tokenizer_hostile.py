"""Crafted metadata: TokenizerError with one sentence that names what is wrong, and nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceNormalizer

from pyggml import gguf
from pyggml.errors import GGUFError, PyggmlError, TokenizerError
from pyggml.tokenizer import from_gguf, from_metadata
from pyggml.tokenizer.charsmap import Charsmap
from pyggml.tokenizer.pretokenizers import PRETOKENIZERS


def octets(*values):
    return np.array(values, np.uint8)


def floats(*values):
    return np.array(values, np.float32)


REFUSED = {
    "kind": ("bpe", {"model": "plamo2"}, "'plamo2', wanted one of gpt2, llama, gemma4, t5, bert"),
    "no kind": ("bpe", {"model": None}, "model.* is missing"),
    "kind is a number": ("bpe", {"model": 7}, "model is 7, wanted a string"),
    "pre": ("bpe", {"pre": "nonesuch"}, "pre is 'nonesuch', wanted one of .*llama-bpe.*qwen2"),
    "pre is a number": ("bpe", {"pre": 1}, "pre is 1, wanted a string"),
    "no tokens": ("bpe", {"tokens": None}, "tokens is missing or empty"),
    "zero tokens": ("bpe", {"tokens": []}, "tokens is missing or empty"),
    "tokens are numbers": ("bpe", {"tokens": np.zeros(3)}, "an array of float64, wanted .*strings"),
    "double token": ("bpe", {"tokens": lambda t: [*t[:-1], "<s>"]}, "tokens 0 and .* both '<s>'"),
    "no merges": ("bpe", {"merges": None}, "merges is missing"),
    "merge of one": ("bpe", {"merges": ["a b", "ab"]}, "merge 1 is 'ab'"),
    "merge with nothing": ("bpe", {"merges": ["a "]}, "merge 0 is 'a '"),
    "empty merge": ("bpe", {"merges": [""]}, "merge 0 is ''"),
    "merge of strangers": ("bpe", {"merges": ["zz zz"]}, "merge does not fit .*`zz` out of voc"),
    "merge to a stranger": ("bpe", {"merges": ["z z"]}, "merge does not fit .*`zz` out of voc"),
    "short types": ("bpe", {"token_type": np.ones(3, np.int32)}, "token_type has 3 values for"),
    "types are floats": ("bpe", {"token_type": floats(1, 2)}, "float32, wanted an array of int32"),
    "types are text": ("bpe", {"token_type": ["a"]}, "token_type is .*wanted an array of int32"),
    "long scores": ("spm", {"scores": np.zeros(9999, np.float32)}, "scores has 9999 values for"),
    "doubles": ("spm", {"scores": np.zeros(5)}, "float64, wanted an array of float32 or int32"),
    "nan": ("spm", {"scores": lambda s: [*s[:-1], np.nan]}, "has score nan, wanted a finite"),
    "infinity": ("spm", {"scores": lambda s: [np.inf, *s[1:]]}, "token 0 has score inf"),
    "bos is true": ("bpe", {"bos_token_id": True}, "bos_token_id is True, wanted an integer"),
    "add is a number": ("bpe", {"add_bos_token": 1}, "add_bos_token is 1, wanted true or false"),
    "no bos to add": (
        "bpe", {"pre": "glm4", "bos_token_id": None, "add_bos_token": True}, "there is no bos",
    ),
    "t5 without unknown": ("t5", {"unknown_token_id": None, "tokens": lambda t: t[:2],
                                  "token_type": None, "scores": None}, "'t5' needs an unknown"),
    "t5 of controls": ("t5", {"token_type": lambda t: np.full(len(t), 3, np.int32)},
                       "'t5' needs normal tokens"),
    "no table": ("t5", {"precompiled_charsmap": "text"}, "is 'text', wanted an array of int8"),
    "table of floats": ("t5", {"precompiled_charsmap": floats(1)}, "wanted an array of int8 or"),
    "empty table": ("t5", {"precompiled_charsmap": octets()}, "damaged: it has 0 bytes"),
    "trie beyond its table": ("t5", {"precompiled_charsmap": octets(*[255] * 8)},
                              "8 bytes, of which"),
    "trie without texts": ("t5", {"precompiled_charsmap": lambda t: t[: 4 + int(t[1]) * 256]},
                           "damaged: it has"),
    "texts without an end": ("t5", {"precompiled_charsmap": lambda t: octets(*t[:-1], 65)},
                             "damaged: its last replacement has no end"),
    "prefix is a number": ("t5", {"add_space_prefix": 1}, "add_space_prefix is 1, wanted true"),
    "bert without unknown": ("bert", {"unknown_token_id": None}, "'bert' needs an unknown token"),
    "bert without separator": ("bert", {"seperator_token_id": None}, "sep .*there is no sep"),
    "bert without start": ("bert", {"bos_token_id": None}, "there is no bos"),
    "rwkv without a byte": ("rwkv", {"tokens": lambda t: ["a" * 9 if x == "b" else x for x in t]},
                            "1 of the 256 bytes have no token, the first is 0x62"),
    "half an escape": ("rwkv", {"tokens": lambda t: [*t[:-1], "a\\"]}, "an escape that is none"),
    "strange escape": ("rwkv", {"tokens": lambda t: [*t[:-1], "\\xZ1"]}, "an escape that is none"),
    "gemma without merges": ("gemma4", {"merges": None}, "merges is missing"),
    "gemma without start": ("gemma4", {"bos_token_id": None}, "there is no bos"),
    "gemma's merge of strangers": ("gemma4", {"merges": ["q q"]}, "merge does not fit"),
    "nul": ("spm", {"tokens": lambda t: [*t[:-1], "a\0b"]}, "sentencepiece refuses"),
    "byte tokens": (
        "spm", {"tokens": lambda t: [x.replace("<0x0", "<0y0") for x in t],
                "token_type": None}, "16 of the 256 byte tokens are missing, .* <0x00>",
    ),
}  # fmt: skip


def as_list(value):
    return value if isinstance(value, np.ndarray) and value.dtype == np.uint8 else list(value)


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSED.values(), ids=list(REFUSED))
def test_refused_with_the_reason(kind, changes, message, tiny):
    base = tiny(kind)
    changes = {
        key: value(as_list(base[f"tokenizer.ggml.{key}"])) if callable(value) else value
        for key, value in changes.items()
    }
    if isinstance(changes.get("scores"), list):
        changes["scores"] = floats(*changes["scores"])
    with pytest.raises(TokenizerError, match=message) as caught:
        from_metadata(tiny(kind, **changes)).encode("")  # which looks at merges
    assert "\n" not in str(caught.value)
    from_metadata(base)


BAD_BYTES = ["<0x-1>", "<0x+1>", "<0x 1>", "<0x1>", "<0x001>", "<0xGG>", "<0x1_>", "<0x４１>"]
BAD_BYTES += ["0x41", "<0x41>\n", "<0x41> ", ""]


@pytest.mark.parametrize("text", BAD_BYTES)
@pytest.mark.parametrize("kind", ["bpe", "spm"])
def test_a_byte_token_with_another_name(kind, text, tiny):
    base = tiny(kind)
    tokens, types = base["tokenizer.ggml.tokens"], base["tokenizer.ggml.token_type"]
    tokens, n = [*tokens, text], len(tokens)
    changes = {"tokens": tokens, "token_type": np.append(types, np.int32(6))}
    if kind == "spm":
        changes["scores"] = np.append(base["tokenizer.ggml.scores"], np.float32(0))
    with pytest.raises(TokenizerError, match=f"token {n} is of type byte"):
        from_metadata(tiny(kind, **changes))
    changes["token_type"] = np.append(types, np.int32(1))
    plain = from_metadata(tiny(kind, **changes))
    assert plain.token_bytes(n) == (text or f"[EMPTY_{n}]").encode()


def test_strange_types_are_undefined(tiny):
    types = tiny("bpe")["tokenizer.ggml.token_type"].copy()
    types[-2:] = [-1, 1 << 30]
    tokenizer = from_metadata(tiny("bpe", token_type=types))
    assert tokenizer.token_bytes(len(types) - 1) == tokenizer.token_bytes(len(types) - 2) == b""


def test_text_that_is_not_utf8(tiny, tmp_path):
    path = tmp_path / "v.gguf"
    for key in ("tokens", "merges"):
        values = tiny("bpe")[f"tokenizer.ggml.{key}"]
        gguf.write(path, tiny("bpe", **{key: [*values, b"\xff\xfe"]}, token_type=None), [])
        with pytest.raises(TokenizerError, match=rf"v.gguf: .*{key} holds .*which is not UTF-8"):
            from_gguf(path)


def test_the_path_is_named_and_a_broken_file_is_a_gguf_error(tiny, tmp_path):
    path = tmp_path / "v.gguf"
    gguf.write(path, tiny("bpe", model="plamo2"), [])
    with pytest.raises(TokenizerError, match=r"v.gguf: .*'plamo2'"):
        from_gguf(path)
    path.write_bytes(b"GGUF")
    with pytest.raises(GGUFError, match=r"v\.gguf"):
        from_gguf(str(path))


def test_half_of_a_surrogate_pair(tiny):
    with pytest.raises(TokenizerError, match="surrogate pair at character 2"):
        from_metadata(tiny("bpe")).encode("ab\ud800")


def test_the_message_for_an_unknown_name_lists_all_known_ones(tiny):
    with pytest.raises(TokenizerError) as caught:
        from_metadata(tiny("bpe", pre="x" * 1000))
    assert all(f" {name}" in str(caught.value) for name in PRETOKENIZERS)
    assert len(str(caught.value)) < 1500


NAMES = st.text(max_size=4) | st.sampled_from(["<0x41>", "<0x-1>", "<s>", "</s>", "<|end|>", "ab"])
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64),
    st.floats(),
    st.text(max_size=5),
    st.lists(NAMES, max_size=6),
    st.lists(st.integers(-9, 9), max_size=6).map(lambda n: np.array(n, np.int32)),
    st.binary(max_size=40).map(lambda raw: np.frombuffer(raw, np.uint8)),
    st.lists(st.floats(width=32), max_size=6).map(lambda n: np.array(n, np.float32)),
)
KEYS = ["tokens", "merges", "scores", "token_type", "pre", "bos_token_id", "eos_token_id"]
KEYS += ["precompiled_charsmap", "remove_extra_whitespaces", "normalizer.lowercase"]
KEYS += [
    "unknown_token_id",
    "padding_token_id",
    "add_bos_token",
    "add_space_prefix",
    "fim_pad_token_id",
]


@pytest.mark.filterwarnings("ignore:tokenizer.ggml.* is taken instead")
@given(
    kind=st.sampled_from(["bpe", "spm", "gemma4", "whitespace", "t5", "bert", "rwkv"]),
    changes=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3),
    text=st.text(),
)
def test_any_metadata_works_or_is_refused(tiny, kind, changes, text):
    try:
        tokenizer = from_metadata(tiny(kind, **changes))
        tokenizer.encode("")
    except PyggmlError as error:
        assert isinstance(error, TokenizerError)
        return
    ids = tokenizer.encode(text, parse_special=True)
    assert all(0 <= id < tokenizer.n_vocab for id in ids)
    tokenizer.decode(range(tokenizer.n_vocab), special=True)


@given(st.data())
def test_a_damaged_table_of_replacements_works_or_is_refused(tiny, data):
    table = tiny("t5")["tokenizer.ggml.precompiled_charsmap"].copy()
    for _ in range(data.draw(st.integers(1, 4))):
        table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.integers(0, 255))
    table = table[: data.draw(st.integers(0, len(table)) | st.just(len(table)))]
    try:
        from_metadata(tiny("t5", precompiled_charsmap=table)).encode("ae\u0301b\u00a0①½ <\u0338")
    except TokenizerError as error:
        assert "precompiled_charsmap is damaged" in str(error)


def test_a_trie_that_leads_back_into_itself_ends():
    """Every unit is a child of every other and has a value, of which the text is its own trie."""
    units = [c | 1 << 8 | c << 10 for c in range(256)]
    raw = np.array(units, "<u4").tobytes()
    table = Charsmap(len(raw).to_bytes(4, "little") + raw + b"x" * 300 + b"\0", ())
    assert table.apply("a" * 200) == "x" * 4 * 44  # 64 characters at once, of the value 256


def test_a_replacement_that_would_fill_the_memory(tiny):
    table = tiny("t5")["tokenizer.ggml.precompiled_charsmap"]
    n_trie = int.from_bytes(table[:4].tobytes(), "little")
    table = np.concatenate([table[: 4 + n_trie], octets(*b"x" * 100_000, 0)])
    tokenizer = from_metadata(tiny("t5", precompiled_charsmap=table))
    with pytest.raises(TokenizerError, match="damaged: the replacement at .* longer than 1024 by"):
        tokenizer.encode("½" * 1000)


def test_a_text_of_many_scripts_looks_at_its_own_pairs_only():
    """NFKC has 4,700 characters that begin a longer key."""
    proto = SentencePieceNormalizer(rule_name="nmt_nfkc").serialized_model_proto()
    start = proto.index(b"nmt_nfkc\x12") + 9 + 3  # the table's length has three bytes
    table = Charsmap(proto[start : proto.rindex(b"\0") + 1], ())
    text = "".join(chr(point) for point in range(0x20, 0x3000))
    assert "e\u0301" not in table.apply(text + "e\u0301")
    assert len(table._follows) <= len(text)
