"""A Modelfile as Ollama reads it: its template writes what the model's own does."""

import numpy as np
import ollama
import pytest

import pyggml as library
from pyggml import gguf
from pyggml.chat import BUILT_IN, Turns, find_template
from pyggml.cli.commands.export_ollama.modelfile import go_template, path_for, quote
from pyggml.errors import ConfigError
from pyggml.lora import attach

from chats import assistant, user

SYSTEM = {"role": "system", "content": "Be brief."}
ROUNDS = [user("a"), assistant("b"), user("c\n\nd"), assistant("e"), user("f")]
CHATS = [ROUNDS[:1], ROUNDS[:3], ROUNDS]
CHATS += [[SYSTEM, *chat] for chat in CHATS]


@pytest.fixture
def export(pyggml, tiny, tmp_path):
    """Runs the command; the commands of the Modelfile, and how it ended."""

    def call(*arguments, model=tiny, output=tmp_path / "Modelfile"):
        ended = pyggml("export-ollama", "-m", model, "-o", output, *arguments)
        return (ollama.commands(output.read_text("utf-8")) if ended.code == 0 else []), ended

    return call


def values(found, name):
    return [value for instruction, value in found if instruction == name]


# -- the template -------------------------------------------------------------------------------


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_template_writes_what_ours_does(export, model_with, name, add_bos):
    """But for BOS, which Ollama puts there itself."""
    path = model_with(tokenizer__ggml__add_bos_token=add_bos, tokenizer__ggml__bos_token_id=257)
    found, ended = export("--chat-template", name, model=path)
    (template,) = values(found, "TEMPLATE")
    ours = find_template(library.load(path).tokenizer, name)
    for chat in CHATS:
        text = ours.render(chat, add_generation_prompt=True)
        bos = "<|endoftext|>" if add_bos else ""
        assert ollama.rendered(template, chat) == text.removeprefix(bos)
    assert ended.err == ""


def test_a_system_s_text_of_the_template_s_own_gives_way(export, model_with):
    source = (
        "{% if messages[0].role != 'system' %}<sys>mine{% endif %}"
        "{% for m in messages %}<{{ m.role[:3] }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<ass>{% endif %}"
    )
    found, _ = export(model=model_with(tokenizer__chat_template=source))
    (template,) = values(found, "TEMPLATE")
    assert ollama.rendered(template, [user("a")]) == "<sys>mine<use>a<ass>"
    assert ollama.rendered(template, [SYSTEM, user("a")]) == "<sys>Be brief.<use>a<ass>"


def test_what_looks_like_an_action_is_text():
    turns = Turns("{{a}}", None, ("{{ b", "}}"), ("", "{{{"), "{{ end }}")
    assert ollama.rendered(go_template(turns), ROUNDS[:3]) == (
        "{{a}}a}}" + "b{{{" + "{{ bc\n\nd}}" + "{{ end }}"
    )


@pytest.mark.parametrize(
    "source, reason",
    [
        (None, "the model has none; --chat-template names one"),
        ("{% for m in messages %}{{ m.content|upper }}{% endfor %}", "leaves messages out"),
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}", "more than to"),
        ("{% for m in messages %}\x07{{ m.content }}{% endfor %}", "cannot stand in a Modelfile"),
        ("{{ raise_exception('a\nb') }}", "the chat template says: a b"),
    ],
)
def test_a_template_that_ollama_cannot_have_is_left_out_with_a_word(
    export, model_with, tmp_path, source, reason
):
    found, ended = export(model=model_with(tokenizer__chat_template=source))
    assert ended.code == 0 and not values(found, "TEMPLATE")
    (comment,) = [
        line for line in (tmp_path / "Modelfile").read_text().splitlines() if line[0] == "#"
    ]
    assert reason in comment and reason in ended.err and ended.err.count("\n") == 1


def test_the_date_of_a_template_is_told(export, model_with, tmp_path):
    source = "{{ strftime_now('%Y') }}{% for m in messages %}|{{ m.content }}{% endfor %}"
    export(model=model_with(tokenizer__chat_template=source))
    assert "# The date in this template" in (tmp_path / "Modelfile").read_text()


# -- the rest -----------------------------------------------------------------------------------


def test_settings_system_and_stops(export):
    found, ended = export(
        *("--chat-template", "chatml", "--system", r'Be "brief"\nand true', "--temp", 0.5),
        *("--stop", 'a"b', "--stop", "x", "--seed", 2**63, "--repeat-penalty", 1.1, "--ctx", 32),
    )
    assert ended.code == 0 and "ollama create NAME -f" in ended.out
    assert values(found, "SYSTEM") == ['Be "brief"\nand true']
    assert [v.split(" ")[0] for v in values(found, "PARAMETER")][:5] == [
        *("num_ctx", "temperature", "top_k", "top_p", "min_p")
    ]
    assert {"num_ctx 32", "temperature 0.5", f"seed {2**63}", "repeat_penalty 1.1"} <= set(
        values(found, "PARAMETER")
    )
    stops = [v.removeprefix("stop ") for v in values(found, "PARAMETER") if v.startswith("stop ")]
    assert stops == ['"<|im_end|>"', '"""a"b"""', '"x"']


def test_what_ollama_takes_as_usual_is_not_given(export):
    found, _ = export()
    assert values(found, "PARAMETER") == [
        *("num_ctx 64", "temperature 0.8", "top_k 40", "top_p 0.95", "min_p 0.05")
    ]


def test_a_model_in_several_files_is_refused_with_what_joins_them(export, tiny, tmp_path):
    """Ollama would read the first file alone."""
    paths = [tmp_path / f"m-{i + 1:05}-of-00002.gguf" for i in range(2)]
    with gguf.open(tiny) as file:
        infos = list(file.tensors.values())
        for i, path in enumerate(paths):
            keys = {"split.no": np.uint16(i), "split.count": np.uint16(2)}
            keys |= {"split.tensors.count": np.int32(len(infos))}
            tensors = [(t.name, t.dtype, t.shape, file.data(t.name)) for t in infos[i::2]]
            gguf.write(path, (dict(file.metadata) if i == 0 else {}) | keys, tensors)
    for path in paths:
        _, ended = export(model=path)
        assert ended.code == 2 and not (tmp_path / "Modelfile").exists()
        said = (
            "is one of 2 files of a model, and Ollama takes one: `llama-gguf-split --merge m-00001-"
        )
        assert " ".join(f"{path}: {said}".split()) in " ".join(ended.err.split())


def test_paths_are_relative_below_and_absolute_elsewhere(export, tiny, tmp_path, monkeypatch):
    inside = tmp_path / "some models" / "tiny ü.gguf"
    inside.parent.mkdir()
    inside.write_bytes(tiny.read_bytes())
    adapter = tmp_path / "adapter.gguf"
    attach(library.load(tiny)).save(adapter)
    found, ended = export("--lora", adapter, model=inside)
    assert "0.34.1 and later are reported to refuse ADAPTER; for these, pyggml merge" in ended.err
    assert found[:2] == [("FROM", "./some models/tiny ü.gguf"), ("ADAPTER", "./adapter.gguf")]
    monkeypatch.chdir(tmp_path)
    found, _ = export(
        "--lora", "adapter.gguf", "--force", model="some models/../some models/tiny ü.gguf"
    )
    assert found[:2] == [("FROM", "./some models/tiny ü.gguf"), ("ADAPTER", "./adapter.gguf")]
    found, _ = export("--force", output=tmp_path / "some models" / "Modelfile")
    assert found[0] == ("FROM", str(tiny))
    assert path_for(tmp_path / " x", tmp_path / "M") == "./ x"
    assert path_for(tmp_path / "x ", tmp_path / "M") == '"./x "'


@pytest.mark.parametrize("text", ['a"""b', "a\x07b", "a\rb"])
def test_text_that_no_modelfile_holds_is_refused(export, text):
    with pytest.raises(ConfigError, match="cannot stand in a Modelfile"):
        quote(text)
    _, ended = export("--system", text)
    assert ended.code == 2 and ended.err.count("\n") == 1


def test_several_adapters_or_weights_are_to_be_made_one(export, tiny, tmp_path):
    for adapters in (("--lora", "a:0.5"), ("--lora", "a", "--lora", "b")):
        _, ended = export(*adapters)
        assert ended.code == 2 and "make one of yours with pyggml combine" in ended.err
    assert not (tmp_path / "Modelfile").exists()


def test_a_modelfile_is_not_overwritten_unless_asked(export, tmp_path):
    (tmp_path / "Modelfile").write_text("FROM mine\n")
    _, ended = export()
    assert ended.code == 2 and "--force replaces it" in ended.err
    assert (tmp_path / "Modelfile").read_text() == "FROM mine\n"
    found, _ = export("--force")
    assert found[0][1] != "mine"


def test_bad_values_are_one_sentence(export):
    for arguments in (("--ctx", 65), ("--chat-template", "none such"), ("--temp", -1)):
        _, ended = export(*arguments)
        assert ended.code == 2 and ended.err.count("\n") == 1
