"""How far a figure may be off, by the chance of the sample: 95 % intervals.

proportion        Wilson's score interval (Wilson 1927), which llama.cpp prints too
mean              the normal interval, mean ± 1.96 standard errors; what belongs together, as tokens
                  of one document do, counts as one observation (clustered: Miller 2024, "Adding
                  Error Bars to Evals")
paired_share      of the difference of two proportions on the same items, adjusted so that it holds
                  for few and for none that differ (Bonett and Price 2012)
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np

Z = 1.959963984540054  # of the normal distribution: 95 % lie within ± Z


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure, and the bounds between which it lies with 95 %."""

    value: float
    low: float
    high: float


def proportion(n_right: float, n: float) -> Interval:
    """Of n_right out of n > 0."""
    p = float(n_right / n)
    z = Z * Z / n
    middle, margin = (p + z / 2) / (1 + z), sqrt(z * (p * (1 - p) + z / 4)) / (1 + z)
    return Interval(p, max(middle - margin, 0.0), min(middle + margin, 1.0))


def clustered_proportion(right: np.ndarray, clusters: np.ndarray) -> Interval:
    """Of right (n,) bool, whose items are alike within a cluster: Wilson's interval of as many
    independent items as have the same standard error, n at most."""
    p, error = float(right.mean()), clustered_error(right.astype(np.float64), clusters)
    n = min(p * (1 - p) / error**2, len(right)) if error else len(right)
    return proportion(p * n, n)


def mean(values: np.ndarray, clusters: np.ndarray) -> Interval:
    """Of values (n,), whose items are alike within a cluster."""
    value, margin = float(values.mean()), Z * clustered_error(values, clusters)
    return Interval(value, value - margin, value + margin)


def clustered_error(values: np.ndarray, clusters: np.ndarray) -> float:
    """The standard error of the mean of values (n,); clusters (n,): the cluster of each.

    √(Σ_c (Σ_{i in c} (x_i − x̄))²) / n, times √(C / (C − 1)) for C clusters; of one cluster alone
    the items count as independent.
    """
    _, number = np.unique(clusters, return_inverse=True)
    n = int(number.max()) + 1
    if n == 1:
        number, n = np.arange(len(values)), len(values)
    sums = np.bincount(number, values - values.mean())
    return sqrt(float((sums**2).sum()) * n / max(n - 1, 1)) / len(values)


def paired_share(ours: np.ndarray, theirs: np.ndarray) -> Interval:
    """Of the share of ours minus that of theirs, (n,) bool each, of the same items."""
    n, won, lost = len(ours), int((ours & ~theirs).sum()), int((~ours & theirs).sum())
    up, down = (won + 1) / (n + 2), (lost + 1) / (n + 2)
    margin = Z * sqrt((up + down - (up - down) ** 2) / (n + 2))
    middle = up - down
    return Interval((won - lost) / n, max(middle - margin, -1.0), min(middle + margin, 1.0))
