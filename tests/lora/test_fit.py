"""Settings below a limit of memory: in which order they are tried, and what stays as it was."""

import pytest

import pyggml
from pyggml.errors import DataError
from pyggml.lora import LoraConfig, TrainConfig, attach, fit
from pyggml.lora.trainer.passes import Passes

CONFIG = TrainConfig(batch=6, grad_accum=2, lr=1e-3)


@pytest.fixture(scope="module")
def adapter(tiny):
    return attach(pyggml.load(tiny), LoraConfig(rank=3, alpha=5.0))


@pytest.fixture
def found(adapter):
    """(limit, fixed) -> settings that were found, and whether they are below the limit."""

    def call(limit, fixed=()):
        return fit(adapter.model, adapter.parameters, CONFIG, 64, limit, fixed)

    return call


def settings(fit):
    c = fit.config
    return fit.ctx, c.batch, c.grad_accum, c.grad_checkpointing


def test_a_limit_that_does_not_bind_changes_nothing(found):
    free, fits = found(1 << 40)
    assert fits and free.config == CONFIG and free.ctx == 64


def test_each_limit_below_the_last_need_takes_the_next_settings(found, adapter):
    """Down to the least; at each, the plan is that of the settings, and every step has 12
    windows."""
    seen, limit = [], 1 << 40
    while True:
        each, fits = found(limit)
        if not fits:
            break
        seen.append(settings(each))
        passes = Passes.of(adapter.model, adapter.parameters, each.config, each.ctx)
        assert each.n_bytes <= limit and each.arena == passes.n_bytes
        assert each.config.windows_per_step == 12 and each.config.lr == 1e-3
        limit = each.n_bytes - 1
    kept = [(64, 6, 2, False), (64, 4, 3, False), (64, 3, 4, False), (64, 2, 6, False)]
    assert seen[:4] == kept
    assert (64, 1, 12, True) in seen and seen[-1][0] == 32
    assert seen.index((64, 1, 12, True)) < next(i for i, s in enumerate(seen) if s[0] == 32)
    assert each.n_bytes == limit + 1 and settings(each) == seen[-1], "the least is told"


@pytest.mark.parametrize(
    "fixed, kept",
    [
        ({"ctx"}, {0: 64}),
        ({"batch", "grad_accum"}, {1: 6, 2: 2}),
        ({"grad_checkpointing"}, {3: False}),
        ({"ctx", "batch", "grad_accum", "grad_checkpointing"}, {0: 64, 1: 6, 2: 2, 3: False}),
    ],
)
def test_what_is_fixed_stays_where_nothing_fits(found, fixed, kept):
    least, fits = found(0, fixed)
    assert not fits
    assert {i: settings(least)[i] for i in kept} == kept
    if len(fixed) < 4:
        assert settings(least) != (64, 6, 2, False)


def test_windows_too_short_for_the_data_are_left_out(adapter):
    def planner(config, ctx):
        if ctx < 64:
            raise DataError("line 3 has 60 tokens")
        return Passes.of(adapter.model, adapter.parameters, config, ctx)

    least, fits = fit(adapter.model, adapter.parameters, CONFIG, 128, 0, (), planner)
    assert not fits and least.ctx == 64
    with pytest.raises(DataError):
        fit(adapter.model, adapter.parameters, CONFIG, 32, 0, (), planner)
