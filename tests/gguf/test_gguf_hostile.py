"""Crafted and damaged files: one case for each rule; GGUFError with the right words and no harm."""

import os
import struct
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyggml.gguf as gguf
from pyggml.errors import GGUFError
from pyggml.graph.dtypes import dtype

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
HUGE = 2**64 - 1


def u32(n):
    return struct.pack("<I", n)


def u64(n):
    return struct.pack("<Q", n)


def text(data):
    return u64(len(data)) + data


def kv(key, kind, payload):
    return text(key) + u32(kind) + payload


def array(key, item, n, payload):
    return kv(key, ARRAY, u32(item) + u64(n) + payload)


def info(name, ne, number, offset=0, n_dims=None):
    dims = b"".join(u64(n) for n in ne)
    return (
        text(name) + u32(len(ne) if n_dims is None else n_dims) + dims + u32(number) + u64(offset)
    )


def file(
    kvs=(), infos=(), n_data=0, *, magic=b"GGUF", version=3, n_kv=None, n_tensors=None, align=32
):
    head = magic + u32(version)
    head += u64(len(infos) if n_tensors is None else n_tensors)
    head += u64(len(kvs) if n_kv is None else n_kv)
    body = head + b"".join(kvs) + b"".join(infos)
    return body + bytes(-len(body) % align) + bytes(n_data)


A = info(b"a", [8], 0)  # 32 bytes of F32 at offset 0
REFUSED = {
    "empty": (b"", "is empty, wanted a GGUF file"),
    "magic": (b"PK\x03\x04 and more", r"not a GGUF file: it starts with b'PK"),
    "short magic": (b"GG", "the header needs 4 bytes at byte 0, but only 2 remain"),
    "no counts": (b"GGUF" + u32(3), "the header needs 8 bytes at byte 8, but only 0"),
    "version 0": (file(version=0), "version 0, wanted version 2 or 3"),
    "version 1": (file(version=1), "version 1, wanted version 2 or 3"),
    "version 4": (file(version=4), "version 4, wanted version 2 or 3"),
    "big-endian": (file(version=3 << 24), "big-endian"),
    "many keys": (file(n_kv=HUGE), f"claims {HUGE} metadata keys, which do not fit"),
    "one key too many": (file([kv(b"k", U8, b"\0")], n_kv=2, align=1), "claims 2 metadata keys"),
    "many tensors": (file([], [A], 32, n_tensors=HUGE), f"claims {HUGE} tensors, which do not"),
    "some tensors": (file([], [A], 32, n_tensors=2**40), "tensors, which do not fit"),
    "long key": (file([u64(HUGE) + b"k" * 99]), f"key 0 has a name of {HUGE} bytes, wanted at"),
    "key past the end": (file([u64(99) + b"k" * 9]), "key 0 needs 99 bytes at byte 32, but only"),
    "empty key": (file([kv(b"", U8, b"\0")]), "metadata key 0 is empty"),
    "key not UTF-8": (file([kv(b"\xff", U8, b"\0")]), "key 0 has a name that is not UTF-8: b'.xff"),
    "key twice": (file([kv(b"k", U8, b"\0")] * 2), "metadata key 1 is 'k' again"),
    "value type": (file([kv(b"k", 13, b"\0" * 9)]), "value of 'k' has type number 13, wanted 0 to"),
    "item type": (file([array(b"k", 99, 1, b"\0")]), "value of 'k' has type number 99"),
    "value past the end": (file([kv(b"k" * 9, U64, b"\0")], align=1), "needs 8 bytes at byte"),
    "long string": (file([kv(b"k", STRING, u64(HUGE))]), f"value of 'k' needs {HUGE} bytes"),
    "string + 1": (
        file([kv(b"k", STRING, u64(33) + b"x" * 32)], align=1),
        "needs 33 bytes at byte 45, but only 32 remain",
    ),
    "bool": (file([kv(b"k", BOOL, b"\2")]), "'k' has 2 for a BOOL, wanted 0 or 1"),
    "bools": (file([array(b"k", BOOL, 3, b"\0\1\7")]), "'k' has 7 for a BOOL, wanted 0 or 1"),
    "nested": (file([array(b"k", ARRAY, 1, b"\0" * 64)]), "'k' is an array of arrays"),
    "deeply nested": (file([array(b"k", ARRAY, 1, (u32(9) + u64(1)) * 9999)]), "array of arrays"),
    "long array": (file([array(b"k", F32, HUGE, b"")]), f"claims {HUGE} FLOAT32 values, which do"),
    "wrapping array": (file([array(b"k", F32, 2**62, b"\0" * 64)]), "FLOAT32 values, which do not"),
    "long strings": (file([array(b"k", STRING, 2**61, b"")]), "strings, which do not fit"),
    "missing strings": (
        file([array(b"k", STRING, 3, text(b"x" * 30))], align=1),
        "'k' ends early: 3 strings are claimed and 1 are there",
    ),
    "string in array": (
        file([array(b"k", STRING, 2, text(b"x") + u64(2**63))], align=1),
        "'k' ends early: a string claims 9223372036854775808 bytes",
    ),
    "alignment type": (
        file([kv(b"general.alignment", U64, u64(32))]),
        "general.alignment is UINT64, wanted UINT32",
    ),
    "alignment array": (
        file([array(b"general.alignment", U32, 1, u32(32))]),
        "general.alignment is array of 1 UINT32, wanted UINT32",
    ),
    **{
        f"alignment {n}": (
            file([kv(b"general.alignment", U32, u32(n))]),
            f"general.alignment is {n}, wanted a power of two from 8 to 1048576",
        )
        for n in (0, 4, 24, 2**21, 2**31)
    },
    "name not UTF-8": (file([], [info(b"\xff", [8], 0)], 32), "tensor 0 has a name that is not"),
    "long name": (file([], [u64(HUGE) + b"n" * 99], 32), f"tensor 0 has a name of {HUGE} bytes"),
    "name twice": (file([], [A, A], 64), "tensor 1 is 'a' again"),
    "no axes": (file([], [info(b"a", [], 0)], 32), "tensor 'a' has 0 axes, wanted 1 to 4"),
    "five axes": (file([], [info(b"a", [1] * 5, 0)], 32), "tensor 'a' has 5 axes, wanted 1 to 4"),
    "many axes": (file([], [info(b"a", [8], 0, n_dims=2**32 - 1)], 32), "4294967295 axes, wanted"),
    "zero axis": (file([], [info(b"a", [8, 0], 0)], 32), r"shape \(0, 8\), wanted 1 to 4 axes of"),
    "wrapping shape": (file([], [info(b"a", [2**32, 2**32], 0)], 32), "needs bytes 96 to .*, but"),
    "negative axis": (file([], [info(b"a", [HUGE], 24)], 32), "needs bytes 64 to .*, but the file"),
    "tensor type": (file([], [info(b"a", [32], 4)], 32), "tensor 'a' has type number 4, which is"),
    "negative type": (file([], [info(b"a", [32], 2**32 - 1)], 32), "type number 4294967295"),
    "part of a block": (
        file([], [info(b"a", [48], 8)], 999),
        "'a' has rows of 48 elements, wanted a multiple of Q8_0's block of 32",
    ),
    "block across rows": (file([], [info(b"a", [16, 2], 8)], 999), "has rows of 16 elements"),
    "offset": (file([], [info(b"a", [8], 0, 8)], 99), "offset 8, wanted a multiple of 32"),
    "offset, alignment 64": (
        file([kv(b"general.alignment", U32, u32(64))], [info(b"a", [8], 0, 32)], 99, align=64),
        "offset 32, wanted a multiple of 64",
    ),
    "one byte short": (
        file([], [A], 31),
        "'a' of shape .* needs bytes 64 to 96, but the file has",
    ),
    "offset past the end": (file([], [info(b"a", [8], 0, 2**63)], 32), "but the file has 96"),
    "wrapping offset": (file([], [info(b"a", [8], 0, 2**64 - 32)], 32), "but the file has 96"),
    "overlap": (
        file([], [info(b"b", [9], 0, 0), info(b"a", [8], 0, 32)], 99),
        "tensors 'b' and 'a' overlap",
    ),
    "same place": (file([], [A, info(b"b", [1], 0)], 99), "tensors 'a' and 'b' overlap"),
}


@pytest.mark.parametrize("data, words", list(REFUSED.values()), ids=list(REFUSED))
def test_a_broken_rule_is_refused_in_one_sentence(data, words, tmp_path):
    path = tmp_path / "crafted.gguf"
    path.write_bytes(data)
    start = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError, match=words) as caught:
            gguf.open(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    seconds = time.process_time() - start
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    assert len(message) < len(str(path)) + 250
    assert seconds < 5 and peak < 1 << 20


def test_what_is_no_file_is_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, words in [
        (tmp_path, "it is a folder, wanted a file"),
        (tmp_path / "missing.gguf", "missing.gguf: cannot be opened: No such file"),
        (pipe, "it is a pipe or device, wanted a file"),
        ("nul\0.gguf", "cannot be opened: .*embedded null (byte|character)"),
    ]:
        with pytest.raises(GGUFError, match=words):
            gguf.open(path)


def test_names_in_errors_are_escaped_and_cut(tmp_path):
    path = tmp_path / "names.gguf"
    path.write_bytes(file([kv(b"\x1b[2J\n" + b"k" * 9999, BOOL, b"\2")]))
    with pytest.raises(GGUFError) as caught:
        gguf.open(path)
    assert r"'\x1b[2J\nkkkk" in str(caught.value)
    assert str(caught.value).isprintable() and len(str(caught.value)) < len(str(path)) + 200


ALLOWED = {
    "nothing at all": file(),
    "no padding at the end": file([kv(b"k", U8, b"\1")], align=1),
    "empty arrays": file([array(b"n", F32, 0, b""), array(b"s", STRING, 0, b"")]),
    "empty string": file([kv(b"k", STRING, text(b""))]),
    "bools": file([array(b"k", BOOL, 2, b"\0\1")]),
    "last tensor without its padding": file([], [info(b"a", [1], 0)], 4),
    "tensors in any order, with gaps": file(
        [], [info(b"b", [8], 0, 64), info(b"a", [8], 0, 0)], 96
    ),
    "alignment 8": file([kv(b"general.alignment", U32, u32(8))], [info(b"a", [1], 0)], 4, align=8),
    "a type that cannot be unpacked": file([], [info(b"a", [256], 16)], 66),
}


def use_all_of(opened):
    for key in opened.metadata:
        value = opened.get(key)
        assert value is not None
        if isinstance(value, gguf.StringArray):
            assert len(list(value)) == len(value)
    for name, found in opened.tensors.items():
        data = opened.data(name)
        assert data.nbytes == found.n_bytes
        data.tobytes()


@pytest.mark.parametrize("data", list(ALLOWED.values()), ids=list(ALLOWED))
def test_what_the_rules_allow_is_read(data, tmp_path):
    path = tmp_path / "allowed.gguf"
    path.write_bytes(data)
    use_all_of(gguf.open(path))


# -- damage ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """(path to write damaged copies to, bytes of a small file with a bit of everything)."""
    path = tmp_path_factory.mktemp("damage") / "file.gguf"
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "tokenizer.ggml.tokens": ["a", "bc", b"\xff"],
        "tokenizer.ggml.scores": np.array([0.5, 1.5, 2.5], np.float32),
        "flags": np.array([True, False]),
        "general.alignment": 32,
    }
    tensors = [
        ("token_embd.weight", dtype("Q8_0"), (4, 32), np.ones((4, 34), np.uint8)),
        ("output_norm.weight", dtype("F32"), (2, 8), np.ones((2, 8), np.float32)),
    ]
    gguf.write(path, metadata, tensors)
    return path.with_name("damaged.gguf"), path.read_bytes()


def test_a_file_cut_at_any_byte_is_refused(valid):
    path, data = valid
    for n in range(len(data)):
        path.write_bytes(data[:n])
        with pytest.raises(GGUFError):
            gguf.open(path)
    path.write_bytes(data)
    use_all_of(gguf.open(path))


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=3))
@settings(max_examples=500)
def test_changed_bytes_are_refused_or_harmless(valid, changes):
    path, data = valid
    damaged = bytearray(data)
    for position, byte in changes:
        damaged[position % len(damaged)] = byte
    path.write_bytes(damaged)
    try:
        opened = gguf.open(path)
    except GGUFError:
        return
    use_all_of(opened)


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_any_bytes_after_the_magic_are_refused_or_harmless(valid, tail):
    path, _ = valid
    path.write_bytes(b"GGUF\3\0\0\0" + tail)
    try:
        opened = gguf.open(path)
    except GGUFError:
        return
    use_all_of(opened)
