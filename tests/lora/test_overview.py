"""The gradient overview: its numbers are norms computed by hand, and what is wrong is found."""

import json
import sys

import numpy as np
import pytest

from pyggml.graph.arrays import read
from pyggml.look.draw import heat_map
from pyggml.look.overview import (
    Column,
    Flag,
    Measure,
    cell_of,
    findings,
    flags,
    layer_flags,
    overview,
)
from pyggml.lora import TrainConfig, Trainer, train_tensors
from pyggml.lora.record import Recorder, gradients_record, overview_of, read_records
from pyggml.lora.trainer.reports import StepReport
from pyggml.models import ARCHITECTURES, small_metadata, tensors_of


def recorded(trainer, tmp_path):
    """The overview that a run leaves, and the parameters and gradients of every step by hand."""
    p = trainer.parameters
    seen = [{name: read(t).copy() for name, t in p.tensors.items()}]
    gradients = []

    def watched(report):
        recorder(report)
        if isinstance(report, StepReport):
            seen.append({name: read(t).copy() for name, t in p.tensors.items()})
            g = {name: read(t).astype(np.float64) for name, t in p.gradients.items()}
            whole = np.sqrt(sum((x**2).sum() for x in g.values()))
            gradients.append({name: x * report.grad_norm / whole for name, x in g.items()})

    with Recorder(trainer, tmp_path / "adapter.gguf") as recorder:
        trainer.run(watched)
    return overview_of(read_records(tmp_path / "adapter.metrics.jsonl")), seen, gradients


def check(found, seen, gradients):
    """Every number of the overview is what NumPy says of the arrays."""
    for s, step in enumerate(found.steps):
        before, after, g = seen[step - 1], seen[step], gradients[step - 1]
        for name in g:
            layer, column = cell_of(name)
            at = s, found.layers.index(layer), found.columns.index(column)
            wanted = [
                (found.norms, np.linalg.norm(g[name])),
                (found.zeros, np.mean(g[name] == 0)),
                (found.weights, np.linalg.norm(before[name])),
                (found.updates, np.linalg.norm(after[name] - before[name])),
            ]
            for array, value in wanted:
                assert array[at] == pytest.approx(value, rel=1e-3, abs=1e-12), (step, name)


def test_the_overview_of_a_run_has_norms_computed_by_hand(trainer_of, tmp_path):
    trainer = trainer_of(max_steps=3, grad_accum=2, weight_decay=0.1, clip=1e-3)
    found, seen, gradients = recorded(trainer, tmp_path)
    assert found.steps == (1, 2, 3) and found.layers == ("blk.0", "blk.1", "blk.2")
    assert Column("attn_q", "A") in found.columns and found.there.all()
    check(found, seen, gradients)
    b = [c.factor == "B" for c in found.columns]
    assert np.isnan(found.ratios[0][:, b]).all(), "B is 0 before the first step"
    ratios = found.updates[1:] / found.weights[1:]
    np.testing.assert_array_equal(found.ratios[1:], ratios)
    norms = np.sqrt((found.norms**2).sum(axis=2))
    np.testing.assert_allclose(found.layer_norms, norms)


def test_full_tensors_have_an_overview_too(tiny, corpus_of, tmp_path):
    import pyggml

    trained = train_tensors(pyggml.load(tiny), ["*_norm.weight", "output.weight", "token_embd"])
    config = TrainConfig(lr=0.01, max_steps=2, optimiser="lion")
    trainer = Trainer(trained.model, trained.parameters, corpus_of(10), config)
    found, seen, gradients = recorded(trainer, tmp_path)
    check(found, seen, gradients)
    assert {"token_embd", "blk.2", "output_norm", "output"} <= set(found.layers)
    row, at = found.layers.index("output"), found.columns.index(Column("weight", ""))
    assert found.there[row, at] and not found.there[row, found.columns.index(("attn_norm", ""))]
    assert np.isnan(found.norms[:, ~found.there]).all()
    embedding = found.zeros[0, found.layers.index("token_embd"), at]
    assert 0 < embedding < 1, "rows of tokens that the text lacks"


def test_a_run_of_many_steps_is_sampled(trainer_of, tmp_path):
    found, *_ = recorded(trainer_of(max_steps=230, epochs=300), tmp_path)
    assert found.steps == (1, *range(4, 230, 4), 230)


@pytest.mark.parametrize(
    "name, layer, column",
    [
        ("blk.31.attn_q.weight.lora_a", "blk.31", Column("attn_q", "A")),
        ("blk.0.ffn_gate_exps.weight.lora_b", "blk.0", Column("ffn_gate_exps", "B")),
        ("blk.0.attn_q.weight.lora_magnitude", "blk.0", Column("attn_q", "m")),
        ("blk.2.attn_q.bias", "blk.2", Column("attn_q.bias", "")),
        ("blk.7.ssm_a", "blk.7", Column("ssm_a", "")),
        ("enc.blk.1.attn_q.weight", "enc.blk.1", Column("attn_q", "")),
        ("output.weight.lora_a", "output", Column("weight", "A")),
        ("output_norm.bias", "output_norm", Column("bias", "")),
        ("odd", "odd", Column("weight", "")),
    ],
)
def test_layers_and_modules_are_read_from_names(name, layer, column):
    assert cell_of(name) == (layer, column)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_a_cell_for_each_tensor(architecture):
    """Of an adapter of all that can be adapted, experts too, and of all tensors themselves."""
    specs = tensors_of(small_metadata(ARCHITECTURES[architecture]), 64)
    adapted = [n for n, s in specs.items() if s.linear or s.table]
    for names in ([n + f".lora_{f}" for n in adapted for f in "ab"], list(specs)):
        o = overview({1: {n: Measure(float(i), 0.5) for i, n in enumerate(names, 1)}})
        assert o.there.sum() == len(names)
        found = {o.norms[0, i, c] for i, c in zip(*np.nonzero(o.there), strict=True)}
        assert found == set(range(1, len(names) + 1))
        blocks = [layer for layer in o.layers if layer.startswith("blk.")]
        assert blocks == [f"blk.{i}" for i in range(len(blocks))] and len(blocks) > 1
        assert heat_map(o).count("<rect") >= len(names)


def test_layers_and_columns_are_in_order():
    names = ["token_embd.weight", "blk.10.a.weight", "output.weight", "blk.9.b.weight.lora_b"]
    names += ["blk.9.b.weight.lora_a", "blk.9.a.weight"]
    found = overview({4: dict.fromkeys(names, Measure(1, 0))})
    assert found.layers == ("token_embd", "blk.9", "blk.10", "output")
    assert [str(c) for c in found.columns] == ["weight", "a", "b A", "b B"]


def layered(norms, weights=None):
    """norms: layer → norms of attn_q A, attn_q B."""
    found = {}
    for layer, pair in norms.items():
        for x, factor, w in zip(pair, "ab", (weights or {}).get(layer, (1, 1)), strict=True):
            found[f"blk.{layer}.attn_q.weight.lora_{factor}"] = Measure(x, float(x == 0), w)
    return overview({1: found})


def test_dead_exploding_and_broken_gradients_are_flagged(monkeypatch):
    o = layered({0: (1, 2), 1: (1, 21), 2: (0, 0), 3: (1, 1), 4: (np.nan, 1), 5: (np.inf, 2)})
    fine, dead, high, broken = Flag
    wanted = [
        (fine, fine),
        (fine, high),
        (dead, dead),
        (fine, fine),
        (broken, fine),
        (broken, fine),
    ]
    np.testing.assert_array_equal(flags(o)[0], wanted)
    np.testing.assert_array_equal(layer_flags(o)[0], [fine, fine, dead, fine, broken, broken])
    broken = "not finite: the gradient holds NaN or infinity, step 1"
    assert findings(o) == [
        f"blk.4 attn_q A: {broken}",
        f"blk.5 attn_q A: {broken}",
        "blk.1 attn_q B: exploding: the norm is above 10 times the median, step 1",
        "blk.2: dead: the gradient is 0, step 1",
    ]
    monkeypatch.setattr(sys.modules["pyggml.look.overview"], "MULTIPLE", 11.0)
    np.testing.assert_array_equal(flags(o)[0][1], (fine, fine))


def test_a_whole_layer_explodes():
    o = layered({0: (1, 1), 1: (1, 1), 2: (9, 9), 3: (11, 11)})
    assert layer_flags(layered({0: (1, 1), 1: (1, 1), 2: (1, 1), 3: (11, 11)}))[0].tolist() == [
        *(Flag.FINE,) * 3,
        Flag.EXPLODING,
    ]
    assert not layer_flags(o).any(), "the median is that of all four"


def test_a_gradient_of_zero_is_not_dead_where_the_other_factor_is_zero():
    norms = {0: (0, 1), 1: (0, 1), 2: (0, 1)}
    assert not flags(layered(norms, dict.fromkeys(norms, (1, 0)))).any()
    assert (flags(layered(norms))[0][:, 0] == Flag.DEAD).all()
    whole = layered({0: (0, 0), 1: (0, 1)}, {0: (1, 0), 1: (1, 0)})
    assert flags(whole)[0][0].tolist() == [Flag.FINE, Flag.DEAD], "B's is not explained by A"
    assert layer_flags(whole)[0].tolist() == [Flag.DEAD, Flag.FINE]


def test_few_layers_are_held_against_their_own_modules():
    names = [f"blk.0.m{i}.weight" for i in range(4)]
    o = overview({1: {n: Measure(x, 0) for n, x in zip(names, (1, 2, 1, 50), strict=True)}})
    assert flags(o)[0].tolist() == [[Flag.FINE] * 3 + [Flag.EXPLODING]]


def test_a_record_comes_back_from_its_line():
    o = layered({0: (1.23456, np.inf), 1: (0, np.nan)}, {0: (3, 0), 1: (1e-9, 2)})
    found = overview_of([json.loads(json.dumps(gradients_record(o), allow_nan=False))])
    np.testing.assert_array_equal(found.norms, [[[1.235, np.inf], [0, np.nan]]])
    np.testing.assert_array_equal(found.weights, o.weights)
    assert np.isnan(found.updates).all() and found.there.all()


HOSTILE = [
    {"layers": "blk.0"},
    {"layers": ["blk.0"], "columns": [1], "norm": [[1]]},
    {"layers": ["blk.0"], "columns": ["a"], "norm": [[1, 2]]},
    {"layers": ["blk.0"], "columns": ["a"], "norm": [[[1]]]},
    {"layers": ["blk.0"], "columns": ["a"], "norm": [["x"]]},
    {"layers": ["blk.0"], "columns": ["a"]},
    {"layers": ["blk.0"], "columns": ["a"], "norm": [[-1]]},
]


@pytest.mark.parametrize("record", HOSTILE)
def test_records_of_others_that_hold_no_table_are_left_out(record):
    good = gradients_record(layered({0: (1, 1)}))
    found = overview_of([{"event": "gradients", "step": 7, **record}, good])
    assert found.steps == (1,)
    assert overview_of([{"event": "gradients", "step": 7, **record}]) is None
