"""A setting that does nothing is refused by name: all settings × objectives × outputs."""

import dataclasses
from functools import cache

import pytest

from pyggml.cli.commands.finetune.command import command
from pyggml.cli.commands.finetune.job import OBJECTIVE_FLAGS, SETTINGS_FLAGS, job_of
from pyggml.errors import ConfigError, DeviceError
from pyggml.lora import DataConfig, LoraConfig, TrainConfig
from pyggml.lora.objectives import OBJECTIVES
from pyggml.lora.objectives.choice import USERS, ObjectiveConfig
from pyggml.lora.ranks import ALONE, Ranks
from pyggml.lora.ranks.device import device_of_rank

# A value of every setting that is not its default.
OTHERS = {
    DataConfig: {
        "ctx": 64, "val_split": 0.2, "val_file": ("v.jsonl",), "columns": ("text=body",),
        "skip_bad_rows": True, "cache_dir": "kept", "special_tokens": "plain",
        "end_of_text": False, "val_shuffle": False, "chat_template": "alpaca",
        "chat_template_kwargs": '{"a": 1}', "train_on": "all", "long_chats": "truncate",
        "chat_date": "2026-01-02", "packing": False,
    },
    LoraConfig: {
        "rank": 4, "alpha": 2.0, "modules": ("attn_q",), "skip_layers": 1, "rslora": True,
        "rank_pattern": {"*": 2}, "alpha_pattern": {"*": 3.0}, "dropout": 0.5, "init": "pissa",
        "dora": True, "plus_ratio": 4.0,
    },
    TrainConfig: {
        "epochs": 7, "max_steps": 2, "batch": 2, "grad_accum": 2, "seed": 5, "lr": 0.1,
        "lr_scheduler": "linear", "lr_cycles": 3, "lr_decay": 0.5, "lr_min": 1e-5,
        "warmup_steps": 3, "warmup_ratio": 0.25, "optimiser": "lion", "weight_decay": 0.5,
        "clip": 0.1, "drop_last": True, "router_aux_loss_coef": 0.5,
        "beta1": 0.5, "beta2": 0.5, "eps": 1e-4, "neftune_alpha": 5.0,
        "grad_checkpointing": True, "threads": 1, "verify_graphs": True, "compute": "f32",
        "rank_timeout": 9.0, "step_in_backward": True, "weight_copies": 1.0,
        "val_every": 7, "val_windows": 3, "patience": 2, "keep_best": True,
        "checkpoint_dir": "points", "checkpoint_every": 9, "checkpoint_keep": 4,
    },
}  # fmt: skip
TENSORS = {"train_tensors": ("output_norm.weight",)}
OUTPUTS = {"adapter": {}, "tensors": TENSORS, "dora": {"dora": True}}
NAMES = {name: option for flags in SETTINGS_FLAGS.values() for name, option in flags.items()}
# What is no part of a run's identity: the folder of its checkpoints, and of its tokens.
PLACES = {"checkpoint_dir", "checkpoint_every", "cache_dir"}


@cache
def nothing_given():
    return dict.fromkeys(p.name for p in command.params if p.expose_value and p.name != "config")


def job(**given):
    base = {"model": "m.gguf", "data": ("a.jsonl",), "output": "o.gguf"}
    return job_of(nothing_given() | base | given)


def walk():
    """(objective, what makes the output, option, value) of all settings."""
    for objective in OBJECTIVES:
        for output, made in OUTPUTS.items():
            for kind, values in OTHERS.items():
                flags = SETTINGS_FLAGS[kind]
                for name, value in values.items():
                    yield objective, output, made, flags.get(name, name), value
            for name in USERS:
                yield objective, output, made, OBJECTIVE_FLAGS.get(name, name), 0.37


@pytest.mark.quick
def test_every_setting_changes_the_run_or_is_refused_by_name():
    """For every objective and output, as far as settings alone can tell."""
    n_refused = n = 0
    for objective, output, made, option, value in walk():
        base = {"objective": objective} | made
        n += 1
        if option in base and base[option] == value:
            continue
        try:
            changed = job(**base | {option: value}).identity()
        except ConfigError as error:
            n_refused += 1
            names = {option, *(f for f, o in NAMES.items() if o == option)}
            assert any(n in str(error).replace("-", "_") for n in names), (option, str(error))
            continue
        if option not in PLACES:
            assert changed != job(**base).identity(), (objective, output, option)
    assert n == len(OBJECTIVES) * len(OUTPUTS) * (sum(map(len, OTHERS.values())) + len(USERS))
    assert 100 < n_refused < n / 2


def test_the_walk_misses_no_setting():
    for kind, values in OTHERS.items():
        assert set(values) | {"seed"} >= {f.name for f in dataclasses.fields(kind)}, kind
        usual = kind()
        assert all(getattr(usual, name) != value for name, value in values.items())


REFUSED = [
    ({"objective": "dpo", "train_on": "all"}, "train_on is all, but dpo scores the answers alone"),
    ({"objective": "kto", "packing": False}, "packing is False, but kto keeps whole answers"),
    ({"objective": "orpo", "end_of_text": False}, "end_of_text is False, but orpo has no rows"),
    ({"lr_cycles": 3}, "lr_cycles is for cosine_restarts"),
    ({"lr_decay": 0.5}, "lr_decay is for wsd"),
    ({"lr_scheduler": "constant", "lr_min": 1e-6}, "lr_min does nothing, the rate being constant"),
    ({"warmup_ratio": 0.1, "warmup_steps": 3}, "warmup_steps does nothing beside warmup_ratio"),
    ({"optimiser": "lion", "eps": 1e-5}, "eps is for adamw, not for lion"),
    ({"optimiser": "sgd", "beta2": 0.9}, "beta2 does nothing with sgd, which keeps no mean"),
    ({"patience": 2, "val_every": 0}, "patience wants validations on the way"),
    ({"val_file": ("v",), "val_split": 0.3}, "val_split does nothing beside val_file"),
    ({"val_split": 0.0, "val_shuffle": False}, "val_shuffle is False, but no share of the rows"),
    ({"checkpoint_keep": 3}, "--checkpoint-keep wants --checkpoint-dir"),
]


@pytest.mark.quick
@pytest.mark.parametrize("given, said", REFUSED)
def test_settings_that_others_make_useless_are_refused(given, said):
    with pytest.raises(ConfigError) as error:
        job(**given)
    assert said in str(error.value).replace("--", "", 1) or said in str(error.value)


OF_ROWS = [
    ("a.txt", "the path " * 200, ["--no-packing"], "--no-packing"),
    ("a.txt", "the path " * 200, ["--train-on", "all"], "train-on is all, but no row is a chat"),
    ("a.txt", "the path " * 200, ["--columns", "text=a"], "columns"),
    ("a.txt", "the path " * 200, ["--long-chats", "cut"], "long-chats is cut, but what is longer"),
    ("a.jsonl", '{"text": "the path"}\n' * 20, ["--chat-template", "alpaca"], "no row is a chat"),
    ("a.jsonl", '{"prompt": "the", "completion": "path"}\n' * 20, ["--no-end-of-text"], "end-of-t"),
]


@pytest.mark.parametrize("name, text, given, said", OF_ROWS)
def test_settings_that_the_rows_make_useless_are_refused(
    finetune, tmp_path, name, text, given, said
):
    (tmp_path / name).write_text(text)
    ended = finetune(*given, "--val-split", 0, data=tmp_path / name)
    assert ended.code == 2 and said.removeprefix("--no-") in ended.err.replace("_", "-"), ended.err


def test_validations_that_never_come_are_refused(finetune, tmp_path):
    data = tmp_path / "a.txt"
    data.write_text("the path " * 100)
    for given in (["--patience", 2], ["--keep-best"], ["--val-every", 7], ["--val-windows", 3]):
        ended = finetune("--val-split", 0, *given, data=data)
        assert ended.code == 2 and f"{given[0]} wants text that is held out" in ended.err


class Second(Ranks):
    """The second of three ranks of one host."""

    rank, size, on_host = 1, 3, 1


@pytest.mark.quick
def test_a_rank_takes_the_card_of_its_number_on_its_host(monkeypatch):
    @dataclasses.dataclass
    class Card:
        index: int

    monkeypatch.setattr("pyggml.backends.cuda.cards", lambda: [Card(0), Card(2)])
    ranks = Second()
    assert device_of_rank("cuda", ranks) == "cuda:2"
    assert device_of_rank("auto", ranks) == "cuda:2"
    assert device_of_rank("cuda", ALONE) == "cuda"
    assert [device_of_rank(d, ranks) for d in ("cpu", "cuda:1")] == ["cpu", "cuda:1"]
    ranks.on_host = 2
    too_many = "rank 1 is number 3 of its host, which has cuda:0, cuda:2: wanted a card for each"
    for device in ("cuda", "auto"):
        with pytest.raises(DeviceError, match=too_many):
            device_of_rank(device, ranks)
    assert device_of_rank("cuda:0", ranks) == "cuda:0", "asked for"


@pytest.mark.quick
def test_ranks_without_a_card_are_on_the_cpu_if_any_device_will_do(monkeypatch):
    def no_cards():
        raise DeviceError("no CUDA device: unplugged")

    monkeypatch.setattr("pyggml.backends.cuda.cards", no_cards)
    assert device_of_rank("auto", Second()) == "cpu"
    with pytest.raises(DeviceError, match="unplugged"):
        device_of_rank("cuda", Second())


def test_the_log_says_which_rank_is_on_which_card(capsys, monkeypatch):
    """And that mpiexec has bound each to one core."""
    from types import SimpleNamespace

    from pyggml.cli.commands.finetune import summary
    from pyggml.cli.commands.finetune.summary import say_ranks

    ranks = Second()
    ranks.texts = lambda text: ["cuda:0", text, "cuda:0"]
    trainer = SimpleNamespace(ranks=ranks, config=TrainConfig(grad_accum=6))
    for is_given, why in ((True, ""), (False, ", as for --grad-accum 6")):
        say_ranks(trainer, "cuda:2", is_given)
        said = capsys.readouterr().out
        assert f"3 processes share the 6 passes of a step{why}\n" in said
        assert "rank 0 on cuda:0, rank 1 on cuda:2, rank 2 on cuda:0" in said
    ranks.launcher = "mpiexec", "-n", "3"
    monkeypatch.setattr(summary.os, "cpu_count", lambda: 8)
    for n, is_said in ((1, True), (2, False)):
        monkeypatch.setattr(summary, "n_cores", lambda n=n: n)
        say_ranks(trainer, "cuda:2", True)
        said = " ".join(capsys.readouterr().out.split())
        assert ("a rank may use one of 8 cores" in said) == is_said
        assert ("mpiexec --bind-to none leaves it all" in said) == is_said


def test_objectives_have_the_settings_that_are_walked():
    assert {f.name for f in dataclasses.fields(ObjectiveConfig)} == {"objective", *USERS}
