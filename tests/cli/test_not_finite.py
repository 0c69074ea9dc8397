"""Weights whose scales are no numbers: every command that computes with them ends in words.

A command is in one of the tables below; one that is new fails here until it is.
"""

import io
import json
import re

import numpy as np
import pytest
from computing import COMPUTE, OTHERS, data_files, words

from pyggml import gguf, load
from pyggml.cli.__main__ import COMMANDS
from pyggml.generation import Session
from pyggml.graph.dtypes import DTYPES, F32
from pyggml.quants import quantize

TENSORS = (
    "token_embd",
    "blk.0.attn_q",
    "blk.1.attn_norm",
    "blk.1.ffn_down",
    "output_norm",
    "output",
)
NUMBERS = (np.nan, np.inf)
# What goes into the matrices is finite still, and that is all that it measures; an ablation reads
# the matrices behind heads and neurons alone.
NOT_MET = {
    "embed": ("output",),
    "imatrix": ("blk.1.ffn_down", "output_norm", "output"),
    "ablate": ("token_embd", "blk.0.attn_q", "blk.1.attn_norm", "output_norm", "output"),
}


def test_each_command_is_in_a_table():
    computes = {words(name, {})[0] for name in COMPUTE}
    assert computes | OTHERS.keys() == COMMANDS.keys() and not computes & OTHERS.keys()


@pytest.fixture(scope="module")
def spoilt(tiny, tmp_path_factory):
    """spoilt(tensor, number): the tiny model in Q8_0, the first scale of each of whose rows is this
    number there; of a vector its first number."""
    folder = tmp_path_factory.mktemp("spoilt")

    def packed(array, number):
        if array.ndim == 1:
            array[:1] = array[0] if number is None else number
            return F32, array
        rows = quantize(array, "Q8_0")
        if number is not None:
            rows[:, :2] = np.array([number], np.float16).view(np.uint8)
        return DTYPES["Q8_0"], rows.view(DTYPES["Q8_0"].numpy)

    def make(tensor, number):
        path = folder / f"{tensor}-{number}.gguf"
        if not path.exists():
            with gguf.open(tiny) as file:
                metadata = {key: field.value for key, field in file.metadata.items()}
                tensors = []
                for name, t in file.tensors.items():
                    bad = number if name == f"{tensor}.weight" else None
                    dtype, array = packed(np.array(file.data(name)), bad)
                    tensors.append((name, dtype, t.shape, array))
                gguf.write(path, metadata, tensors)
        return path

    return make


def numbers_are_finite(path):
    with gguf.open(path) as file:
        return all(np.isfinite(file.data(name)).all() for name in file.tensors)


@pytest.fixture
def files(text, tmp_path):
    return data_files(text, tmp_path)


SAID = re.compile(r"not finite|is no number|finite number|make no numbers|makes no number")


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("command", COMPUTE)
def test_it_ends_in_words_and_a_code(pyggml, spoilt, files, command, tensor, monkeypatch):
    for number in NUMBERS if tensor in ("token_embd", "blk.1.ffn_down") else NUMBERS[:1]:
        monkeypatch.setattr("sys.stdin", io.StringIO("the\n"))
        given = files | {"MODEL": spoilt(tensor, number)}
        files["OUT"].with_name(files["OUT"].name + ".unfinished").unlink(missing_ok=True)
        ended = pyggml(*words(command, given))
        if tensor in NOT_MET.get(command, ()):
            assert ended.code == 0
            if files["OUT"].exists():
                assert numbers_are_finite(files["OUT"])
                files["OUT"].unlink()
            continue
        assert ended.code == 2, ended
        assert SAID.search(ended.err) and ended.err.count("\n") <= 2, ended.err
        assert not re.search(r"\b(nan|inf)\b", ended.out), ended.out
        assert not files["OUT"].exists()


# -- what is earned is written ------------------------------------------------------------------


def test_an_adapter_of_finite_losses_is_written_though_its_answer_is_none(
    finetune, tmp_path, monkeypatch
):
    """A prompt may meet a weight that no row met: here every answer is made none."""
    feed = Session.feed
    monkeypatch.setattr(Session, "feed", lambda self, tokens: feed(self, tokens) * np.nan)
    ended = finetune("--report")
    assert ended.code == 2 and "Traceback" not in ended.err
    assert "the model's answer to the prompt is no number (nan)" in ended.err
    assert "adapter.gguf was written" in ended.err and "loss" in ended.row("result")
    assert numbers_are_finite(tmp_path / "adapter.gguf")
    assert (tmp_path / "adapter.html").exists()


def test_eval_prints_the_files_before_the_one_at_fault(pyggml, tiny, tmp_path):
    """Of two files, the second with a token whose embedding is none."""
    path, (z,) = tmp_path / "m.gguf", load(tiny).tokenizer.encode("z")
    with gguf.open(tiny) as file:
        metadata = {key: field.value for key, field in file.metadata.items()}
        tensors = [(n, F32, t.shape, np.array(file.data(n))) for n, t in file.tensors.items()]
        next(a for n, _, _, a in tensors if n == "token_embd.weight")[z] = np.nan
        gguf.write(path, metadata, tensors)
    for name, row in {"a": "the path", "b": "the zoo"}.items():
        (tmp_path / f"{name}.jsonl").write_text((json.dumps({"text": row}) + "\n") * 3)
    given = ("-m", path, "-f", tmp_path / "a.jsonl", "-f", tmp_path / "b.jsonl")
    shown, as_json = pyggml("eval", *given), pyggml("eval", *given, "--json")
    assert shown.code == as_json.code == 2
    assert "b.jsonl: the loss of a token is nan" in shown.err and "a.jsonl" in shown.out
    assert ["a.jsonl" in str(f) for f in json.loads(as_json.out)["files"]] == [True]
