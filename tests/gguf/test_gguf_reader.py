"""Reading: real files give what the gguf package gives, views copy nothing, getters check types."""

import struct
import time
import tracemalloc
from pathlib import Path

import gguf as upstream
import numpy as np
import pytest
from processes import printed

import pyggml.gguf as gguf
from pyggml.errors import GGUFError
from pyggml.graph.dtypes import dtype

ROOT = Path(__file__).parents[2]
SHARED = ROOT / "../shared"
REAL = sorted(SHARED.glob("fixtures/*.gguf")) + sorted(SHARED.glob("vocab/*.gguf"))
ABSENT = pytest.param(None, marks=pytest.mark.skip(reason="../shared has no GGUF files here"))


def fixture(name):
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"../shared/{name} is not here")
    return path


@pytest.fixture
def small(tmp_path):
    """A file of our own with every kind of value that the getters tell apart."""
    path = tmp_path / "small.gguf"
    metadata = {
        "an.int": 7,
        "a.float": 0.5,
        "a.bool": True,
        "a.text": "größe",
        "some.numbers": np.arange(5, dtype=np.int32),
        "some.tokens": [b"plain", b"\xff\xfe", "ü".encode(), b""],
    }
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    packed = np.arange(2 * 34, dtype=np.uint8).reshape(2, 34)
    half = np.arange(4, dtype=np.uint16)
    gguf.write(
        path,
        metadata,
        [
            ("w", dtype("F32"), (2, 3), weights),
            ("q", dtype("Q8_0"), (2, 32), packed),
            ("h", dtype("BF16"), (4,), half),
        ],
    )
    return path


@pytest.mark.parametrize("path", REAL or [ABSENT], ids=lambda path: path.name if path else "none")
def test_real_files_open_and_every_byte_of_them_can_be_reached(path):
    with gguf.open(path) as file:
        assert file.version in (2, 3)
        assert isinstance(file.get("general.architecture"), str)
        for key in file.metadata:
            value = file.get(key)
            if isinstance(value, gguf.StringArray):
                assert [raw.decode() for raw in value.raw_list()] == list(value)
        for name, info in file.tensors.items():
            data = file.data(name)
            assert data.nbytes == info.n_bytes
            assert data.size == 0 or data.max() >= data.min()


def test_a_real_file_reads_as_the_gguf_package_reads_it():
    path = fixture("fixtures/qwen3-Q4_K_M.gguf")
    theirs, ours = upstream.GGUFReader(path), gguf.open(path)
    fields = {k: v for k, v in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    for key, field in fields.items():
        value = ours.get(key)
        plain = list(value) if isinstance(value, np.ndarray | gguf.StringArray) else value
        assert plain == field.contents(), key
        assert ours.metadata[key].type == field.types[-1], key
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.dtype.name, info.offset) == (tensor.tensor_type.name, tensor.data_offset)
        np.testing.assert_array_equal(ours.data(tensor.name), tensor.data)


@pytest.mark.parametrize("name, n", [("qwen2", 151_936), ("gemma-4", 262_144)])
def test_a_large_vocabulary_opens_quickly(name, n):
    path = fixture(f"vocab/ggml-vocab-{name}.gguf")
    start = time.process_time()
    with gguf.open(path) as file:
        tokens = file.require("tokenizer.ggml.tokens", gguf.StringArray).raw_list()
    assert time.process_time() - start < 4  # 0.2 to 0.5 s; gguf's reader takes 10 and 26
    assert len(tokens) == n


@pytest.mark.quick
def test_getters_give_plain_values(small):
    file = gguf.open(str(small))
    assert file.path == small and file.version == 3 and file.alignment == 32
    for key, value in {"an.int": 7, "a.float": 0.5, "a.bool": True, "a.text": "größe"}.items():
        assert file.require(key, type(value)) == value
        assert type(file.get(key)) is type(value)
    assert file.get("absent") is None and file.get("absent", 3) == 3
    assert file.optional("absent", int) is None
    assert file.optional("absent", int, 4) == 4 and file.optional("an.int", int, 4) == 7
    numbers = file.require("some.numbers", np.ndarray)
    assert numbers.dtype == np.int32 and numbers.tolist() == [0, 1, 2, 3, 4]
    assert numbers.flags.aligned and not numbers.flags.writeable


def test_an_aligned_metadata_array_is_a_view_of_the_map(tmp_path):
    path = tmp_path / "aligned.gguf"
    gguf.write(path, {"eight...": np.arange(4, dtype=np.uint32)}, [])  # value at byte 24+16+4+12
    assert not gguf.open(path).get("eight...").flags.owndata


@pytest.mark.parametrize(
    "key, kind, words",
    [
        ("an.int", float, "'an.int' is UINT32, wanted float"),
        ("a.bool", int, "'a.bool' is BOOL, wanted int"),
        ("a.float", int, "'a.float' is FLOAT32, wanted int"),
        ("a.text", int, "'a.text' is STRING, wanted int"),
        ("some.numbers", int, "'some.numbers' is array of 5 INT32, wanted int"),
        ("some.tokens", str, "'some.tokens' is array of 4 STRING, wanted str"),
        ("no.such", str, "'no.such' is missing, wanted str"),
    ],
)
def test_require_names_key_found_and_wanted(small, key, kind, words):
    with pytest.raises(GGUFError, match=words) as caught:
        gguf.open(small).require(key, kind)
    assert str(small) in str(caught.value)
    if key != "no.such":
        with pytest.raises(GGUFError, match=words):
            gguf.open(small).optional(key, kind)


@pytest.mark.quick
def test_strings_give_text_and_raw_bytes(small):
    tokens = gguf.open(small).require("some.tokens", gguf.StringArray)
    assert list(tokens) == ["plain", "��", "ü", ""]
    assert tokens.raw_list() == [b"plain", b"\xff\xfe", "ü".encode(), b""]
    assert [tokens[i] for i in range(4)] == list(tokens) and tokens[-2] == "ü"
    assert tokens.raw(1) == tokens.raw(-3) == b"\xff\xfe"
    assert tokens[1:3] == ["��", "ü"] and len(tokens) == 4 and "ü" in tokens
    with pytest.raises(IndexError):
        tokens[4]


def test_raw_is_for_single_strings(small):
    file = gguf.open(small)
    assert file.metadata["a.text"].raw == "größe".encode()
    for key, kind in [("an.int", "UINT32"), ("some.tokens", "array of 4 STRING")]:
        with pytest.raises(GGUFError, match=f"{kind}, wanted STRING"):
            _ = file.metadata[key].raw


@pytest.mark.quick
def test_data_is_a_read_only_view_in_numpy_order(small):
    file = gguf.open(small)
    assert file.data("w").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.tensors["w"].shape == (2, 3) and file.tensors["w"].n_bytes == 24
    assert file.data("q").shape == (2, 34) and file.data("q").dtype == np.uint8
    assert file.tensors["q"].shape == (2, 32) and file.tensors["q"].dtype is dtype("Q8_0")
    assert file.data("h").dtype == np.uint16
    for name, info in file.tensors.items():
        data = file.data(name)
        assert not data.flags.writeable and not data.flags.owndata and data.flags.aligned
        assert small.read_bytes()[info.offset :][: info.n_bytes] == data.tobytes()
    with pytest.raises(GGUFError, match=r"small\.gguf: has no tensor 'nothing'"):
        file.data("nothing")


@pytest.mark.quick
def test_views_outlive_close_and_a_closed_file_says_so(small):
    with gguf.open(small) as file:
        weights, tokens = file.data("w"), file.get("some.tokens")
    assert weights.sum() == 15 and tokens[0] == "plain"
    file.close()
    for use in (lambda: file.data("w"), lambda: file.get("an.int"), lambda: file.tensors):
        with pytest.raises(GGUFError, match="has been closed"):
            use()


def test_a_large_tensor_is_not_read_until_it_is_used(tmp_path):
    path = tmp_path / "large.gguf"
    gguf.write(path, {}, [("w", dtype("F32"), (1024, 4096), np.zeros((1024, 4096), np.float32))])
    tracemalloc.start()
    try:
        data = gguf.open(path).data("w")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert data.nbytes == 1 << 24 and peak < 1 << 20


def test_version_2_reads_as_version_3(small):
    raw = bytearray(small.read_bytes())
    struct.pack_into("<I", raw, 4, 2)
    small.write_bytes(raw)
    assert gguf.open(small).version == 2
    assert gguf.open(small).get("an.int") == 7


def test_reading_needs_no_compiler():
    code = "import sys, pyggml.gguf; sys.exit('numba' in sys.modules)"
    printed(code)
