"""Roles, ends of generation, and where text is cut at special tokens."""

import numpy as np
import pytest

from pyggml.tokenizer import from_metadata
from pyggml.tokenizer.metadata import Metadata
from pyggml.tokenizer.partition import Special, TextPart, in_order, partition
from pyggml.tokenizer.special import DEFAULTS, read_specials
from pyggml.tokenizer.vocabulary import TOKENS, read_vocabulary

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def vocabulary(tiny, extra, **changes):
    """The tiny vocabulary with more tokens: text -> type."""
    base = tiny("bpe")
    tokens = [*base["tokenizer.ggml.tokens"], *extra]
    types = np.append(base["tokenizer.ggml.token_type"], list(extra.values()))
    made = from_metadata(tiny("bpe", tokens=tokens, token_type=types.astype(np.int32), **changes))
    return made, {text: i for i, text in enumerate(tokens)}


def ends(tokenizer, ids):
    return {text for text, id in ids.items() if tokenizer.is_eog(id)}


def test_roles_from_keys_and_their_defaults(tiny):
    tokenizer = from_metadata(tiny("bpe", eot_token_id=5, padding_token_id=6))
    roles = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eot_id)
    assert (*roles, tokenizer.pad_id, tokenizer.unk_id) == (0, 1, 5, 6, 7)
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "unknown_token_id"))
    bare = from_metadata(tiny("bpe", **none))
    assert (bare.bos_id, bare.eos_id, bare.unk_id, bare.pad_id) == (None, 1, None, None)
    bare = from_metadata(tiny("spm", **none))
    assert (bare.bos_id, bare.eos_id, bare.unk_id, bare.pad_id) == (1, 2, 0, None)
    assert from_metadata(tiny("bpe", pre="glm4", **none)).bos_id is None
    assert bare.n_vocab == len(tiny("spm")["tokenizer.ggml.tokens"])


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_default_is_a_role_only_where_its_token_may_be_one(kind):
    """llama.cpp takes token 11 of a BPE vocabulary for its end, whatever it is. Of every kind: a
    word is no default; a control token is; the vocabulary's own end goes before one of no name."""
    for role, id in DEFAULTS[kind].items():
        if role == "unk":  # which stands for any text
            continue
        for type, has_end in ((NORMAL, False), (CONTROL, False), (NORMAL, True), (CONTROL, True)):
            tokens, types = [f"w{i}" for i in range(120)], np.ones(120, np.int32)
            types[id] = type
            if has_end:
                tokens[60], types[60] = "<|endoftext|>", CONTROL
            metadata = Metadata({TOKENS: tokens, "tokenizer.ggml.token_type": types})
            found = read_specials(metadata, read_vocabulary(metadata), kind, has_bos=True).roles
            own = 60 if has_end and role == "eos" else id if type == CONTROL else None
            assert found[role] == own, (role, type, has_end)


def test_a_default_beyond_a_small_vocabulary_is_none():
    tiniest = {"model": "gpt2", "tokens": ["a", "b"], "merges": []}
    tokenizer = from_metadata({f"tokenizer.ggml.{k}": v for k, v in tiniest.items()})
    assert tokenizer.bos_id is tokenizer.eos_id is None
    assert tokenizer.encode("ab") == [0, 1]


@pytest.mark.parametrize("key", ["padding_token_id", "unknown_token_id", "fim_pad_token_id"])
def test_a_harmless_role_out_of_range_counts_as_absent(tiny, key):
    changes = {"unknown_token_id": None, key: 1 << 20}
    tokenizer = from_metadata(tiny("bpe", **changes))
    assert tokenizer.pad_id is tokenizer.unk_id is None


@pytest.mark.parametrize(
    ("kind", "pre", "changes", "added"),
    [
        ("spm", None, {}, (True, False)),
        ("spm", None, {"add_bos_token": False, "add_eos_token": True}, (False, True)),
        ("bpe", "qwen2", {}, (False, False)),
        ("bpe", "llama-bpe", {}, (True, False)),
        ("bpe", "tekken", {}, (True, False)),
        ("bpe", "chameleon", {"add_bos_token": False}, (False, False)),
        ("bpe", "gpt-2", {"add_bos_token": True, "add_eos_token": True}, (True, True)),
    ],
)
def test_what_encode_adds(tiny, kind, pre, changes, added):
    tokenizer = from_metadata(tiny(kind, pre=pre, **changes))
    assert (tokenizer.add_bos, tokenizer.add_eos) == added
    plain = tokenizer.encode("ab", add_special=False)
    bos, eos = added
    assert tokenizer.encode("ab") == [0] * bos + plain + [1] * eos
    assert tokenizer.encode("") == [0] * bos + [1] * eos


def test_names_end_a_generation_and_become_control_tokens(tiny):
    tokenizer, ids = vocabulary(tiny, {"<|eot_id|>": NORMAL, "<end_of_turn>": USER_DEFINED})
    wanted = {"</s>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>"}
    assert ends(tokenizer, ids) == wanted
    assert tokenizer.eot_id == ids["<|eot_id|>"]
    assert tokenizer.token_bytes(ids["<|eot_id|>"]) == b""
    assert ids["<end_of_turn>"] not in tokenizer.encode("<end_of_turn>")
    assert tokenizer.encode("<end_of_turn>", parse_special=True) == [ids["<end_of_turn>"]]


def test_roles_end_a_generation_too(tiny):
    n = from_metadata(tiny("bpe")).n_vocab
    tokenizer, ids = vocabulary(
        tiny, {"STOP": CONTROL, "TURN": CONTROL, "<|file_sep|>": CONTROL, "<|eom_id|>": CONTROL,
               "<|fim_prefix|>": NORMAL},
        eos_token_id=n, eot_token_id=n + 1,
    )  # fmt: skip
    found = ends(tokenizer, ids)
    assert {"STOP", "TURN", "<|file_sep|>", "<|eom_id|>"} <= found
    assert "<|fim_prefix|>" not in found
    assert tokenizer.token_bytes(ids["<|fim_prefix|>"]) == b""


def test_harmony_messages_end_without_ending_the_turn(tiny):
    names = {"<|end|>": CONTROL, "<|return|>": CONTROL, "<|channel|>": CONTROL}
    tokenizer, ids = vocabulary(tiny, names)
    assert "<|end|>" in ends(tokenizer, ids)
    call_only = {"<|end|>": CONTROL, "<|call|>": CONTROL}
    tokenizer, ids = vocabulary(tiny, call_only)
    assert "<|end|>" in ends(tokenizer, ids)
    tokenizer, ids = vocabulary(tiny, names | call_only)
    assert not tokenizer.is_eog(ids["<|end|>"])
    assert tokenizer.is_eog(ids["<|return|>"]) and tokenizer.is_eog(ids["<|call|>"])
    assert tokenizer.encode("<|end|><|channel|>") == [ids["<|end|>"], ids["<|channel|>"]]
    assert tokenizer.token_bytes(ids["<|channel|>"]) == b"<|channel|>"


def test_where_the_turn_has_its_own_token_s_is_text(tiny):
    tokenizer, ids = vocabulary(tiny, {"<|tool_response>": CONTROL}, eos_token_id=2)
    assert not tokenizer.is_eog(ids["</s>"]) and tokenizer.is_eog(ids["<|tool_response>"])
    assert tokenizer.token_bytes(ids["</s>"]) == b"</s>"


def test_a_mask_swallows_the_spaces_before_it(tiny):
    tokenizer, ids = vocabulary(tiny, {"<mask>": USER_DEFINED}, pre="jina-v2-es")
    assert tokenizer.encode("a \t<mask> b") == [
        *tokenizer.encode("a"), ids["<mask>"], *tokenizer.encode(" b"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "parse", "parts"),
    [
        ("", True, []),
        ("x", True, ["x"]),
        ("xabcd", False, ["x", 1]),
        ("xab abcdabcd", False, [2, " ", 1, 1]),
        ("<c> x<c>", False, ["<c> x<c>"]),
        ("<c> x<c>", True, [3, " x", 3]),
        ("a \n<l> \n<r> \n", True, ["a", 4, " \n", 5]),
        (" <l>", True, [4]),
        ("<r>\u00a0 ", True, [5, "\u00a0 "]),
    ],
)
def test_partition(text, parse, parts):
    specials = in_order(
        [
            Special("xab", 2, hidden=False),
            Special("abcd", 1, hidden=False),
            Special("<c>", 3, hidden=True),
            Special("<l>", 4, hidden=True, lstrip=True),
            Special("<r>", 5, hidden=True, rstrip=True),
        ]
    )
    found = partition(text, specials, parse)
    assert [text[p.start : p.end] if p.id is None else p.id for p in found] == parts


def test_plain_ranges_hold_no_hidden_token():
    specials = in_order([Special("<c>", 3, hidden=True), Special("cd", 4, hidden=False)])
    text = "<c>x<c><c>cd"
    assert partition(text, specials, True, [(5, 6), (10, 12)]) == [
        TextPart(0, 3, 3), TextPart(3, 7), TextPart(7, 10, 3), TextPart(10, 12, 4),
    ]  # fmt: skip


def test_length_counts_in_bytes():
    longer = Special("世", 0, hidden=False)
    assert in_order([Special("ab", 1, hidden=False), longer])[0] is longer
