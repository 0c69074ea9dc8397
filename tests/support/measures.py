"""How far one array is from another."""

import numpy as np


def nmse(found: np.ndarray, wanted: np.ndarray) -> float:
    """Mean square error in units of the mean square, in float64."""
    exact = wanted.astype(np.float64)
    return float(((found - exact) ** 2).sum() / (exact**2).sum())
