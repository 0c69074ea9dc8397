"""ROME: the key, the covariance and the smallest update, each as it is by hand."""

import numpy as np
import pytest

from pyggml import lab
from pyggml.errors import ConfigError, DataError, ShapeError
from pyggml.graph.arrays import read
from pyggml.lab.linear import exact

TEXTS = [np.random.default_rng(i).integers(0, 90, 12) for i in range(8)]
LAYER, AT, TARGET = 0, 3, 17


@pytest.fixture(scope="module")
def model(opened):
    return exact(opened("llama-Q8_0"))


@pytest.fixture(scope="module")
def covariance(model):
    return lab.key_covariance(model, LAYER, TEXTS)


@pytest.fixture(scope="module")
def edit(model, covariance, clean):
    return lab.rome(model, clean, [TARGET], LAYER, AT, covariance)


def keys(model, ids, name="ffn_neurons"):
    with model.trace(f"blk.{LAYER}.{name}") as t:
        model.logits(ids)
    return t[f"blk.{LAYER}.{name}"].astype(np.float64)


def test_the_covariance_is_that_of_all_tokens(model, covariance):
    every = np.concatenate([keys(model, ids) for ids in TEXTS])
    np.testing.assert_allclose(covariance, np.einsum("ti,tj->ij", every, every) / 96, atol=1e-9)


@pytest.mark.quick
def test_the_target_becomes_likely_by_a_change_at_the_subject(model, edit, clean):
    edited = model.with_adapters(edit.updates)
    chances = []
    for m in (model, edited):
        z = m.logits(clean)[-1].astype(np.float64)
        chances.append(np.exp(z[TARGET] - z.max()) / np.exp(z - z.max()).sum())
    assert [edit.before, edit.after] == pytest.approx(chances, rel=1e-4)
    assert edit.after > 10 * edit.before
    added = keys(edited, clean, "ffn_down") - keys(model, clean, "ffn_down")
    np.testing.assert_allclose(added[AT], edit.change, atol=1e-5)
    assert "the target's probability from" in str(edit)


def test_no_update_that_does_it_changes_other_keys_less(model, covariance, edit, clean):
    """The minimum of tr(ΔW C ΔWᵀ) where ΔW k = δ, by Lagrange's equations of each row."""
    (pair,) = edit.updates.values()
    found = read(pair.b).astype(np.float64) @ read(pair.a)
    k, n = keys(model, clean)[AT], len(covariance)
    c = covariance + 1e-2 * np.trace(covariance) / n * np.eye(n)
    equations = np.block([[2 * c, k[:, None]], [k[None], np.zeros((1, 1))]])
    sides = np.concatenate([np.zeros((n, len(edit.change))), edit.change[None]])
    wanted = np.linalg.solve(equations, sides)[:n].T
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


def test_several_tokens_and_a_short_change(model, covariance, clean):
    edit = lab.rome(model, clean, [TARGET, 5], LAYER, AT - len(clean), covariance, most=0.5)
    length = np.linalg.norm(keys(model, [*clean, TARGET], "ffn_down")[AT])
    assert np.linalg.norm(edit.change) <= 0.5001 * length and edit.after > edit.before


def test_bad_input_is_refused(model, covariance, clean):
    for given, kind, said in (
        (([], [1], 0, 0, covariance), DataError, "empty, wanted at least one token"),
        ((clean, [10**6], 0, 0, covariance), DataError, "wanted 0 to"),
        ((clean, [1], 0, 99, covariance), DataError, "at is 99, wanted a position of the prompt's"),
        ((clean, [1], 5, 0, covariance), ConfigError, "there is no block 5"),
        ((clean, [1], 0, 0, np.eye(2)), ShapeError, r"shape \(2, 2\), wanted n_ff"),
    ):
        with pytest.raises(kind, match=said):
            lab.rome(model, *given)
    with pytest.raises(ConfigError, match="n_steps, most and damping"):
        lab.rome(model, clean, [1], 0, 0, covariance, n_steps=0)
