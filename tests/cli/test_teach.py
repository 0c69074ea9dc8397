"""`pyggml teach`: a file for students, which a run of `finetune` learns from."""

import pytest


def test_what_a_teacher_said_is_learned(pyggml, finetune, tiny, text, tmp_path):
    answers = tmp_path / "answers.gguf"
    run = ("teach", "-m", tiny, "-f", text, "-o", answers, "--ctx", 16, "--top-k", 8)
    ended = pyggml(*run)
    assert ended.code == 0 and "8 probabilities of a token" in ended.out
    assert "answers.gguf: " in ended.row("output") and answers.stat().st_size > 1000
    how = ("--objective", "distill", "--teacher", answers, "--hard-weight", 0)
    learned = finetune(*how)
    assert learned.code == 0 and "accuracy" in learned.out
    other = finetune(*how, "--ctx", 12)
    assert other.code == 2 and "made of another text, or with another --ctx" in other.err
    assert pyggml(*run, "--ctx", 1 << 20).code == 2


@pytest.mark.parametrize("teacher", ["no.gguf", ""])
def test_a_teacher_is_wanted(finetune, teacher):
    ended = finetune("--objective", "distill", "--teacher", teacher)
    assert ended.code == 2 and ended.err.count("\n") < 4
