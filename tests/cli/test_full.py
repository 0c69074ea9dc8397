"""Training of all tensors by commands: rates that are too high, and numbers that halves lack."""

import re
import warnings

import numpy as np
import pytest

from pyggml import gguf, load
from pyggml.graph.dtypes import F16, F32

FULL = ("--train", "full", "--val-split", 0, "--clip", 0, "--lr", 10, "--lr-scheduler", "constant")


def test_a_rate_that_diverges_is_said_and_the_newest_checkpoint_is_written(
    finetune, tiny, tmp_path
):
    out, points = tmp_path / "adapter.gguf", tmp_path / "points"
    out.write_bytes(tiny.read_bytes())
    saved = ("--checkpoint-dir", points, "--checkpoint-every", 1, "--optimiser", "sgd")
    ended = finetune(*FULL, *saved, "--max-steps", 30, rank=None)
    assert ended.code == 2 and ended.err.count("\n") == 1, ended.err
    first = r"(nan|\S+, the gradient's length nan).*"  # the same step by another CPU's roundings
    assert re.search(rf"step \d+: the loss is {first}; --lr may be too high; the model", ended.err)
    assert out.read_bytes() == tiny.read_bytes()
    resume = re.search(r"(--resume) (\S+) (--max-steps) (\d+) writes the newest", ended.err)
    with warnings.catch_warnings(action="default"):  # the command makes a note of it
        ended = finetune(*FULL, *saved, *resume.groups(), rank=None)
    assert load(out).parts.weights and f"step {resume[4]} of {resume[4]}" in ended.out


@pytest.fixture
def full_halves(tiny, tmp_path):
    """The tiny model in halves, whose embeddings are the largest of them or their negatives."""
    path = tmp_path / "halves.gguf"
    with gguf.open(tiny) as file:
        arrays = {name: np.array(file.data(name)) for name in file.tensors}
        table = arrays["token_embd.weight"]
        table[:] = np.copysign(np.finfo(np.float16).max, table)
        kinds = {name: F16 if a.ndim == 2 else F32 for name, a in arrays.items()}
        tensors = [(n, kinds[n], a.shape, a.astype(kinds[n].numpy)) for n, a in arrays.items()]
        gguf.write(path, {k: f.value for k, f in file.metadata.items()}, tensors)
    return path


def test_numbers_that_halves_lack_are_named_and_saved_as_floats(
    finetune, full_halves, tmp_path, tmp_path_factory, monkeypatch
):
    """Lion moves each number by the rate, half of them outwards."""
    out = tmp_path / "adapter.gguf"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("elsewhere")))
    how = (*FULL, "--optimiser", "lion", "--max-steps", 2, "--weight-decay", 0)
    ended = finetune(*how, model=full_halves, rank=None)
    assert ended.code == 2 and "token_embd.weight" in ended.err and "F16" in ended.err
    assert not out.exists()
    spare = re.search(r"step 2 was saved as (\S+), its tensors in F32\n", ended.err)
    with gguf.open(spare[1]) as file:
        assert np.abs(file.data("token_embd.weight")).max() > np.finfo(np.float16).max
