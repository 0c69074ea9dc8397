"""Intervals against published values, and against formulas that need no clusters or pairs."""

import numpy as np
import pytest

from pyggml.errors import DataError
from pyggml.look.intervals import (
    Z,
    clustered_error,
    clustered_proportion,
    mean,
    paired_share,
    proportion,
)
from pyggml.lora.evaluate import Answers, TokenScores, compare_answers, compare_tokens

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "n_right, n, low, high",
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_s_interval_as_newcombe_lists_it(n_right, n, low, high):
    """Newcombe 1998, "Two-sided confidence intervals for the single proportion", method 3."""
    found = proportion(n_right, n)
    assert found.value == n_right / n
    assert (found.low, found.high) == pytest.approx((low, high), abs=6e-5)


def test_clusters_of_one_give_the_usual_standard_error():
    x = np.random.default_rng(0).normal(3, 2, 50)
    assert clustered_error(x, np.arange(50) * 7) == pytest.approx(x.std(ddof=1) / np.sqrt(50))


def test_items_of_a_cluster_count_as_one():
    """Each of 40 numbers ten times: as well known as from the 40."""
    x = np.random.default_rng(1).normal(0, 1, 40)
    found = mean(np.repeat(x, 10), np.repeat(np.arange(40), 10))
    half = Z * x.std(ddof=1) / np.sqrt(40)
    assert (found.value, found.low) == pytest.approx((x.mean(), x.mean() - half))
    right = np.arange(40) < 13
    repeated = clustered_proportion(np.repeat(right, 10), np.repeat(np.arange(40), 10))
    alone = proportion(13, 40)
    assert repeated.high - repeated.low == pytest.approx(alone.high - alone.low, rel=0.02)


def test_one_cluster_alone_counts_its_items():
    for right in (np.arange(30) < 20, np.ones(30, bool)):
        found, wanted = clustered_proportion(right, np.zeros(30)), proportion(right.sum(), 30)
        ends = (found.value, found.low, found.high)
        assert ends == pytest.approx((wanted.value, wanted.low, wanted.high), abs=0.01)


def test_a_paired_difference_by_hand():
    """Of 98 items 20 won and 9 lost: (21 − 10) / 100 ± 1.96 √((0.31 − 0.11²) / 100)."""
    ours = np.arange(98) < 20
    theirs = np.arange(98)[::-1] < 9
    found = paired_share(ours, theirs)
    half = 1.959964 * np.sqrt((0.31 - 0.0121) / 100)
    assert found.value == pytest.approx(11 / 98)
    assert (found.low, found.high) == pytest.approx((0.11 - half, 0.11 + half))


def test_no_item_that_differs_leaves_room_for_one():
    found = paired_share(np.ones(50, bool), np.ones(50, bool))
    assert found.value == 0 and found.low == -found.high and 0.02 < found.high < 0.06


def test_paired_tokens_are_known_better_than_either():
    rng = np.random.default_rng(2)
    hard = rng.exponential(3, 4000)
    losses = hard - 0.1 + rng.normal(0, 0.02, 4000)
    documents = np.repeat(np.arange(100), 40)
    ours, theirs = (TokenScores(x, x < 1, documents) for x in (losses, hard))
    ratio, share = compare_tokens(ours, theirs)
    assert ratio.value == pytest.approx(np.exp((losses - hard).mean()))
    assert ratio.low - 0.001 < np.exp(-0.1) < ratio.high < ratio.low + 0.01
    assert share.won - share.lost == int(ours.right.sum()) - int(theirs.right.sum())
    assert share.share.value == pytest.approx((share.won - share.lost) / 4000)


def test_only_the_same_items_are_compared():
    right = {"acc": np.array([True, False])}
    two, one = Answers([1, 2], [1, 2], right), Answers([1], [1], {"acc": np.array([True])})
    assert compare_answers(two, two)["acc"].won == 0
    with pytest.raises(DataError, match="2 and 1 questions, wanted the same"):
        compare_answers(two, one)
