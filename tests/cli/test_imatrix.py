"""`pyggml imatrix` and `pyggml quantize --imatrix`."""

from pyggml import gguf
from pyggml.requantize.imatrix import read_imatrix


def test_measure_then_pack(pyggml, tiny, text, tmp_path):
    path, out, plain = (tmp_path / f"{x}.gguf" for x in ("i", "out", "plain"))
    ended = pyggml("imatrix", "-m", tiny, "-f", text, "-o", path, "--ctx", 16, "--chunks", 5)
    assert ended.code == 0 and ended.out.startswith(f"14 matrices\n{path}, ")
    assert ended.err.startswith("5 chunks of 16 tokens\nsome ")
    made = read_imatrix(path)
    assert (made.n_chunks, made.n_ctx, made.datasets) == (5, 16, (text.name,))
    assert pyggml("quantize", tiny, out, "Q4_0", "--imatrix", path).code == 0
    assert pyggml("quantize", tiny, plain, "Q4_0").code == 0
    with gguf.open(out) as a, gguf.open(plain) as b:
        assert a.get("quantize.imatrix.chunks_count") == 5
        name = "blk.0.attn_q.weight"
        assert (a.data(name) != b.data(name)).any()
        assert (a.data("output.weight") == b.data("output.weight")).all()
    ended = pyggml("quantize", tiny, plain, "Q8_0", "--imatrix", path)
    said = "importance changes nothing in 14 tensors of Q8_0: scales follow from the largest"
    assert ended.code == 0 and said in ended.out


def test_what_is_wrong_is_one_sentence(pyggml, tiny, text, tmp_path):
    out, latin = tmp_path / "o.gguf", text.with_name("latin.txt")
    latin.write_bytes("Straße".encode("latin-1"))
    for arguments, said in [
        (("imatrix", "-m", tiny, "-f", text, "-o", text), "is the text, wanted another name"),
        (
            ("imatrix", "-m", tiny, "-f", text, "-o", out, "--ctx", 400),
            "--ctx is 400, wanted 16 to",
        ),
        (("imatrix", "-m", tiny, "-f", tiny, "-o", out), "is a GGUF file, wanted text"),
        (("imatrix", "-m", tiny, "-f", latin, "-o", out), "in Windows' cp1252 it is ß"),
        (("imatrix", "-m", tiny, "-f", tmp_path, "-o", out), "this folder holds no data"),
        (("quantize", tiny, out, "Q4_0", "--imatrix", tiny), "general.type is not 'imatrix'"),
        (("quantize", tiny, out, "Q4_0", "--imatrix", text), "is no importance matrix"),
        (("quantize", tiny, out, "Q4_0", "--imatrix", out), "is the importance matrix, wanted"),
    ]:
        ended = pyggml(*arguments)
        assert ended.code == 2 and ended.err.count("\n") == 1, ended.err
        assert said in ended.err
    assert list(tmp_path.iterdir()) == []
