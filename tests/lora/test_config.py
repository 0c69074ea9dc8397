"""Settings: every fault at once, and what a command line reads from the fields."""

import dataclasses
import math
from dataclasses import fields
from functools import partial

import numpy as np
import pytest

from pyggml.errors import ConfigError
from pyggml.lora import DataConfig, LoraConfig, TrainConfig
from pyggml.settings import numbers_in

CONFIGS = (DataConfig, LoraConfig, TrainConfig)
SETTINGS = [pytest.param(c, f, id=f"{c.__name__}-{f.name}") for c in CONFIGS for f in fields(c)]


def wrong_for(setting):
    """Values of another type than a setting's, and such as are outside of its range."""
    usual = setting.metadata["like"] if setting.default is None else setting.default
    if isinstance(usual, bool):
        return ["no", 1]
    if isinstance(usual, str):
        return [] if setting.metadata["fits"]("?") else ["?", 3, ["auto"]]
    if usual is None:
        return []
    ends = [-1, 0, 10**40, *((math.nan, math.inf, -math.inf) if isinstance(usual, float) else ())]
    ends = [v for v in ends if not setting.metadata["fits"](v)]
    return ["8", True, [8], *([] if isinstance(usual, float) else [8.5]), *ends]


@pytest.mark.parametrize("kind, setting", SETTINGS)
def test_a_setting_out_of_range_is_refused(kind, setting):
    for value in wrong_for(setting):
        with pytest.raises(ConfigError, match=rf"^{setting.name} is .*, wanted \S"):
            kind(**{setting.name: value})


def test_names_of_modules_are_some_and_none_twice():
    for value in ((), ("attn_q", "attn_q"), "ffn", ("attn_q", 3)):
        with pytest.raises(ConfigError, match=r"^modules is .*, wanted \S"):
            LoraConfig(modules=value)


def test_numbers_of_numpy_are_python_s_from_then_on():
    config = LoraConfig(rank=np.int64(4), alpha=np.float32(8), rslora=np.bool_(True))
    assert [(type(v), v) for v in (config.rank, config.alpha, config.rslora)] == [
        (int, 4), (float, 8.0), (bool, True)
    ]  # fmt: skip
    assert type(LoraConfig(rank_pattern={"attn_q": np.int32(2)}).rank_pattern["attn_q"]) is int
    assert type(TrainConfig(lr=np.float64(1e-4)).lr) is float
    with pytest.raises(ConfigError, match=r"^rank is 0, wanted 1 to 4096"):
        LoraConfig(rank=np.int64(0))


def test_all_faults_come_at_once():
    with pytest.raises(ConfigError) as caught:
        TrainConfig(lr=-1.0, batch=0, lr_min=0.5)
    assert str(caught.value).count("; ") == 2
    assert "lr_min is 0.5, wanted at most the highest rate" in str(caught.value)


@pytest.mark.parametrize("kind", [DataConfig, LoraConfig, TrainConfig])
def test_every_default_is_valid_and_explained(kind):
    kind()
    for field in dataclasses.fields(kind):
        assert field.metadata["help"]


def test_a_resumed_run_may_change_only_its_length_and_what_changes_no_number():
    free = {f.name for f in dataclasses.fields(TrainConfig)} - set(TrainConfig().shared_by_runs())
    free_of_result = {"checkpoint_dir", "checkpoint_every", "threads", "val_every", "val_windows"}
    free_of_result |= {"grad_checkpointing", "checkpoint_keep", "patience", "verify_graphs"}
    free_of_result |= {"rank_timeout", "weight_copies"}
    assert free == free_of_result | {"max_steps", "epochs"}


@pytest.mark.quick
def test_limits_are_where_they_are_said_to_be():
    """The ends of ranges that a run may want, and the first values outside."""
    assert TrainConfig(lr_scheduler="wsd", lr_decay=1.0).lr_decay == 1.0
    assert LoraConfig(rank_pattern={"ffn_*": 1}).rank_pattern == {"ffn_*": 1}
    for make, wrong in (
        (partial(TrainConfig, lr_scheduler="wsd"), {"lr_decay": 1.1}),
        (LoraConfig, {"rank_pattern": {"ffn_*": 0}}),
        (LoraConfig, {"rank_pattern": {"ffn_*": 4097}}),
        (DataConfig, {"chat_date": "yesterday"}),
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            make(**wrong)


@pytest.mark.parametrize(
    "words, within, outside",
    [
        ("", [None, "a"], []),
        ("1 or more", [1, 9e99], [0, float("inf"), float("nan")]),
        ("above 0", [1e-9], [0, float("inf")]),
        ("-1 to 0.5", [-1, 0.5], [-1.1, 0.6, float("nan")]),
        ("above 0, at most 10", [1e-9, 10], [0, 10.1]),
        ("above 0, below 1e3", [999], [0, 1000]),
        ("0 to below 1", [0, 0.9], [-1e-9, 1]),
        ("2 to 2^20", [2, 1 << 20], [1, (1 << 20) + 1]),
    ],
)
def test_a_range_follows_from_its_words(words, within, outside):
    fits = numbers_in(words)
    assert all(map(fits, within)) and not any(map(fits, outside))


def test_words_that_are_no_range_are_refused():
    with pytest.raises(ValueError, match="no range of numbers"):
        numbers_in("a few")
