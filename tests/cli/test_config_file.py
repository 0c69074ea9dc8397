"""Settings as a file: what it gives, all that is wrong with it at once, and runs from it."""

from pathlib import Path

import click
import pytest

from pyggml.cli import __main__ as cli
from pyggml.cli.commands.finetune import config_file
from pyggml.errors import ConfigError
from pyggml.lora import TrainConfig

OPTIONS = [o for o in cli.command("finetune").params if o.expose_value]


@pytest.fixture
def given(tmp_path):
    """Reads a text as a file of settings."""

    def read(text):
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return config_file.read(path, OPTIONS)

    return read


@pytest.fixture
def configured(pyggml, tiny, text, tmp_path):
    """Runs `pyggml finetune --config` of a short run with these lines more."""

    def call(lines, *arguments):
        path = tmp_path / "run.yaml"
        whole = f"model: {tiny}\nfile: {text}\noutput: {tmp_path / 'adapter.gguf'}\nctx: 16\n"
        path.write_text(whole + lines)
        return pyggml("finetune", "--config", path, *arguments)

    return call


# -- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, parameter, value",
    [
        ("lr: 2e-4", "lr", 2e-4),  # text in YAML 1.1
        ("lr: 1", "lr", 1),
        ("lr: .5", "lr", 0.5),
        ("max_steps: 010", "max_steps", 10),  # eight in YAML 1.1
        ("lora-rank: 4", "lora_rank", 4),  # as the option is written
        ("lora_r: 4", "lora_rank", 4),  # as TRL has it
        ("use_dora: true", "dora", True),
        ("beta: 0.2", "preference_beta", 0.2),
        ("lora_modules: [attn_q, ffn_up]", "lora_modules", ("attn_q", "ffn_up")),
        ("lora_modules: attn_q,ffn_up", "lora_modules", ("attn_q", "ffn_up")),
        ("columns: {prompt: q, completion: a}", "columns", ("prompt=q", "completion=a")),
        ("gpu_layers: 3", "gpu_layers", 3),
        ("split: [3, 1]", "split", (3.0, 1.0)),
        ("lora: [a.gguf:0.5, b.gguf]", "below", ((Path("a.gguf"), 0.5), (Path("b.gguf"), 1.0))),
        ("file: a.txt:2", "data", ("a.txt:2",)),
        ("grad_checkpointing: true", "grad_checkpointing", True),
        ("grad_checkpointing: false", "grad_checkpointing", False),
        ("prompt: 'yes'", "prompt", "yes"),
        ("prompt: yes", "prompt", "yes"),  # true in YAML 1.1
        ('prompt: "7"', "prompt", "7"),
    ],
)
def test_a_word_is_what_it_looks_like(given, line, parameter, value):
    found = given(line)
    assert found.values == {parameter: value} and found.faults == ()
    assert type(found.values[parameter]) is type(value)


def test_home_is_what_it_is_in_a_shell(given, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    settings = given("model: ~/m.gguf\nfile: [~/a.txt, b~]\noutput: '~/o.gguf'\nprompt: ~/is text")
    assert settings.values == {
        "model": tmp_path / "m.gguf",
        "data": (str(tmp_path / "a.txt"), "b~"),
        "output": tmp_path / "o.gguf",
        "prompt": "~/is text",
    }


@pytest.mark.parametrize("text", ["", "# nothing\n", "lr:\n", "lr: ~\n", "lr: null"])
def test_nothing_is_given_by_nothing(given, text):
    assert given(text).values == {}


HOSTILE = {
    "too deep": (b"[" * 90, "line 1: lies more than 5 levels deep"),
    "an object": ("lr: !!python/object/apply:os.system [ls]", "line 1: has a tag"),
    "copies": ("a: &a [1, 1]\nb: [*a, *a]", "line 1: has an anchor or alias"),
    "too large": (b"# " + b"a" * (1 << 18), "has more than 256 KiB"),
    "no UTF-8": (b"lr: 1\nprompt: \xff", "line 2: is not UTF-8"),
    "no lines of settings": ("- lr: 1", "wanted lines of `name: value`, such as"),
    "no YAML": ("lr: 1\nctx: [", "line 2: is no YAML: expected"),
    "two documents": ("lr: 1\n---\nlr: 2", "line 2: is no YAML: but found another document"),
    "control characters": ("lr: \x07", "is no YAML: "),
}


@pytest.mark.parametrize("text, reason", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_one_sentence(given, text, reason):
    with pytest.raises(ConfigError) as caught:
        given(text)
    assert f"run.yaml: {reason}" in str(caught.value)


def test_all_faults_come_at_once_with_their_lines(configured, tmp_path):
    lines = ["lorra_rank: 4", "output_dir: 1", "lr: fast", "lora_rank: 0", "lr_min: 2",
             "grad_checkpointing: yes", "output: 3", "prompt: 7", "lr: 1e-4", "banana: 1",
             "lora_modules: [attn_q, attn_q]", "seed: -1", "load_in_4bit: true"]  # fmt: skip
    ended = configured("\n".join(lines))
    assert ended.code == 2 and ended.out == "" and ended.err.count("\n") == 1
    path = tmp_path / "run.yaml"
    for said in (
        "line 5: lorra_rank is no setting: did you mean 'lora_rank'?",
        "line 6: output_dir is no setting: did you mean 'output'?",
        "line 8: lora_rank is 0, wanted 1 to 4096",
        "line 9: lr_min is 2, wanted at most the highest rate",
        "line 10: grad_checkpointing is 'yes', wanted true or false",
        "line 11: output stands on line 3 already",
        "line 11: output is 3, wanted a path",
        "line 12: prompt is 7, wanted a word; put it in quotes",
        "line 13: lr stands on line 7 already",
        "line 14: banana is no setting;",
        "line 15: lora_modules is ('attn_q', 'attn_q'), wanted names",
        "line 16: seed is -1, wanted 0 to 2^64 - 1",
        "line 17: load_in_4bit is no setting, nor need be: the base has the types of its file",
    ):
        assert f"{path}: {said}" in ended.err


def test_a_wrong_type_is_told_by_its_line(configured):
    lines = ["lr: fast", "batch: 2.5", "compute: 32", "val_file: {a: b}", "columns: 5",
             "log_to: [1]", "gpu_layers: {a: 1}", "split: {a: 1}", "preview: true"]  # fmt: skip
    ended = configured("\n".join(lines))
    assert "line 5: lr is 'fast', wanted above 0" in ended.err
    assert "line 6: batch is 2.5, wanted a whole number" in ended.err
    assert "line 7: compute is 32, wanted a word" in ended.err
    assert "line 8: val_file is {'a': 'b'}, wanted" in ended.err
    assert "line 9: columns is 5, wanted words, such as [a, b]" in ended.err
    assert "line 10: log_to is [1], wanted words" in ended.err
    assert "line 11: gpu_layers is {'a': 1}, wanted a number of blocks" in ended.err
    assert "line 12: split is {'a': 1}, wanted a share for each device" in ended.err
    assert "line 13: preview is True, wanted a whole number" in ended.err


# -- runs ---------------------------------------------------------------------------------------


def test_the_command_line_goes_over_the_file(configured, tmp_path):
    lines = "max_steps: 2\nlora_rank: 3\nbatch: 0\ngrad_checkpointing: true\n"
    ended = configured(lines, "--batch", 2, "--lora-rank", 2, "--no-grad-checkpointing")
    assert ended.code == 0, ended.err
    assert ended.row("adapter").startswith("rank 2, ")
    assert ended.row("steps").startswith("2, 2 windows each;")
    assert "gradient checkpointing" not in ended.row("memory")


def test_the_settled_settings_repeat_the_run(finetune, pyggml, tmp_path):
    given = ("--lora-modules", "attn_q,ffn_up", "--lr", 1e-3, "--seed", 3, "--batch", 2,
             "--checkpoint-dir", tmp_path / "points", "--grad-checkpointing")  # fmt: skip
    first = finetune(*given, "--prompt", "the:\\n \u00e9 # yes")
    adapter, identity = tmp_path / "adapter.gguf", tmp_path / "adapter.yaml"
    assert first.code == 0 and "points" not in identity.read_text()
    whole = adapter.read_bytes()
    before = identity.read_text()
    adapter.unlink()
    again = pyggml("finetune", "--config", identity)
    assert again.code == 0 and adapter.read_bytes() == whole
    assert again.row("result") == first.row("result") and identity.read_text() == before
    assert first.out.split("-- before")[1] == again.out.split("-- before")[1]


def test_an_adapter_that_was_trained_further_is_repeated_too(
    finetune, pyggml, tiny, text, tmp_path
):
    start, out = tmp_path / "start.gguf", tmp_path / "further.gguf"
    assert finetune("--max-steps", 1, output=start).code == 0
    places = ("-m", tiny, "-f", text, "-o", out, "--init", start, "--prompt", "the ")
    assert pyggml("finetune", *places, "--max-steps", 2, "--ctx", 16).code == 0
    whole = out.read_bytes()
    out.unlink()
    again = pyggml("finetune", "--config", tmp_path / "further.yaml")
    assert again.code == 0 and out.read_bytes() == whole


def test_a_stopped_run_is_resumed_with_its_file(configured, pyggml, signal_after, tmp_path):
    points = tmp_path / "points"
    signal_after(1)
    ended = configured("max_steps: 3\nlora_rank: 2\n", "--checkpoint-dir", points, "--lr", "1e-3")
    words = f"--lr 0.001 --checkpoint-dir {points} --resume {points}"
    assert ended.code == 130
    _, *arguments = ended.row("resume").split()
    assert sorted(arguments) == sorted(f"--config {tmp_path / 'run.yaml'} {words}".split())
    resumed = pyggml("finetune", *arguments)
    assert resumed.code == 0 and "3, 1 of them done" in resumed.row("steps")


def test_a_file_that_someone_else_wrote_is_not_replaced(finetune, tmp_path):
    theirs = tmp_path / "adapter.yaml"
    theirs.write_text("lr: 1e-4  # not too high\n")
    ended = finetune("--config", theirs)
    assert ended.code == 2 and "adapter.yaml: is the config, wanted another name" in ended.err
    assert theirs.read_text() == "lr: 1e-4  # not too high\n"
    assert not (tmp_path / "adapter.gguf").exists()
    assert finetune("--config", theirs, output=tmp_path / "other.gguf").code == 0


def test_a_file_that_does_not_exist_is_one_sentence(finetune, tmp_path):
    ended = finetune("--config", tmp_path / "none.yaml")
    assert ended.code == 2 and "none.yaml: cannot be read: No such file" in ended.err


INTS = [option for option in OPTIONS if option.type is click.INT]


@pytest.mark.parametrize("option", INTS, ids=lambda option: option.name)
def test_a_whole_number_may_be_written_with_a_zero_behind_the_point(tmp_path, option):
    """As transformers, TRL and LLaMA-Factory write num_train_epochs: 3.0; of every such setting."""
    path = tmp_path / "run.yaml"
    for line, wanted in (("3.0", 3), ("3", 3), ("3e0", 3)):
        path.write_text(f"{option.name}: {line}\n")
        found = config_file.read(path, OPTIONS)
        assert found.faults == () and found.values == {option.name: wanted}
        assert type(found.values[option.name]) is int
    for line in ("3.5", "1e-3"):
        path.write_text(f"{option.name}: {line}\n")
        (fault,) = config_file.read(path, OPTIONS).faults
        assert fault.endswith(f"{option.name} is {float(line)!r}, wanted a whole number")


def test_a_setting_of_python_says_that_it_wants_a_whole_number():
    with pytest.raises(ConfigError, match=r"epochs is 2.0, wanted a whole number, 1 or more"):
        TrainConfig(epochs=2.0)
