"""The template that was trained with: adapters carry it, commands use it and say so, and what a run
prints reads what it measured."""

import io
import json
import math
import shlex
from itertools import pairwise

import pytest

import pyggml as library
from pyggml import gguf
from pyggml.chat import ChatEncoder, carried_metadata, carries_template, find_template
from pyggml.cli.commands.serve import startup
from pyggml.cli.commands.serve.params import read_chat
from pyggml.cli.terminal.hints import program
from pyggml.cli.terminal.show import printable
from pyggml.generation import Session
from pyggml.lora import DataConfig, LoraConfig, TrainConfig, Trainer, attach, read_corpus, unfreeze

from chats import assistant, user

OWN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|endoftext|>\n' }}"
    "{% endfor %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role[0] + mark|default('=') + m.content + '<|endoftext|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'a' + mark|default('=') }}{% endif %}"
)
TOOLS = OWN + "{% if tools %}{{ tools|tojson }}{% endif %}"
CHATS = [[user(f"What {i}?"), assistant(f"It {i}.")] for i in range(4)]
NOTE = "note: chats are written as adapter.gguf was trained; --chat-template model takes"


@pytest.fixture(scope="module")
def model(model_with):
    return model_with(tokenizer__chat_template=OWN, llama__context_length=512)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    path.write_text(json.dumps({"text": "the path to the other thing\n" * 18}) + "\n")
    return path


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    path = tmp_path_factory.mktemp("templates") / "marked.jinja"
    path.write_text(MARKED)
    return path


@pytest.fixture(scope="module")
def runs():
    """What `trained` was asked for -> what it gave."""
    return {}


@pytest.fixture
def trained(finetune, model, data, tmp_path_factory, runs):
    """Trains an adapter of this name with these options, once; its path, and how the run ended."""

    def train(*options, name="adapter", data=data, model=model):
        asked_for = (options, name, data, model)
        if asked_for not in runs:
            output = tmp_path_factory.mktemp("run") / f"{name}.gguf"
            how = ("--ctx", 400, "--max-steps", 1, "--lr", 0.01, "--compute", "f32")
            rank = None if {"--init", "--train-tensors"} & {*options} else 2
            ended = finetune(*how, *options, model=model, data=data, output=output, rank=rank)
            assert ended.code == 0, ended.err
            runs[asked_for] = output, ended
        return runs[asked_for]

    return train


@pytest.fixture
def talk(pyggml, monkeypatch):
    """Runs a printed `pyggml chat` with "Hi" in a pipe; what was fed first, and how it ended."""

    def call(words):
        fed, feed = [], Session.feed
        with monkeypatch.context() as patch:
            patch.setattr(Session, "feed", lambda s, ids: (fed.append([*ids]), feed(s, ids))[1])
            patch.setattr("sys.stdin", io.StringIO("Hi\n"))
            ended = pyggml(*words, "-n", 1, "--temp", 0, "--compute", "f32")
        assert ended.code == 0, ended.err
        return fed[0], ended

    return call


@pytest.fixture
def service(pyggml, monkeypatch):
    """The service that a printed `pyggml serve` would run, and what it printed."""

    def call(words):
        made = []
        with monkeypatch.context() as patch:
            patch.setattr(startup, "serve", lambda *args: None)
            patch.setattr(startup, "make_app", lambda service, *args: made.append(service))
            ended = pyggml(*words, "--port", 0)
        assert ended.code == startup.STOPPED, ended.err
        return made[0], ended

    return call


def ids_of(service, name, **more):
    body = {"messages": [user("Hi")], "model": name, **more}
    params = read_chat(body, service.sampling, service.limits)
    return service.chat_prompts(service.voices[name], params)[0].tolist()


def asked(model, template, names=""):
    tokenizer = library.load(model).tokenizer
    return ChatEncoder(find_template(tokenizer, str(template), names=names), tokenizer).prompt(
        [user("Hi")]
    )


def test_every_command_uses_what_an_adapter_was_trained_with(
    trained, model, marked, data, talk, service, pyggml, tmp_path
):
    inputs = '{"mark": "~"}'
    adapter, ended = trained("--chat-template", marked, "--chat-template-kwargs", inputs)
    assert "the model's file has another template: the output carries this one" in ended.out
    assert 'with {"mark": "~"}' in ended.out
    here = ("-m", str(model), "--lora", str(adapter))
    wanted, own = asked(model, marked, inputs), asked(model, "model")
    fed, said = talk(["chat", *here])
    assert fed == wanted and NOTE in said.err
    fed, said = talk(["chat", *here, "--chat-template", "model"])
    assert fed == own and "adapter.gguf was trained with another chat template" in said.err
    fed, _ = talk(["chat", *here, "--chat-template-kwargs", '{"mark": "^"}'])
    assert fed == asked(model, marked, '{"mark": "^"}')
    served, said = service(["serve", *here])
    assert ids_of(served, "adapter") == wanted and ids_of(served, "tiny") == own
    assert ids_of(served, "adapter", chat_template_kwargs={"mark": "^"}) != wanted
    assert "chats are written as adapter.gguf was trained" in said.out
    how = ("-f", data, "--json", "--compute", "f32")
    carried, told, plain = (
        pyggml("eval", *here, *how, *more)
        for more in (
            (),
            ("--chat-template", marked, "--chat-template-kwargs", inputs),
            ("--chat-template", "model"),
        )
    )
    assert NOTE in carried.err and carried.out == told.out != plain.out
    modelfile = tmp_path / "Modelfile"
    exported = pyggml("export-ollama", *here, "-o", modelfile)
    assert NOTE in exported.err and "u~" in modelfile.read_text()
    assert "Final" in pyggml("perplexity", *here, "-f", data, "--ctx", 64).out


def test_an_adapter_that_writes_as_its_model_does_is_not_talked_of(trained, model, talk):
    adapter, ended = trained()
    assert "carries" not in ended.out
    fed, said = talk(["chat", "-m", str(model), "--lora", str(adapter)])
    assert fed == asked(model, "model") and "note: chats" not in said.err


def test_a_difference_in_tools_alone_is_told(trained, model, tmp_path):
    path = tmp_path / "tools.jinja"
    path.write_text(TOOLS)
    _, ended = trained("--chat-template", path)
    assert "the model's file has another template" in ended.out


def test_a_merged_model_has_the_template_of_its_adapter(trained, model, marked, pyggml, tmp_path):
    how = ("--chat-template", marked, "--chat-template-kwargs", '{"mark": "~"}')
    adapter, _ = trained(*how)
    merged = tmp_path / "merged.gguf"
    ended = pyggml("merge", "-m", model, "--lora", adapter, "-o", merged)
    assert "chats are written as adapter.gguf was trained" in ended.out
    assert asked(merged, "model") == asked(model, marked, '{"mark": "~"}')


def test_a_run_goes_on_with_the_template_of_the_adapter_it_starts_from(
    trained, model, marked, text, tmp_path
):
    first, _ = trained("--chat-template", marked)
    for option in ("--init", "--lora"):
        second, ended = trained(option, first, name="second", model=model)
        assert f"the chat template of {first.name}" in ended.row("chats")
        assert asked(model, second) == asked(model, marked)
    other, ended = trained("--init", first, "--chat-template", "model", name="other")
    assert "adapter.gguf was trained with another chat template" in ended.out
    assert asked(model, other) == asked(model, "model")
    plain, _ = trained("--init", first, name="plain", data=text)
    assert asked(model, plain) == asked(model, marked), "text says nothing of chats"


def test_a_resumed_run_writes_its_template(trained, model, marked, tmp_path):
    how = ("--chat-template", marked, "--checkpoint-dir", tmp_path / "kept", "--max-steps", 2)
    trained(*how)
    again, _ = trained(*how, "--resume", tmp_path / "kept", name="again")
    assert asked(model, again) == asked(model, marked)


def test_adapters_with_several_templates(trained, model, marked, data, talk, pyggml):
    first, _ = trained("--chat-template", marked, name="first")
    second, _ = trained("--chat-template", "alpaca", name="second")
    fed, said = talk(["chat", "-m", str(model), "--lora", str(first), "--lora", str(second)])
    assert fed == asked(model, "alpaca")
    assert f"first.gguf was trained with another chat template: --chat-template {first}" in said.err
    ended = pyggml("eval", "-m", model, "-f", data, "--compare", first, second)
    assert ended.code == 2 and "were trained with different chat templates" in ended.err
    how = ("-f", data, "--chat-template", first)
    assert pyggml("eval", "-m", model, *how, "--compare", first, second).code == 0


def test_models_with_templates_of_their_own_are_not_compared(
    trained, model, model_with, marked, data, pyggml
):
    other = model_with(tokenizer__chat_template=MARKED, llama__context_length=512)
    ended = pyggml("eval", "-m", model, "-f", data, "--compare", other)
    assert "other tokens: not comparable" in ended.out


def test_a_file_without_a_template_is_no_template(trained, model, text, pyggml):
    plain, _ = trained(data=text)
    ended = pyggml("chat", "-m", model, "--chat-template", plain)
    assert ended.code == 2 and "adapter.gguf has no chat template: name one" in ended.err


def test_an_adapter_saved_in_python_carries_what_the_command_s_does(
    trained, model, data, tmp_path, rows
):
    kwargs = '{"mark": "+"}'
    told = tmp_path / "told.jinja"
    told.write_text(MARKED)
    by_command, _ = trained("--chat-template", told, "--chat-template-kwargs", kwargs)
    for file, config in (
        (data, DataConfig(ctx=400, chat_template=str(told), chat_template_kwargs=kwargs)),
        (rows, DataConfig(ctx=100)),
    ):
        base = library.load(model)
        adapter = attach(base, LoraConfig(rank=2))
        corpus = read_corpus(file, base.tokenizer, config)
        Trainer(adapter.model, adapter.parameters, corpus, TrainConfig(max_steps=1)).run(
            progress=False
        )
        adapter.save(tmp_path / "python.gguf")
        if file == data:
            assert carried_metadata(tmp_path / "python.gguf") == carried_metadata(by_command)
            assert carried_metadata(by_command)["pyggml.chat.inputs"] == kwargs
        else:
            assert not carried_metadata(tmp_path / "python.gguf")


@pytest.mark.parametrize("file", ["text", "chats"])
def test_an_adapter_that_learns_on_in_python_keeps_its_template_or_takes_the_new_chats(
    trained, model, data, rows, tmp_path, file
):
    start, _ = trained("--chat-template", "alpaca")
    adapter = unfreeze(library.load(model, adapter=(start, 0.5)))
    read = rows if file == "text" else data
    corpus = read_corpus(read, adapter.model.tokenizer, DataConfig(ctx=400))
    args = (adapter.model, adapter.parameters, corpus, TrainConfig(max_steps=1))
    Trainer(*args).run(progress=False)
    adapter.save(tmp_path / "on.gguf")
    kept = carried_metadata(tmp_path / "on.gguf") == carried_metadata(start)
    assert kept == (file == "text") and carries_template(tmp_path / "on.gguf")


def test_text_after_chats_is_said_to_be_text(trained, rows):
    start, _ = trained()
    again, ended = trained("--init", start, data=rows, name="again")
    assert f"chats      none, though {start.name} was trained on chats: these rows are" in ended.out
    assert carried_metadata(again) == carried_metadata(start)
    _, ended = trained("--init", start, name="third")
    assert "chats      none" not in ended.out


def test_the_bare_text_of_a_template_can_be_kept_as_a_file(trained, pyggml, tmp_path, marked):
    adapter, ended = trained("--chat-template", marked)
    assert pyggml("inspect", adapter, "--template", "--raw").out == MARKED
    assert f"--chat-template-file {marked}" in ended.out
    again, ended = trained("--chat-template", adapter, name="again")
    assert f"pyggml inspect {again} --template --raw > TEMPLATE.jinja" in ended.out
    ended = pyggml("inspect", adapter, "--raw")
    assert ended.code == 2 and "--raw wants --template" in ended.err


def test_the_bare_text_is_kept_as_it_stands_and_shown_as_it_may_be(pyggml, tmp_path, monkeypatch):
    """Line ends of Windows, and what would command a terminal."""
    path, text = tmp_path / "a.gguf", "{# \x1b[31m\u202e #}\r\n{{ messages }}"
    line = ("inspect", path, "--template", "--raw")
    for metadata, fault in ((None, "No such file"), ({}, "has no chat template")):
        if metadata is not None:
            gguf.write(path, metadata, [])
        ended = pyggml(*line)
        assert ended.code == 2 and fault in ended.err
    gguf.write(path, {"general.type": "adapter", "tokenizer.chat_template": text}, [])
    assert pyggml(*line).out == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert pyggml(*line).out == printable(text)


def test_llama_cli_is_told_of_no_template_that_is_the_model_s_own(trained, tmp_path):
    """By its name, in a file of its own, or written otherwise to the same effect."""
    same = tmp_path / "same.jinja"
    same.write_text("{# the model's own #}" + OWN)
    for told in ((), ("--chat-template", "model"), ("--chat-template", same)):
        _, ended = trained(*told)
        assert "llama-cli" in ended.out and "--chat-template-file" not in ended.out
        assert "TEMPLATE.jinja" not in ended.out


# -- what a run prints --------------------------------------------------------------------------

TEMPLATES = (None, "model", "alpaca", "marked")  # None: the run is on text
OUTPUTS = {
    "adapter": (),
    "dora": ("--dora",),
    "tensors": ("--train-tensors", "output_norm.weight,blk.*.attn_norm.weight"),
}
RUNS = [
    (output, below, init, template)
    for output in OUTPUTS
    for below in (False, True)
    for init in (False, True)
    for template in TEMPLATES
    if not (output == "dora" and (below or init)) and not (output == "tensors" and init)
]
# The run with most parts by each template, and one of each other output; the rest takes minutes.
BRIEF = [("adapter", True, True, template) for template in TEMPLATES]
BRIEF += [("dora", False, False, "alpaca"), ("tensors", True, False, None)]


# A model that was trained below an adapter is another one than that adapter's own.
@pytest.mark.filterwarnings("ignore:.*was trained on another model:RuntimeWarning")
@pytest.mark.parametrize(
    "output, below, init, template",
    [pytest.param(*run, marks=[pytest.mark.slow] * (run not in BRIEF)) for run in RUNS],
)
def test_the_printed_commands_read_what_was_measured(
    output, below, init, template, trained, model, data, rows, marked, talk, service, pyggml
):
    """The perplexity of exactly the printed command is that of the run's last validation, and the
    ids of its prompt are those of the chats that were learned."""
    template = str(marked) if template == "marked" else template
    files = {"data": data if template else rows, "model": model}
    told = ("--chat-template", template) if template else ()
    options = [*OUTPUTS[output], "--val-file", files["data"]]
    if below:
        lower, _ = trained("--chat-template", marked, name="lower")
        options += ["--lora", f"{lower}:0.5"]
    if init:
        start, _ = trained("--chat-template", "alpaca", name="start")
        options += ["--init", start]
    written, ended = trained(*options, *told, **files)
    printed = [
        shlex.split(line.removeprefix("use it").strip())
        for line in ended.out.splitlines()
        if line.startswith("use it")
    ]
    n = len(program("chat")) - 1
    used = [words[n:] for words in printed if words[:n] == program("chat")[:n]]
    metrics = written.with_suffix(".metrics.jsonl").read_text()
    lines = [json.loads(line) for line in metrics.splitlines()]
    measured = [line["loss"] for line in lines if line["event"] == "validation"][-1]
    words = used[0][1 : used[0].index("-p") if "-p" in used[0] else None]
    how = ("-f", files["data"], "--ctx", 400, "--json", "--compute", "f32")
    result = json.loads(pyggml("eval", *words, *how).out)
    perplexity = result["files"][0]["models"][0]["perplexity"]["value"]
    assert math.isclose(math.log(perplexity), measured, rel_tol=1e-4)
    if template:
        wanted = asked(model, template)
        assert [words[0] for words in used] == ["chat", "serve"]
        assert talk(used[0])[0] == wanted
        served, _ = service(used[1])
        name = [*served.voices][-1]
        assert ids_of(served, name) == wanted
        n_below = len(served.voices[name].model.adapters)
        assert n_below == below + (output == "adapter")
    else:
        assert [words[0] for words in used] == ["generate"]
        (line,) = [words for words in printed if words[0] == "llama-cli"]
        scaled = [w for a, w in pairwise(words) if a == "--lora"]
        theirs = [w for a, w in pairwise(line) if a.startswith("--lora")]
        assert theirs == scaled and line[1:3] == words[:2]
