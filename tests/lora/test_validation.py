"""What a validation reads: all, or the same sample however rows are packed, and how sure it is."""

import dataclasses

import numpy as np
import pytest

from pyggml.lora import TrainConfig as Config
from pyggml.lora.data import Corpus, Document, pack
from pyggml.lora.data.windows.answers import Answer, preferences
from pyggml.lora.data.windows.lengths import bucket
from pyggml.lora.trainer.reports import ValidationReport
from pyggml.lora.trainer.validation import ValidationSample, _units, margin

CTX = 10


def rows(n, seed=0):
    """Documents of 3 to 8 tokens, the first of which is read and not learned."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 9, n)
    return [Document(rng.integers(0, 48, k), np.arange(k) > 0) for k in lengths]


def corpus(n, n_held_out, packing=True):
    parts = [pack(rows(k, i), CTX, True, alone=not packing) for i, k in enumerate((n, n_held_out))]
    return Corpus(*(parts if packing else bucket(parts)))


def texts(sample):
    """The documents that a sample reads, those of a window one by one."""
    found = []
    for window in sample.windows:
        numbers = sample.dataset.documents[window]
        tokens = sample.dataset.tokens[window]
        each = dict.fromkeys(numbers[numbers >= 0].tolist())
        found += [tuple(tokens[numbers == number].tolist()) for number in each]
    return found


@pytest.mark.quick
def test_all_is_read_where_it_costs_less_than_a_tenth():
    sample = ValidationSample.of(corpus(4000, 100), Config(val_every=0))
    assert sample.is_all and sample.n_read == 100 and sample.share < 0.1
    assert texts(sample) == [tuple(d.ids.tolist()) for d in rows(100, 1)]
    often = ValidationSample.of(corpus(400, 300), Config(val_every=1))
    assert not often.is_all, "400 rows are trained, 300 validated after each step"
    assert ValidationSample.of(Corpus(corpus(9, 9).train, None), Config()) is None


@pytest.mark.quick
@pytest.mark.parametrize("settings", [{"val_every": 5}, {"max_steps": 1}, {"val_windows": 7}])
def test_a_sample_is_of_the_same_rows_whatever_the_packing(settings):
    """Spread over all that is held out: as near to its start as to its end."""
    packed, apart = (
        ValidationSample.of(corpus(500, 400, packing), Config(**settings))
        for packing in (True, False)
    )
    assert 0 < packed.n_read < 400 and packed.n_held_out == 400
    assert texts(packed) == texts(apart) and len(texts(packed)) == packed.n_read
    assert len(packed.windows) < len(apart.windows)
    where = [[tuple(d.ids.tolist()) for d in rows(400, 1)].index(t) for t in texts(packed)]
    assert np.diff(where).max() - np.diff(where).min() <= 1 and abs(np.mean(where) - 199.5) < 2


@pytest.mark.quick
@pytest.mark.parametrize(("n_steps", "n_windows"), [(1, 4), (4, 7), (40, 32)])
def test_short_runs_are_not_mostly_validation(n_steps, n_windows):
    """All validations take half of the run, at least 4 windows each, until 32 are less."""
    stream = pack([Document(list(range(40)) * 110)], CTX)
    settings = Config(max_steps=n_steps, batch=4, val_every=0)
    sample = ValidationSample.of(Corpus(stream, stream), settings)
    assert sample.n_times == 2 and sample.n_read == n_windows


@pytest.mark.quick
def test_little_is_read_whole_however_long_the_windows():
    """So that the loss of a few rows does not depend on --ctx."""
    for settings in ({"max_steps": 1}, {"val_every": 1}):
        sample = ValidationSample.of(corpus(400, 100), Config(**settings))
        assert sample.is_all and sample.n_read == 100
    assert not ValidationSample.of(corpus(400, 100), Config(val_windows=3)).is_all


@pytest.mark.quick
def test_windows_of_plain_text_are_spread():
    """Of text that is one stream the sample is of windows."""
    stream = pack([Document(list(range(40)) * 110)], CTX)
    made = Corpus(stream, stream)
    sample = ValidationSample.of(made, Config(val_windows=8))
    assert sample.dataset is stream and len(sample.windows) == sample.n_read == 8
    assert np.diff(sample.windows).max() - np.diff(sample.windows).min() <= 1


def test_the_loss_of_the_sample_does_not_depend_on_packing(trainer_of):
    losses = []
    for packing in (True, False):
        made, events = corpus(30, 60, packing), []
        trainer = trainer_of(corpus=made, max_steps=1, batch=2, val_windows=10)
        trainer.run(events.append)
        losses.append(next(e for e in events if isinstance(e, ValidationReport)))
    packed, apart = losses
    # In pairs of bfloat16 attention rounds by tiles of keys, within which packing moves documents.
    assert packed.n_tokens == apart.n_tokens and packed.loss == pytest.approx(apart.loss, rel=1e-4)
    assert packed.margin > 0 and apart.margin > 0
    whole = dataclasses.replace(made)
    events = []
    trainer_of(corpus=whole, max_steps=1, val_windows=1000).run(events.append)
    everything = next(e for e in events if isinstance(e, ValidationReport))
    assert everything.margin is None
    assert abs(everything.loss - packed.loss) < 2 * packed.margin


@pytest.mark.quick
def test_the_margin_holds_the_loss_of_all_nineteen_times_in_twenty():
    rng = np.random.default_rng(0)
    n_all, n = 400, 20
    weights, means = rng.integers(20, 60, n_all), rng.gamma(2.0, 2.0, n_all)
    truth = (weights * means).sum() / weights.sum()
    inside = 0
    for _ in range(1000):
        chosen = rng.choice(n_all, n, replace=False)
        share = weights[chosen] / weights[chosen].sum()
        parts = np.stack([share * means[chosen], share], axis=1)
        inside += abs(parts[:, 0].sum() - truth) <= margin(parts, n / n_all)
    assert 900 <= inside <= 985
    assert margin(parts[:1], 0.1) is None and margin(parts, 1.0) is None


@pytest.mark.quick
def test_a_window_of_answers_is_as_long_as_what_is_in_it():
    """Its documents are counted from 0; what fills it up has numbers below."""
    sizes = [7, 5, 9]
    units = [[Answer(list(range(1, n + 1)), np.arange(n) > 1, True)] for n in sizes]
    data = preferences(units, 12, mismatch=False)
    assert sum(_units(data).lengths) == sum(sizes)
