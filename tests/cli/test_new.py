"""`pyggml tokenizer` and `pyggml new`: from a text to a model that trains."""

import json

from pyggml import gguf


def test_from_a_text_to_a_model(pyggml, text, tmp_path):
    tok, base, out = (tmp_path / f"{x}.gguf" for x in ("tok", "base", "adapter"))
    ended = pyggml("tokenizer", "-f", text, "-o", tok, "--vocab-size", 400)
    assert ended.code == 0 and "bytes of the text in each" in ended.out
    assert "no more pairs of the text occur twice" in ended.err
    ended = pyggml("new", "--vocab", tok, "--params", "100k", "-c", 64, "-o", base)
    assert ended.code == 0 and "llama.block_count" in ended.out and " parameters, " in ended.out
    ended = pyggml("generate", "-m", base, "-p", "the", "-n", 3)
    assert ended.code == 0
    ended = pyggml("finetune", "-m", base, "-f", text, "-o", out, "--max-steps", 1, "--ctx", 16)
    assert ended.code == 0 and out.exists()


def test_keys_of_a_file(pyggml, text, tmp_path):
    tok, base, keys = tmp_path / "tok.gguf", tmp_path / "base.gguf", tmp_path / "keys.json"
    pyggml("tokenizer", "-f", text, "-o", tok, "--kind", "bytes")
    keys.write_text(json.dumps({"general.architecture": "qwen3", "qwen3.block_count": 3}))
    ended = pyggml("new", "--vocab", tok, "--keys", keys, "--params", "100k", "-o", base)
    assert ended.code == 0
    with gguf.open(base) as file:
        assert file.get("qwen3.block_count") == 3
        assert file.get("tokenizer.ggml.pre") == "qwen2"


def test_characters_without_room_are_counted(pyggml, tmp_path):
    text, tok = tmp_path / "t.txt", tmp_path / "tok.gguf"
    text.write_text("äöü ä", encoding="utf-8")
    given = ("tokenizer", "-f", text, "-o", tok, "--kind", "characters", "--vocab-size")
    assert "2 of 4 characters stay bytes: 258 tokens are full" in pyggml(*given, 258).err
    assert pyggml(*given, 260, "--force").err.count("stay bytes") == 0


def test_keys_that_nothing_reads_are_refused(pyggml, text, tmp_path):
    tok, base, keys = tmp_path / "tok.gguf", tmp_path / "base.gguf", tmp_path / "keys.json"
    pyggml("tokenizer", "-f", text, "-o", tok, "--kind", "bytes")
    for own, said in [
        ({"llama.blok_count": 3}, "reads: did you mean 'llama.block_count'?"),
        ({"qwen3.block_count": 3}, "qwen3.block_count is no hyperparameter that llama reads"),
        ({"general.file_type": 3}, "general.file_type is no hyperparameter"),
        ({"llama.vocab_size": 4}, "is 4, but the vocabulary has 257 tokens"),
        ({"llama.block_count": [[1], [2, 3]]}, "wanted a number, text or a list of numbers"),
    ]:
        keys.write_text(json.dumps({"general.name": "mine"} | own))
        ended = pyggml("new", "--vocab", tok, "--keys", keys, "--params", "100k", "-o", base)
        assert ended.code == 2 and said in ended.err, ended.err
    ended = pyggml("tokenizer", "-f", text, "-o", base, "--special", "a", "--vocab-size", 300)
    assert ended.code == 2 and "'a' is one of the text's tokens too" in ended.err
    assert not base.exists()


def test_a_disk_that_is_too_small_is_noticed_before(pyggml, text, tmp_path, monkeypatch):
    class Usage:
        free = 4000

    tok, base = tmp_path / "tok.gguf", tmp_path / "base.gguf"
    pyggml("tokenizer", "-f", text, "-o", tok, "--kind", "bytes")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage)
    ended = pyggml("new", "--vocab", tok, "--params", "100k", "-o", base)
    assert ended.code == 2 and "kB, but its disk has 4.0 kB left" in ended.err
    assert not base.exists()


def test_what_is_wrong_is_one_sentence(pyggml, tiny, text, tmp_path):
    tok, base, keys = tmp_path / "tok.gguf", tmp_path / "base.gguf", tmp_path / "keys.json"
    pyggml("tokenizer", "-f", text, "-o", tok, "--kind", "bytes")
    keys.write_text('{"llama.block_count": 3,}')
    wide = tmp_path / "wide.json"
    wide.write_text('{"llama.embedding_length": 1000000000}')
    uneven = tmp_path / "uneven.json"
    uneven.write_text('{"llama.embedding_length": 100, "llama.attention.head_count": 3}')
    for arguments, said in [
        (("new", "--vocab", tok, "--keys", uneven, "-o", base), "3 heads cannot share embedding_"),
        (("tokenizer", "-f", text, "-o", base, "--vocab-size", 9), "9 tokens are too few"),
        (("new", "--vocab", text, "-o", base), "is not a GGUF file"),
        (("new", "--vocab", tok, "--arch", "no", "-o", base), "architecture 'no': known are"),
        (("new", "--vocab", tok, "--arch", "arwkv7", "-o", base), "is not begun from scratch"),
        (("new", "--vocab", tok, "--params", "9", "-o", base), "are too few or too many"),
        (("new", "--vocab", tok, "--keys", keys, "-o", base), "is no JSON: the comma at"),
        (("new", "--vocab", tok, "--keys", text, "-o", base), "is no JSON"),
        (("new", "--vocab", tok, "--keys", wide, "-o", base), "embedding_length is 1000000000"),
    ]:
        ended = pyggml(*arguments)
        assert ended.code == 2 and ended.err.count("\n") == 1, ended.err
        assert said in ended.err, ended.err
    assert not base.exists()
