"""Normal numbers as float32: those that come next of a generator, or the same of every call."""

import numpy as np


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def floats(*shape, seed=0):
    return normal(np.random.default_rng(seed), *shape)
