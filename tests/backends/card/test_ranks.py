"""A process for each card: gradients that go from card to card give the bytes of one process."""

import subprocess
import sys

import pytest
from extras import needs

from pyggml.backends.cuda import cards
from pyggml.errors import DeviceError

SHORT = ("--demo", "--grad-accum", "5", "--max-steps", "3", "--ctx", "32", "--no-report")


def n_cards():
    try:
        return len(cards())
    except DeviceError:
        return 0


def finetune(output, *options):
    """What a fine-tune said, and what it wrote."""
    words = [sys.executable, "-P", "-m", "pyggml", "finetune", *SHORT, "-o", str(output), *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, output.read_bytes()


@needs("nccl")
@pytest.mark.skipif(n_cards() < 2, reason="wanted two cards")
def test_a_process_a_card_writes_the_bytes_of_one(tmp_path):
    _, wanted = finetune(tmp_path / "one.gguf", "--device", "cuda:0")
    said, found = finetune(tmp_path / "two.gguf", "--device", "cuda:0,cuda:1")
    assert found == wanted
    assert "rank 0 on cuda:0, rank 1 on cuda:1" in said and "through the host" not in said
    said, found = finetune(tmp_path / "shared.gguf", "--device", "cuda:0", "--ranks", "2")
    assert found == wanted
    assert "gradients go through the host: 2 ranks share a card" in said
