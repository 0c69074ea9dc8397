"""Writing: what is written reads back, copying loses nothing, a failure leaves the old file."""

import weakref
from pathlib import Path

import gguf as upstream
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import pyggml.gguf as gguf
from pyggml.errors import GGUFError, PyggmlError
from pyggml.gguf import Field, ValueType
from pyggml.graph.dtypes import DTYPES, dtype

SHARED = Path(__file__).parents[2] / "../shared"
NUMBERS = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8", "?"]


def stored(kind, shape):
    """Shape of the array that holds a tensor, worked out anew."""
    return (*shape[:-1], shape[-1] // kind.block * kind.block_bytes) if kind.block > 1 else shape


def random_array(kind, shape, seed):
    raw = np.random.default_rng(seed).bytes(int(np.prod(stored(kind, shape))) * kind.numpy.itemsize)
    return np.frombuffer(raw, kind.numpy).reshape(stored(kind, shape))


@st.composite
def tensor(draw):
    kind = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    shape[-1] *= kind.block
    return kind, tuple(shape), random_array(kind, tuple(shape), draw(st.integers(0, 99)))


texts = st.text(max_size=20)
strings = texts | st.binary(max_size=20)
values = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(width=32),
    strings,
    st.lists(strings, max_size=5),
    hnp.arrays(st.sampled_from(NUMBERS), st.integers(0, 5)),
    hnp.arrays(st.sampled_from(NUMBERS), ()).map(lambda a: a[()]),
)
keys = st.text(min_size=1, max_size=12).filter(lambda key: key != "general.alignment")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("written")


def as_bytes(value):
    return value.encode() if isinstance(value, str) else value


def check_value(field, value):
    if isinstance(value, str | bytes):
        assert field.raw == as_bytes(value)
        if isinstance(value, str):
            assert field.value == value
    elif isinstance(value, list):
        assert field.value.raw_list() == [as_bytes(text) for text in value]
    elif isinstance(value, np.generic | np.ndarray):
        assert np.dtype(NUMBERS_OF[field.type]) == value.dtype
        assert (field.n is None) == (value.ndim == 0)
        np.testing.assert_array_equal(field.value, value)
    else:
        assert type(field.value) is type(value)
        np.testing.assert_equal(field.value, value)


NUMBERS_OF = dict(
    zip([ValueType(n) for n in (0, 1, 2, 3, 4, 5, 10, 11, 6, 12, 7)], NUMBERS, strict=True)
)


@given(
    st.dictionaries(keys, values, max_size=6),
    st.dictionaries(texts.filter(bool), tensor(), max_size=4),
    st.sampled_from([None, 8, 32, 256]),
)
@settings(max_examples=80)
def test_what_is_written_reads_back_and_copies_byte_for_byte(folder, metadata, tensors, alignment):
    path, copy = folder / "one.gguf", folder / "two.gguf"
    if alignment:
        metadata = {**metadata, "general.alignment": alignment}
    names = {name[:15]: made for name, made in tensors.items()}
    gguf.write(path, metadata, [(name, *made) for name, made in names.items()])
    with gguf.open(path) as file:
        assert list(file.metadata) == list(metadata) and list(file.tensors) == list(names)
        assert file.alignment == (alignment or 32)
        for key, value in metadata.items():
            check_value(file.metadata[key], value)
        for name, (kind, shape, array) in names.items():
            info = file.tensors[name]
            assert (info.dtype, info.shape) == (kind, shape)
            assert info.offset % file.alignment == 0
            assert file.data(name).tobytes() == array.tobytes()
            assert file.data(name).shape == array.shape
        gguf.write(copy, file.metadata, copied(file))
    assert copy.read_bytes() == path.read_bytes()


def copied(file):
    return [(n, i.dtype, i.shape, lambda n=n: file.data(n)) for n, i in file.tensors.items()]


@pytest.mark.parametrize("name", ["fixtures/qwen3-Q4_K_M.gguf", "vocab/ggml-vocab-llama-spm.gguf"])
def test_a_copy_of_llama_cpps_file_is_the_same_file(name, tmp_path):
    if not (SHARED / name).exists():
        pytest.skip(f"../shared/{name} is not here")
    file = gguf.open(SHARED / name)
    gguf.write(tmp_path / "copy.gguf", file.metadata, copied(file))
    found, wanted = (tmp_path / "copy.gguf").read_bytes(), file.path.read_bytes()
    assert found[: len(wanted)] == wanted
    assert not any(found[len(wanted) :]) and len(found) - len(wanted) < 32  # padding only


@pytest.mark.quick
def test_the_gguf_package_reads_what_we_write(tmp_path):
    path = tmp_path / "ours.gguf"
    metadata = {
        "general.alignment": 64,
        "general.architecture": "llama",
        "numbers": np.arange(3, dtype=np.int16),
        "tokens": ["a", "bc", "größe"],
        "small": 7,
        "negative": -7,
        "large": 2**40,
        "negative.large": -(2**40),
        "single": 0.5,
        "double": np.float64(0.1),
        "flag": True,
    }
    kinds = [dtype(name) for name in ("F32", "F16", "I32", "Q8_0", "Q4_K", "BF16")]
    made = [(k.name, k, (3, k.block), random_array(k, (3, k.block), 0)) for k in kinds]
    gguf.write(path, metadata, made)
    theirs = upstream.GGUFReader(path)
    for key, value in metadata.items():
        plain = list(value) if isinstance(value, np.ndarray) else value
        assert theirs.fields[key].contents() == plain, key
    assert theirs.alignment == 64
    kinds_read = {key: field.types[-1].name for key, field in theirs.fields.items()}
    for key, kind in {
        **{"small": "UINT32", "negative": "INT32", "large": "UINT64", "negative.large": "INT64"},
        **{"single": "FLOAT32", "double": "FLOAT64", "flag": "BOOL", "numbers": "INT16"},
    }.items():
        assert kinds_read[key] == kind, key
    for tensor_read, (name, kind, shape, array) in zip(theirs.tensors, made, strict=True):
        assert (tensor_read.name, tensor_read.tensor_type.name) == (name, kind.name)
        assert tensor_read.shape.tolist() == list(reversed(shape))
        assert tensor_read.data_offset % 64 == 0
        assert tensor_read.data.tobytes() == array.tobytes()


def test_a_strided_array_is_written_in_its_own_order(tmp_path):
    path = tmp_path / "strided.gguf"
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    gguf.write(path, {}, [("w", dtype("F32"), (4, 3), array)])
    np.testing.assert_array_equal(gguf.open(path).data("w"), array)


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    alive = []

    def make():
        assert all(made() is None for made in alive)
        array = np.zeros((4, 32), np.float32)
        alive.append(weakref.ref(array))
        return array

    gguf.write(tmp_path / "w.gguf", {}, [(f"t{i}", dtype("F32"), (4, 32), make) for i in range(5)])
    assert len(alive) == 5


def test_a_file_can_be_rewritten_from_itself(tmp_path):
    path = tmp_path / "self.gguf"
    gguf.write(path, {"k": ["a", "b"]}, [("w", dtype("F32"), (4,), np.arange(4, dtype=np.float32))])
    with gguf.open(path) as file:
        gguf.write(path, {**file.metadata, "new": 1}, copied(file))
    file = gguf.open(path)
    assert (list(file.get("k")), file.get("new")) == (["a", "b"], 1)
    assert file.data("w").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, GGUFError])
def test_a_failure_midway_leaves_the_old_file_and_nothing_beside_it(tmp_path, error):
    path = tmp_path / "kept.gguf"
    gguf.write(path, {"k": 1}, [])
    before = path.read_bytes()

    def fail():
        raise error("midway")

    first = ("a", dtype("F32"), (4096,), np.zeros(4096, np.float32))
    with pytest.raises(error, match="midway"):
        gguf.write(path, {}, [first, ("b", dtype("F32"), (4,), fail)])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 2), np.float32),
        np.zeros((2, 3), np.float64),
        np.zeros((2, 3), ">f4"),
        np.zeros(6, np.float32),
    ],
    ids=["shape", "dtype", "byte order", "axes"],
)
def test_an_array_other_than_announced_is_refused(tmp_path, array):
    with pytest.raises(GGUFError, match=r"tensor 'w' got an array of .* wanted float32 \(2, 3\)"):
        gguf.write(tmp_path / "w.gguf", {}, [("w", dtype("F32"), (2, 3), array)])
    assert not list(tmp_path.iterdir())


def test_all_faults_of_the_tensors_come_in_one_error(tmp_path):
    row = np.zeros(1, np.float32)
    faulty = [
        ("a", dtype("F32"), (1,), row),
        ("a", dtype("F32"), (1,), row),
        ("n" * 64, dtype("F32"), (1,), row),
        ("q", dtype("Q4_K"), (2, 128), row),
        ("z", dtype("F32"), (3, 0), row),
        ("none", dtype("F32"), (), row),
        ("five", dtype("F32"), (1,) * 5, row),
    ]
    with pytest.raises(GGUFError) as caught:
        gguf.write(tmp_path / "w.gguf", {}, faulty)
    for words in (
        "there are two tensors 'a'",
        "nnn' is not 1 to 63 bytes",
        "'q' has rows of 128 elements, wanted a multiple of Q4_K's block of 256",
        "'z' has shape (3, 0), wanted",
        "'none' has shape (), wanted",
        "'five' has shape (1, 1, 1, 1, 1), wanted 1 to 4 axes",
    ):
        assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("k", None, "'k': a NoneType cannot be a metadata value"),
        ("k", [1, 2], "'k': a list in metadata holds int, wanted only str"),
        ("k", 2**64, "'k': an integer needs more than 64 bits"),
        ("k", 1e300, "'k': the number 1e.300 is too large for FLOAT32"),
        ("k", "\ud800", r"'k': the text '\\ud800' holds half of a surrogate pair"),
        ("k", np.zeros((2, 2)), "'k': a metadata array has 2 axes, wanted 1"),
        ("k", np.zeros(2, np.float16), "'k': GGUF metadata has no type for NumPy's float16"),
        ("", 1, "metadata key '' is not 1 to 65535 bytes long"),
        ("k" * 65536, 1, "is not 1 to 65535 bytes long"),
        ("general.alignment", 48, "general.alignment is 48, wanted a power of two"),
        ("general.alignment", "32", "general.alignment is STRING, wanted UINT32"),
    ],
)
def test_metadata_that_gguf_cannot_hold_is_refused(tmp_path, key, value, words):
    with pytest.raises(GGUFError, match=words) as caught:
        gguf.write(tmp_path / "w.gguf", {key: value}, [])
    assert str(tmp_path / "w.gguf") in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_string_array_is_written_without_decoding_it():
    tokens = Field.of([b"\xff", "ü"]).value
    assert Field.of(tokens).value.raw_list() == [b"\xff", "ü".encode()]


def test_infinity_and_nan_are_numbers():
    assert Field.of(float("inf")).value == float("inf")
    assert np.isnan(Field.of(float("nan")).value)


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(PyggmlError, match=r"none/w\.gguf: cannot be written: No such file"):
        gguf.write(tmp_path / "none" / "w.gguf", {}, [])
