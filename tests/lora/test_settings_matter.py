"""Every setting changes what a run computes, or is refused: short runs on chats, one a setting."""

import dataclasses
import hashlib
import json
from functools import cache

import pytest
from tiny_models import write_llama

import pyggml
from pyggml.errors import ConfigError, DataError
from pyggml.lora import (
    DataConfig,
    LoraConfig,
    TrainConfig,
    Trainer,
    ValidationReport,
    attach,
    read_corpus,
)
from pyggml.lora.data.unused import unused_by_rows
from pyggml.lora.objectives import OBJECTIVES
from pyggml.lora.objectives.choice import USERS, objective_of

from chats import assistant, user, vocabulary

VALUES = {"class_weights": "balanced", "pooling": "mean", "teacher_top_k": 3}  # as they must be
# What each setting is beside its default, so that it has something to do; and with what others.
CHANGED = [
    *(("data", name, value, {}) for name, value in {
        "ctx": 200, "val_split": 0.2, "special_tokens": "parse", "val_shuffle": False,
        "train_on": "all", "packing": False,
    }.items()),
    ("data", "chat_template", "alpaca", {"ctx": 400}),
    ("data", "long_chats", "drop", {"ctx": 80}),
    ("data", "end_of_text", False, {}),
    *(("lora", name, value, {}) for name, value in {
        "rank": 4, "alpha": 2.0, "modules": ("attn_q",), "skip_layers": 1, "rslora": True,
        "rank_pattern": {"attn_q": 2}, "alpha_pattern": {"attn_q": 3.0}, "dropout": 0.5,
        "init": "pissa", "dora": True, "plus_ratio": 4.0, "seed": 3,
    }.items()),
    *(("train", name, value, {}) for name, value in {
        "max_steps": 2, "batch": 2, "grad_accum": 2, "seed": 5, "lr": 0.1,
        "lr_scheduler": "linear", "lr_min": 1e-3, "warmup_steps": 3, "warmup_ratio": 0.5,
        "optimiser": "lion", "weight_decay": 0.5, "clip": 1e-3, "beta1": 0.5, "beta2": 0.5,
        "eps": 1e-2, "neftune_alpha": 5.0, "router_aux_loss_coef": 0.1, "val_every": 1,
        "val_windows": 1,
    }.items()),
    ("train", "epochs", 3, {"max_steps": 0}),
    ("train", "drop_last", True, {"max_steps": 0, "batch": 3}),
    ("train", "patience", 1, {"lr": 5.0, "val_every": 1}),
    ("train", "keep_best", True, {"lr": 5.0}),
    ("train", "lr_cycles", 3, {"lr_scheduler": "cosine_restarts"}),
    ("train", "lr_decay", 0.5, {"lr_scheduler": "wsd"}),
    # Those of prompts are changed in test_rewards.py, test_gkd.py, the teacher in test_distill.py.
    *(("objective", name, VALUES.get(name, 0.25), {"objective": next(iter(of))})
      for name, of in USERS.items()
      if OBJECTIVES[next(iter(of))].rows != "prompts" and name != "teacher"),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    write_llama(path, 270, n_layer=2, seed=1, keys={"llama.context_length": 1024})
    return path


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Rows of two classes, one of them with a name of a token in it; one is longer than others."""
    rows = [[user(f"{c}{i}<|im_end|>"), assistant(c * (3 + i % 4))] for c in "ab" for i in range(7)]
    rows.append([user("long"), assistant("c" * 80)])
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    rows = [{"prompt": f"q{i} ", "chosen": "yes" * (1 + i % 3), "rejected": "no"} for i in range(8)]
    rows += [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 2} for i, r in
             enumerate(rows)]  # fmt: skip
    folder = tmp_path_factory.mktemp("pairs")
    texts = [{"text": f"{'ab'[i % 3 > 0] * 9}{i}", "label": "xy"[i % 3 > 0]} for i in range(12)]
    groups = [{"anchor": f"a{i}", "positive": f"b{i}", "negative": f"c{i}"} for i in range(12)]
    files = {"pairs": rows[:8], "labels": rows[8:], "classes": texts, "groups": groups}
    for name, some in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in some))
    return folder


def computed(model, chats, pairs, data, lora, train, objective):
    """All that a run is: its windows, rates, losses, validations, and what it made."""
    name = objective.pop("objective", "sft")
    own = {"teacher": str(model)} if name in USERS["teacher"] else {}
    chosen = objective_of(name, **own, **objective)
    usual = {"chat_template": "chatml"} if chosen.rows == "training" else {}
    reading = DataConfig(**{"ctx": 120, "val_split": 0.4} | usual | data)
    path = chats if chosen.rows == "training" else pairs / chosen.rows
    corpus = read_corpus(path, vocabulary(), reading, rows=chosen.rows)
    if faults := unused_by_rows(corpus, reading):
        raise ConfigError(faults)
    settings = {"lr": 0.01, "warmup_steps": 1, "val_every": 3, "batch": 1, "max_steps": 4} | train
    config = TrainConfig(**settings)
    base = pyggml.load(model, compute="f32")
    adapter = attach(base, LoraConfig(**lora))
    trainer = Trainer(adapter.model, adapter.parameters, corpus, config, chosen, reference=base)
    events = []
    trainer.run(events.append)
    validations = [(e.step, e.loss, e.n_tokens) for e in events if isinstance(e, ValidationReport)]
    made = hashlib.sha256(adapter.parameters.data.tobytes()).hexdigest()
    return corpus.digest(), list(trainer.history.losses), validations, made


@pytest.fixture(scope="module")
def without(model, chats, pairs):
    """What a run of these settings is, computed once; None where another must make it possible."""

    @cache
    def of(settings):
        try:
            return computed(model, chats, pairs, **json.loads(settings))
        except DataError:
            return None

    return lambda base: of(json.dumps(base))


@pytest.mark.parametrize("kind, name, value, beside", CHANGED, ids=[c[1] for c in CHANGED])
def test_a_setting_matters_or_is_refused(model, chats, pairs, without, kind, name, value, beside):
    base = {part: {} for part in ("data", "lora", "train", "objective")}
    base[kind] |= beside
    changed = {part: dict(given) for part, given in base.items()}
    changed[kind][name] = value
    plain = without(base)
    try:
        assert computed(model, chats, pairs, **changed) != plain
    except ConfigError as error:
        assert name in str(error)


def test_no_setting_is_left_out():
    walked = {(kind, name) for kind, name, *_ in CHANGED}
    # Places, and what no number depends on; tests of their own hold these.
    elsewhere = {"cache_dir", "checkpoint_dir", "checkpoint_every", "checkpoint_keep", "threads",
                 "grad_checkpointing", "compute", "val_file", "chat_template_kwargs",
                 "chat_date", "columns", "skip_bad_rows", "verify_graphs",
                     "rank_timeout", "step_in_backward", "weight_copies"}  # fmt: skip
    for kind, config in (("data", DataConfig), ("lora", LoraConfig), ("train", TrainConfig)):
        names = {f.name for f in dataclasses.fields(config)}
        assert {n for n in names if (kind, n) not in walked} <= elsewhere
