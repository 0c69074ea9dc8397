"""A setting that another one, the data or the machine caps is named with what is done instead;
every objective has its own rate, epochs and warm-up."""

import pytest

from pyggml import threads
from pyggml.errors import ConfigError
from pyggml.lora import TrainConfig
from pyggml.lora.objectives import OBJECTIVES
from pyggml.lora.trainer.caps import caps

MOST = threads.most()
# Of a run of 8 windows, with one held out; the pairs, and what is said of the first of them.
CAPPED = [
    ({"max_steps": 500, "epochs": 3}, "max_steps", "the run ends with step 24, as epochs is 3"),
    ({"max_steps": 20, "epochs": 3}, "epochs", "with step 20 of 24, as max_steps is 20"),
    ({"batch": 20}, "batch", "a step has the 8 of an epoch, not 20"),
    ({"batch": 4, "grad_accum": 3}, "grad_accum", "a step has the 8 of an epoch, not 12"),
    ({"max_steps": 9, "warmup_steps": 6}, "warmup_steps", "is 6: it takes 4, half of all steps"),
    ({"lr_scheduler": "cosine_restarts", "lr_cycles": 9, "max_steps": 9, "warmup_steps": 2},
     "lr_cycles", "is 9: there are 7 steps for them"),
    ({"max_steps": 9, "val_every": 9}, "val_every", "the run ends with step 9, without one"),
    ({"val_windows": 3}, "val_windows", "is 3: all of the 1 held out are read"),
    ({"max_steps": 9, "val_every": 3, "patience": 3}, "patience", "is 3: 3 after the first"),
    ({"max_steps": 9, "checkpoint_dir": "points"}, "checkpoint_every", "ends with step 9, so"),
    ({"threads": MOST + 1}, "threads", f"is {MOST + 1}: {MOST} are used, all that this process"),
]  # fmt: skip
# The same, one step or window below: nothing is capped.
FREE = [
    ({"max_steps": 24, "epochs": 3}, {"max_steps", "epochs"}),
    ({"max_steps": 500, "epochs": None}, {"max_steps", "epochs"}),
    ({"batch": 8}, {"batch"}),
    ({"batch": 4, "grad_accum": 2}, {"grad_accum"}),
    ({"max_steps": 9, "warmup_steps": 4}, {"warmup_steps"}),
    ({"lr_scheduler": "cosine_restarts", "lr_cycles": 7, "max_steps": 9}, {"lr_cycles"}),
    ({"max_steps": 9, "val_every": 8}, {"val_every"}),
    ({"val_windows": 1}, {"val_windows"}),
    ({"max_steps": 9, "val_every": 3, "patience": 2}, {"patience"}),
    ({"max_steps": 9, "checkpoint_dir": "points", "checkpoint_every": 9}, {"checkpoint_every"}),
    ({"threads": MOST}, {"threads"}),
]


@pytest.fixture
def capped(trainer_of, corpus_of):
    corpus = corpus_of(10, lengths=[11] * 9)

    def of(settings):
        return dict(caps(trainer_of(corpus=corpus, **settings)))

    return of


@pytest.mark.parametrize("settings, name, said", CAPPED, ids=[c[1] for c in CAPPED])
def test_a_setting_that_is_capped_is_named(capped, settings, name, said):
    assert said in capped(settings)[name]


@pytest.mark.parametrize("settings, names", FREE, ids=[min(f[1]) for f in FREE])
def test_a_setting_that_does_what_it_says_is_not(capped, settings, names):
    assert not names & capped(settings).keys()


def test_the_table_has_every_setting_that_is_capped():
    assert {name for _, name, _ in CAPPED} == set().union(*(names for _, names in FREE))


def test_steps_alone_go_on_through_as_many_epochs_as_they_need(trainer_of, corpus_of):
    corpus = corpus_of(10, lengths=[11] * 9)
    trainer = trainer_of(corpus=corpus, max_steps=20, epochs=None)
    assert trainer.n_steps == 20 and trainer.run()
    assert (trainer.progress.epoch, trainer.progress.index) == (2, 4)


# -- by objective -------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_settles_what_is_not_given(name):
    kind = OBJECTIVES[name]
    config = kind.settle(TrainConfig())
    assert {n: getattr(config, n) for n in kind.defaults} == kind.defaults
    assert {"lr", "epochs"} < set(kind.defaults)
    assert kind.settle(config) == config
    assert (config.lr == 2e-4) == (name in ("sft", "distill", "gkd"))
    given = kind.settle(TrainConfig(lr=1e-3, epochs=2, warmup_steps=3))
    assert (given.lr, given.epochs, given.warmup_steps) == (1e-3, 2, 3)
    assert given.warmup_ratio is None, "the warm-up was given"
    assert kind.settle(TrainConfig(warmup_ratio=0.0)).warmup_steps is None
    assert kind.settle(TrainConfig(max_steps=5)).epochs is None


def test_what_is_given_is_held_against_the_objective_s_rate():
    TrainConfig(lr_min=1e-4)  # sft's is higher
    with pytest.raises(ConfigError, match="lr_min is 0.0001, wanted at most the highest rate"):
        OBJECTIVES["dpo"].settle(TrainConfig(lr_min=1e-4))
