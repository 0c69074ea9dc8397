"""A compressed file is read as what is in it, in every format."""

import gzip
import json
import random

import pytest
from extras import need

from pyggml.errors import DataError
from pyggml.hub import _data_files
from pyggml.lora.data import Schema, read_rows
from pyggml.lora.data.formats import packed
from pyggml.lora.data.reading.files import UNITS

ROWS = [{"prompt": f"p {i} ü", "completion": "c" * i} for i in range(1, 40)]
CONTENT = {
    "a.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "a.json": json.dumps(ROWS),
    "a.csv": "prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in ROWS),
    "a.txt": "some words, ü\n" * 50,
}


def pack(name, data):
    if name.endswith(".gz"):
        return gzip.compress(data[:100]) + gzip.compress(data[100:])  # of several members
    pyarrow = need("pyarrow")
    return pyarrow.compress(data, codec="zstd", asbytes=True)


def test_every_format_is_here():
    assert {read.split(".")[-1] for read in CONTENT} == {"jsonl", "json", "csv", "txt"}
    assert len(CONTENT) == len({*UNITS} - {"parquet", "rows"}) + 1, "rows of a program are no file"


@pytest.mark.parametrize("suffix", packed.SUFFIXES)
@pytest.mark.parametrize("name", CONTENT)
def test_it_is_read_as_its_content(tmp_path, name, suffix):
    plain, file = tmp_path / name, tmp_path / f"{name}{suffix}"
    plain.write_text(CONTENT[name], "utf-8")
    file.write_bytes(pack(suffix, plain.read_bytes()))
    kind, rows = read_rows(plain, Schema())
    other = tmp_path / "without an ending"
    for path in (file, other):
        other.write_bytes(file.read_bytes())
        again = read_rows(path, Schema())
        texts = [str(row).replace(str(path), str(plain)) for row in again[1]]
        assert (again[0], texts) == (kind, [str(row) for row in rows])
    assert _data_files("x", [file.name, "a.bin"], "", ("train",)) == [file.name]


@pytest.mark.parametrize("suffix", packed.SUFFIXES)
def test_a_damaged_one_is_told(tmp_path, suffix):
    whole = pack(suffix, random.Random(0).randbytes(4000).hex().encode())
    file = tmp_path / f"a.txt{suffix}"
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=f"a.txt{suffix}: cannot be unpacked: "):
        read_rows(file)


def test_one_that_grows_without_bounds_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "_FREE_BYTES", 1 << 16)
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b" " * (8 << 20)))
    with pytest.raises(DataError, match="unpacks to more than 300 times its size, wanted data"):
        read_rows(file)


def test_without_the_library_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd and more")
    with pytest.raises(DataError, match=r"compressed by Zstandard, .* install '.*\[parquet\]'"):
        read_rows(tmp_path / "a.jsonl.zst")
