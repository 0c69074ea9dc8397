"""Models in several files: any part opens them all; parts that lack or do not fit are named."""

from pathlib import Path

import numpy as np
import pytest
from extras import need

import pyggml
from pyggml import gguf
from pyggml.errors import ConfigError, GGUFError
from pyggml.graph.dtypes import F32
from pyggml.requantize import requantize

GOLDEN = Path(__file__).parents[1] / "golden/models/qwen3-F16.gguf"


def keys(number, count, n_tensors):
    """As llama.cpp's gguf-split types them."""
    return {
        "split.no": np.uint16(number),
        "split.count": np.uint16(count),
        "split.tensors.count": np.int32(n_tensors),
    }


@pytest.fixture
def parts(tmp_path):
    """Three small files: eight numbers in a and b, then c, then d."""
    content = (("a", "b"), ("c",), ("d",))
    paths = [tmp_path / f"m-{i + 1:05}-of-00003.gguf" for i in range(3)]
    for i, (path, names) in enumerate(zip(paths, content, strict=True)):
        about = {"general.name": "m"} if i == 0 else {}
        tensors = [(n, F32, (8,), np.full(8, ord(n), np.float32)) for n in names]
        gguf.write(path, about | keys(i, 3, 4), tensors)
    return paths


def spoilt(path, names, metadata):
    """Another file in a part's place; a key that is None is left out."""
    tensors = [(n, F32, (8,), np.zeros(8, np.float32)) for n in names]
    gguf.write(path, {k: v for k, v in metadata.items() if v is not None}, tensors)


@pytest.mark.parametrize("i", range(3))
def test_any_part_opens_them_all(parts, i):
    with gguf.open(parts[i]) as file:
        assert list(file.tensors) == ["a", "b", "c", "d"]
        assert file.get("general.name") == "m"
        assert file.path == parts[i]
        assert file.paths == tuple(parts)
        assert file.n_bytes == sum(p.stat().st_size for p in parts)
        for name in "abcd":
            np.testing.assert_array_equal(file.data(name), np.full(8, ord(name), np.float32))
            assert not file.data(name).flags.owndata
        with pytest.raises(GGUFError, match="has no tensor 'e'"):
            file.data("e")
        kept = file.data("c")
    with pytest.raises(GGUFError, match="has been closed"):
        file.data("c")
    assert kept[0] == ord("c")


def test_a_count_of_one_is_no_split(tmp_path):
    gguf.write(tmp_path / "m.gguf", {"split.count": np.uint16(1)}, [])
    gguf.write(tmp_path / "n.gguf", {"split.count": np.uint16(0)}, [])
    for name in ("m.gguf", "n.gguf"):
        assert gguf.open(tmp_path / name).paths == (tmp_path / name,)


def test_missing_parts_are_named(parts):
    parts[1].unlink()
    with pytest.raises(GGUFError, match=r"m-00003.*: wanted beside it, but missing: m-00002-of-"):
        gguf.open(parts[2])


def test_many_missing_parts_are_counted(tmp_path):
    path = tmp_path / "m-00001-of-65535.gguf"
    gguf.write(path, keys(0, 65535, 9), [])
    with pytest.raises(GGUFError, match="m-00006-of-65535.gguf and 65529 more"):
        gguf.open(path)


@pytest.mark.parametrize("name", ["m.gguf", "m-00002-of-00003.gguf", "m-00001-of-00004.gguf"])
def test_a_name_that_does_not_fit(tmp_path, name):
    gguf.write(tmp_path / name, keys(0, 3, 4), [])
    with pytest.raises(GGUFError, match="part 1 of 3 .* should end in -00001-of-00003.gguf"):
        gguf.open(tmp_path / name)


@pytest.mark.parametrize(
    "names, changes, message",
    [
        ("c", {"split.no": np.uint16(2)}, "m-00002-of-00003.gguf is part 3 of 3, wanted part 2 of"),
        ("c", {"split.count": np.uint16(2)}, "m-00002-of-00003.gguf is part 2 of 2, wanted part 2"),
        ("c", {"split.no": None}, "but metadata key split.no is missing"),
        ("c", {"split.count": None}, "m-00002-of-00003.gguf is part 2 of 1, wanted part 2 of 3"),
        ("b", {}, "tensor 'b' is in m-00001-of-00003.gguf and in m-00002-of-00003.gguf"),
        ("ce", {}, "all parts together have 5 tensors, wanted 4"),
        ("", {}, "all parts together have 3 tensors, wanted 4"),
        ("c", {"split.no": np.int32(-1)}, "metadata key split.no is -1, wanted 0 or more"),
        ("c", {"split.no": "1"}, "metadata key split.no is STRING, wanted a whole number"),
        ("c", {"split.no": np.ones(1, np.int32)}, "split.no is array of 1 INT32, wanted a whole"),
    ],
)
def test_a_part_that_does_not_belong(parts, names, changes, message):
    spoilt(parts[1], names, keys(1, 3, 4) | changes)
    with pytest.raises(GGUFError, match=message):
        gguf.open(parts[0])


@pytest.mark.parametrize("count, number", [(3, 3), (2, 65535)])
def test_a_number_beyond_the_count(tmp_path, count, number):
    gguf.write(tmp_path / "m.gguf", keys(number, count, 1), [])
    with pytest.raises(GGUFError, match=f"has split.no {number}, wanted 0 to {count - 1}"):
        gguf.open(tmp_path / "m.gguf")


def test_a_damaged_part_is_named(parts):
    parts[2].write_bytes(parts[2].read_bytes()[:-20])
    with pytest.raises(GGUFError, match=r"m-00001.*: m-00003-of-00003.gguf: tensor 'd' .* needs"):
        gguf.open(parts[0])
    parts[2].write_bytes(b"")
    with pytest.raises(GGUFError, match="m-00003-of-00003.gguf: is empty"):
        gguf.open(parts[0])
    parts[2].unlink()
    parts[2].mkdir()
    with pytest.raises(GGUFError, match="m-00003-of-00003.gguf cannot be opened: it is a folder"):
        gguf.open(parts[0])


# -- whole models ---------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    """The golden model in four files."""
    with gguf.open(GOLDEN) as file:
        infos = list(file.tensors.values())
        paths = [tmp_path / f"qwen-{i + 1:05}-of-00004.gguf" for i in range(4)]
        for i, path in enumerate(paths):
            metadata = (dict(file.metadata) if i == 0 else {}) | keys(i, 4, len(infos))
            mine = infos[i * 7 : (i + 1) * 7]
            tensors = [(t.name, t.dtype, t.shape, file.data(t.name)) for t in mine]
            gguf.write(path, metadata, tensors)
    return paths


def test_a_model_in_parts_is_the_model(model):
    tokens = np.arange(12)
    whole = pyggml.load(GOLDEN).logits(tokens)
    np.testing.assert_array_equal(pyggml.load(model[0]).logits(tokens), whole)


def test_quantising_makes_one_file(model, tmp_path):
    requantize(model[0], tmp_path / "one.gguf", "Q8_0")
    requantize(GOLDEN, tmp_path / "wanted.gguf", "Q8_0")
    with gguf.open(tmp_path / "one.gguf") as found, gguf.open(tmp_path / "wanted.gguf") as wanted:
        assert found.metadata == wanted.metadata
        for name in wanted.tensors:
            np.testing.assert_array_equal(found.data(name), wanted.data(name))
    with pytest.raises(ConfigError, match="is the file to read from"):
        requantize(model[0], model[2], "Q8_0")


@pytest.mark.interop
def test_llama_cpp_takes_the_same_parts(model):
    llama_cpp = need("llama_cpp")
    tokens = [int(t) for t in np.arange(12)]
    llama = llama_cpp.Llama(str(model[0]), n_ctx=12, logits_all=True, verbose=False)
    llama.eval(tokens)
    ours = pyggml.load(model[0], compute="f32").logits(tokens)
    assert np.mean((np.array(llama.scores[:12]) - ours) ** 2) / np.var(ours) < 1e-4
