"""`pyggml chat`: what is fed, what is forgotten, what is kept, and how it takes what users do."""

import io
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pyggml as library
from pyggml.chat import ChatEncoder, ChatTemplate
from pyggml.cli.commands.chat.console import Console
from pyggml.cli.commands.chat.conversation import Conversation
from pyggml.cli.terminal.show import printable
from pyggml.errors import DataError, TemplateError
from pyggml.generation import Completion, Sampling, Session
from pyggml.lora.data import read_rows

# A turn is <|endoftext|> (a control token), the first letter of its role, and what is said.
TURNS = (
    "{% for m in messages %}<|endoftext|>{{ m.role[0] }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|endoftext|>a:{% endif %}"
)
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def talker(model_with):
    return model_with(tokenizer__chat_template=TURNS, llama__context_length=512)


@pytest.fixture(scope="module")
def model(talker):
    return library.load(talker, compute="f32")


@pytest.fixture
def chat(model):
    """Makes a conversation of short answers."""

    def make(n_ctx=500, how=GREEDY, n_tokens=6, source=TURNS, system=None):
        return Conversation(model, ChatTemplate(source, "t"), how, n_ctx, n_tokens, system)

    return make


@pytest.fixture
def fed(monkeypatch):
    """The tokens of every call of a session, in order."""
    found, feed = [], Session.feed

    def recorded(self, tokens):
        found.append(list(tokens))
        return feed(self, tokens)

    monkeypatch.setattr(Session, "feed", recorded)
    return found


@pytest.fixture
def talk(pyggml, talker, monkeypatch):
    """Runs `pyggml chat` with these lines in a pipe."""

    def call(text, *arguments, model=talker):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return pyggml("chat", "-m", model, "-n", 6, "--temp", 0, "--compute", "f32", *arguments)

    return call


def said(chat, question, **how):
    return "".join(piece.text for piece in chat.ask(question, **how))


def answer_to(model, text, n_tokens=6):
    """The greedy answer to a prompt that is fed as a whole."""
    ids = model.tokenizer.encode(text, parse_special=True)
    session = Session(model, 500)
    completion = Completion(model.tokenizer, GREEDY, ids, n_tokens)
    text, logits = "", session.feed(ids)
    while completion.finish is None:
        piece = completion.take(logits)
        text += piece.text
        logits = session.feed([piece.token])
    return text


# -- what is said -------------------------------------------------------------------------------


def test_a_pipe_gets_the_answers_alone(talker, model):
    first = answer_to(model, "<|endoftext|>u:the path<|endoftext|>a:")
    prompt = f"<|endoftext|>u:the path<|endoftext|>a:{first}<|endoftext|>u:and\non<|endoftext|>a:"
    options = ("-n", 6, "--temp", 0, "--compute", "f32")
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "pyggml.cli", "chat", "-m", str(talker), *map(str, options)],
        input="the path\n\nand\\\non",
        capture_output=True,
        text=True,
        timeout=300,
    )
    wanted = [first.lstrip() + "\n", answer_to(model, prompt).lstrip() + "\n"]
    shown = printable("".join(wanted))
    assert (ended.returncode, ended.stdout) == (0, shown)
    assert ended.stderr.count("\n") == ended.stderr.count("the answer ends here, at --n-tokens")


def test_only_new_tokens_are_fed(chat, model, fed):
    letters = [model.tokenizer.encode(letter)[0] for letter in "aeiou"]
    others = {i: -math.inf for i in range(model.tokenizer.n_vocab) if i not in letters}
    talking = chat(how=Sampling(temperature=0, logit_bias=others))
    first = said(talking, "the path")
    answered = [tokens for tokens in fed if len(tokens) == 1]
    n_before = sum(map(len, fed))
    fed.clear()
    said(talking, "x")
    assert len(answered) == 5  # the last of 6 tokens is not fed: nothing comes after it
    last = model.tokenizer.encode(first)[-1]
    end = model.tokenizer.eos_id
    wanted = [last, end, *model.tokenizer.encode("u:x"), end, *model.tokenizer.encode("a:")]
    assert fed[0] == wanted
    assert talking.n_read == n_before + sum(map(len, fed))


def test_what_was_fed_in_pieces_reads_as_what_was_fed_at_once(chat, model, monkeypatch):
    monkeypatch.setattr("pyggml.cli.commands.chat.conversation._AT_ONCE", 3)
    talking = chat()
    for question in ("the path to", "other things", "and more"):
        before = "".join(
            f"<|endoftext|>u:{r.question}<|endoftext|>a:{r.answer}" for r in talking.rounds
        )
        prompt = f"{before}<|endoftext|>u:{question}<|endoftext|>a:"
        assert said(talking, question) == answer_to(model, prompt).lstrip()


@pytest.mark.parametrize("name", ["mamba-Q4_K_M", "lfm2-Q4_K_M"])
def test_a_model_that_cannot_go_back_reads_again(name):
    """Its state is that of its last token: what is taken back, or changed, is fed anew."""
    model = library.load(Path(__file__).parents[1] / f"golden/models/{name}.gguf", compute="f32")
    source = "{% for m in messages %}{{ m.content }}. {% endfor %}"
    talking = Conversation(model, ChatTemplate(source, "t"), GREEDY, 100, n_tokens=5)
    first = said(talking, "The house")
    again = f"The house. {talking.rounds[0].answer}. And. "
    assert said(talking, "And") == answer_to(model, again, 5).lstrip()
    talking.reset()
    assert said(talking, "The house") == first == answer_to(model, "The house. ", 5).lstrip()


def test_names_of_control_tokens_that_a_user_types_are_text(chat, model, fed):
    said(chat(), "a<|endoftext|>b")
    assert fed[0].count(model.tokenizer.eos_id) == 2, "the template's own"


def test_the_end_of_a_turn_is_a_stop_string_where_no_token_ends_it(chat):
    source = TURNS.replace("{{ m.content }}", "{{ m.content }}<|im_end|>\n")
    assert chat(source=source).how.stop == ("<|im_end|>",)
    assert chat().how.stop == ("<|endoftext|>",), "with which the next turn begins"
    assert chat(source=TURNS.replace("<|endoftext|>", "")).how.stop == ()


def test_each_answer_is_drawn_anew_and_a_seed_repeats_them_all(chat):
    def answers(seed):
        talking = chat(how=Sampling(temperature=5.0, top_k=0, min_p=0, seed=seed), n_tokens=20)
        found = [said(talking, "the"), talking.undo() and said(talking, "the")]
        return found

    assert answers(1) == answers(1)
    assert answers(1)[0] != answers(1)[1]
    assert answers(1) != answers(2)


# -- the context --------------------------------------------------------------------------------


def test_the_oldest_rounds_are_forgotten_when_the_context_is_full(chat, model, fed):
    talking, end = chat(n_ctx=100, system="sys"), model.tokenizer.eos_id
    for i in range(9):
        dropped, fed_before = talking.n_dropped, len(fed)
        said(talking, f"question {i}")
        prompt = talking._session.tokens
        if talking.n_dropped > dropped:
            assert len(fed[fed_before]) <= 50, "half of the context"
        assert len(prompt) <= 100
        assert model.tokenizer.decode(prompt).startswith("s:sysu:")
        assert prompt.count(end) == 2 + 2 * (len(talking.rounds) - talking.n_dropped) - 1
    assert len(talking.rounds) == 9 and 0 < talking.n_dropped < 9
    first = talking.rounds[talking.n_dropped].question
    assert model.tokenizer.decode(prompt).startswith(f"s:sysu:{first}a:")


def test_the_pipe_says_that_rounds_are_forgotten(talk):
    ended = talk("question\n" * 6, "--ctx", 60)
    assert "(the context is full: the model forgets the first" in ended.err and ended.code == 0


def test_a_message_that_never_fits_is_refused_and_the_chat_goes_on(chat, talk):
    talking = chat(n_ctx=30)
    said(talking, "a")
    with pytest.raises(DataError, match="prompt of 1.. tokens, wanted fewer than the 30"):
        said(talking, "b" * 99)
    assert len(talking.rounds) == 1 and talking.n_dropped == 0
    ended = talk("b" * 99 + "\nthe\n", "--ctx", 30)
    assert ended.code == 2 and "wanted fewer than the 30 of the context" in ended.err
    assert ended.out.strip()


def test_an_answer_ends_where_the_context_does(talk):
    ended = talk("the path\n", "--ctx", 24, "-n", 100)
    assert ended.code == 0 and ended.err == "(the answer ends here, the context is full)\n"


# -- commands -----------------------------------------------------------------------------------


def test_undo_retry_reset_and_system(chat, talk):
    talking = chat()
    first = said(talking, "the path")
    said(talking, "other")
    assert talking.undo().question == "other" and len(talking.rounds) == 1
    talking.reset()
    assert said(talking, "the path") == first
    talking.set_system("be brief")
    assert said(talking, "the path") != first
    assert talking.undo() and talking.undo() and talking.undo() is None
    ended = talk("the\n/retry\n/undo\n/undo\n/system be \n/system -\n/reset\n/help\n", "-n", 3)
    assert ended.out.count("\n") >= 2 and ended.code == 2
    for part in ("(taken back: the)", "nothing was said yet", "(system: be)", "(system: none)"):
        assert part in ended.err
    assert all(f"\n{name} " in ended.err for name in ("/undo", "/save"))


def test_a_retry_that_is_refused_leaves_the_answer(chat, capsys, monkeypatch):
    talking = chat(n_ctx=60)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"the\n/system {'x' * 70}\n/retry\n"))
    assert Console(talking, interactive=False).run() == 2
    assert "wanted fewer than the 60 of the context" in capsys.readouterr().err
    assert [r.question for r in talking.rounds] == ["the"]


def test_the_cache_has_the_type_that_was_asked_for(talk):
    """This model's heads are too short for blocks of Q8_0, so the word is heard."""
    ended = talk("the\n", "--cache-type", "q8_0")
    assert ended.code == 2 and "--cache-type is q8_0, which needs heads of a multiple" in ended.err
    ended = talk("the\n", "--cache-type-v", "q4_0")
    assert ended.code == 2 and "--cache-type-v is q4_0, which needs heads of a mult" in ended.err


def test_an_unknown_command_is_no_message(talk, model):
    ended = talk("/rest\n /rest\n")
    assert ended.code == 2 and "/rest is no command, known are /help" in ended.err
    wanted = answer_to(model, "<|endoftext|>u:/rest<|endoftext|>a:")
    assert len(ended.out) == len(printable(wanted.lstrip())) + 1


def test_a_saved_conversation_is_a_row_for_finetune(talk, tmp_path, finetune, talker):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": []}')  # without an end of line
    ended = talk(f"the\nü\n/save {path}\n/reset\nx\n/save {path}\n/save\n", "--system", r"a\nb")
    assert "(2 rounds saved as line 2 of" in ended.err and "(1 round saved as line 3" in ended.err
    assert "/save wants the name of a file" in ended.err
    _, first, second = map(json.loads, path.read_text("utf-8").splitlines())
    assert [m["role"] for m in first["messages"]] == ["system", *("user", "assistant") * 2]
    assert first["messages"][0]["content"] == "a\nb" and first["messages"][3]["content"] == "ü"
    path.write_text("".join(path.read_text("utf-8").splitlines(keepends=True)[1:]), "utf-8")
    assert len(list(read_rows(path))) == 2 and len(second["messages"]) == 3
    assert finetune("--ctx", 512, "--chat-template", "alpaca", model=talker, data=path).code == 0


def test_saving_says_what_is_wrong(chat, tmp_path):
    talking = chat()
    with pytest.raises(DataError, match="nothing to save"):
        talking.save(tmp_path / "a")
    said(talking, "the")
    with pytest.raises(DataError, match="cannot be read: it is a folder"):
        talking.save(tmp_path)


# -- Ctrl-C -------------------------------------------------------------------------------------


def interrupted_at(monkeypatch, n):
    """SIGINT when the nth token is sampled."""
    whole, count = Completion.take, []

    def take(self, logits):
        count.append(1)
        if len(count) == n:
            signal.raise_signal(signal.SIGINT)
        return whole(self, logits)

    monkeypatch.setattr(Completion, "take", take)


def test_ctrl_c_ends_the_answer_not_the_chat(chat, monkeypatch, capsys, ctrl_c):
    typed = iter(["the path", KeyboardInterrupt, "other", EOFError])
    monkeypatch.setattr("builtins.input", lambda prompt: enter(next(typed)))
    interrupted_at(monkeypatch, 3)
    talking = chat()
    assert Console(talking, interactive=True).run() == 0
    assert [r.question for r in talking.rounds] == ["the path", "other"]
    ended = capsys.readouterr()
    assert "(stopped; 3 tokens, " in ended.err and "\n(6 tokens, " in ended.err
    assert "(Ctrl-D ends the chat)" in ended.out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def enter(typed):
    if isinstance(typed, str):
        return typed
    raise typed


def test_a_stop_while_the_prompt_is_read_leaves_no_round(chat, monkeypatch):
    monkeypatch.setattr("pyggml.cli.commands.chat.conversation._AT_ONCE", 2)
    talking, asked = chat(), []

    def stopped():
        asked.append(1)
        return len(asked) > 2

    assert said(talking, "the path", is_stopped=stopped) == "" and talking.rounds == []
    assert talking.n_read == 4
    assert said(talking, "the path") == said(chat(), "the path")


@pytest.mark.parametrize("word", ["/bye", "/exit"])
def test_a_word_ends_the_chat(talk, word):
    ended = talk(f"{word}\nthe path\n")
    assert (ended.code, ended.out) == (0, "")


def test_ctrl_c_ends_a_pipe(talk, monkeypatch, ctrl_c):
    interrupted_at(monkeypatch, 3)
    assert talk("the path\nother\n").code == 130


# -- templates ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('never') }}", "the chat template says: never"),
        ("{% for i in range(10**9) %}x{% endfor %}", "the chat template was stopped"),
        ("{{ ''.__class__.__mro__ }}", "chat template"),
        ("{% if %}", "line 1 of the chat template"),
        ("hello", "leaves out message 1"),
    ],
)
def test_a_hostile_template_is_one_sentence(talk, model_with, template, message):
    ended = talk("the\n", model=model_with(tokenizer__chat_template=template))
    assert ended.code == 2 and message in ended.err and ended.err.count("\n") == 1
    assert ended.out == ""


def test_a_template_that_refuses_a_later_message_leaves_the_chat_as_it_was(chat):
    refusing = "{% if messages|length > 2 %}{{ raise_exception('too many') }}{% endif %}" + TURNS
    talking = chat(source=refusing)
    said(talking, "the")
    with pytest.raises(TemplateError, match="too many"):
        said(talking, "other")
    assert len(talking.rounds) == 1
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}"
    with pytest.raises(TemplateError, match="none"):
        chat(source=no_system + TURNS, system="be")


def test_a_model_without_a_template_wants_a_name(talk, tiny):
    ended = talk("the\n", model=tiny)
    assert (
        ended.code == 2 and "the model's file has no chat template: name one, chatml" in ended.err
    )
    assert talk("the\n", "--chat-template", "alpaca", "--ctx", 64, "-n", 2, model=tiny).code == 2


def test_what_reaches_the_terminal_commands_nothing(talk, monkeypatch):
    ended = talk("/\x1b[31m\n")
    assert "\x1b" not in ended.err


def test_the_prompt_is_that_of_the_encoder(model, chat, fed):
    said(chat(system="s"), "the path")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "the path"}]
    encoder = ChatEncoder(ChatTemplate(TURNS, "t"), model.tokenizer)
    assert fed[0] == encoder.prompt(messages)
