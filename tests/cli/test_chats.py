"""What is shown of chats before training: the template, what was done to them, samples."""

import json

import numpy as np
import pytest

from pyggml.cli.commands.finetune import chats as shown
from pyggml.cli.terminal.show import printable
from pyggml.lora import DataConfig, read_corpus

from chats import assistant, user

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|endoftext|>\n' }}"
    "{% endfor %}"
)
ROUND = [user("Hi"), assistant("the other")]
HOSTILE = [user("\x1b[2J\x07Hi"), assistant("\x9b31mNo \x1b]0;title\x07")]


@pytest.fixture
def chat_model(model_with):
    """Path of the tiny model, with a chat template."""
    return model_with(tokenizer__chat_template=CHATML)


@pytest.fixture
def chats(tmp_path):
    """Writes a file of chats; its path."""

    def write(*messages):
        path = tmp_path / "chats.jsonl"
        path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in messages))
        return path

    return write


def test_a_run_on_chats_says_what_it_learns_and_shows_samples(chat_model, chats, finetune):
    data = chats(*[ROUND] * 8, [user("<|endoftext|>?"), assistant("a" * 90)])
    how = ("--ctx", "64", "--long-chats", "drop", "--preview", "2", "--max-steps", "1")
    ended = finetune(*how, model=chat_model, data=data)
    assert ended.code == 0, ended.err
    assert ended.row("chats") == (
        "9, written as the model's chat template has them; learned: the assistant's answers"
    )
    assert "1 chat named control tokens in messages, which are plain text there" in ended.out
    assert "the first is line 9" in ended.out and "1 row longer than a window left out" in ended.out
    sample = "<|im_start|>assistant\n⟦the other<|endoftext|>⟧\n"
    assert ended.out.count(sample) == 2
    assert " tokens, 8 learned, between ⟦ and ⟧ --" in ended.out
    assert ended.out.index("-- before") > ended.out.index("-- sample 2")


def test_another_template_than_the_model_s_is_told(chat_model, chats, finetune, tmp_path):
    path = tmp_path / "my.jinja"
    path.write_text(CHATML.replace("im_start", "turn"))
    how = ("--ctx", "64", "--max-steps", "1", "--chat-template", path)
    ended = finetune(*how, model=chat_model, data=chats(*[ROUND] * 2))
    assert ended.code == 0, ended.err
    assert "the model's file has another template: the output carries this one" in ended.out
    assert f"written as {path} has them" in ended.out


def test_a_template_that_writes_as_the_model_s_does_is_no_other(
    chat_model, chats, finetune, tmp_path
):
    path = tmp_path / "same.jinja"
    path.write_text("{# in other words #}" + CHATML.replace("{{ '", "{{- '"))
    how = ("--ctx", "64", "--max-steps", "1", "--chat-template", path)
    ended = finetune(*how, model=chat_model, data=chats(*[ROUND] * 2))
    assert ended.code == 0, ended.err
    assert "another template" not in ended.out


def test_samples_are_in_colour_on_a_terminal_alone(chat_model, chats, monkeypatch, capsys):
    from pyggml import load

    tokenizer = load(chat_model).tokenizer
    corpus = read_corpus(chats(ROUND), tokenizer, DataConfig(ctx=64, val_split=0.0))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    shown.preview(corpus, tokenizer, 1)
    assert "\x1b[32mthe other<|endoftext|>\x1b[0m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    shown.preview(corpus, tokenizer, 1)
    assert "⟦the other<|endoftext|>⟧" in capsys.readouterr().out


def test_a_sample_cannot_drive_the_terminal(chat_model, chats, capsys):
    from pyggml import load

    tokenizer = load(chat_model).tokenizer
    corpus = read_corpus(chats(HOSTILE), tokenizer, DataConfig(ctx=256, val_split=0.0))
    shown.preview(corpus, tokenizer, 1)
    out = capsys.readouterr().out
    assert printable(out) == out and "[2J" in out and "31mNo" in out


def test_a_prompt_of_a_chat_is_what_its_first_answer_answers(chat_model, chats):
    from pyggml import load
    from pyggml.cli.terminal.samples import prompt_ids

    model = load(chat_model)
    config = DataConfig(ctx=64, val_split=0.0)
    corpus = read_corpus(chats(ROUND), model.tokenizer, config)
    asked = "<|im_start|>user\nHi<|endoftext|>\n"
    prompts = {None: f"{asked}<|im_start|>assistant\n", "Hi": asked, asked: asked}
    for prompt, wanted in prompts.items():  # the chat's, a user's words, the template's
        ids = prompt_ids(model, prompt, corpus, config)
        assert model.tokenizer.decode(ids, special=True) == wanted
        assert np.issubdtype(ids.dtype, np.integer)
