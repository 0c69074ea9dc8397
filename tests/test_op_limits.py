"""Every op with an empty axis, and with row numbers, spans, ids and targets out of range: its own
numbers, as the reference has them, or a sentence. In a process of its own: a fault would end it."""

import sys
from itertools import islice

import numpy as np
import pytest

from pyggml.errors import PyggmlError
from pyggml.graph.tensor import Tensor, as_leaf, leaf
from pyggml.look.check import in_float64
from pyggml.ops import OPS
from pyggml.runtime import run

pytestmark = pytest.mark.quick

FAR = (-1, -(2**31), 2**31 - 1, 10_000)


def samples(op):
    for sample in islice(op.samples(np.random.default_rng(0)), 2):
        if not any(isinstance(a, Tensor) for a in sample.arrays):
            yield sample


def emptied(sample):
    """The sample without any axis of one of its sizes."""
    for n in sorted({n for a in sample.arrays for n in a.shape}):
        yield [np.zeros([0 if m == n else m for m in a.shape], a.dtype) for a in sample.arrays]


def out_of_range(sample):
    """The sample with one whole number that is far off, the first or the last of an array."""
    for i, a in enumerate(sample.arrays):
        for value in FAR if a.dtype.kind == "i" and a.size else ():
            for at in (0, -1):
                wrong = a.astype(np.int32)
                wrong.reshape(-1)[at] = value
                yield [*sample.arrays[:i], wrong, *sample.arrays[i + 1 :]]


def agrees(op, arrays, params):
    """Whether the op refuses the arrays in a sentence, or computes what its reference does."""
    try:
        (found,) = run(op(*map(as_leaf, arrays), **params))
    except PyggmlError as error:
        return "\n" not in str(error)
    try:
        with np.errstate(all="ignore"):
            wanted = np.asarray(op.ref(*(in_float64(as_leaf(a)).copy() for a in arrays), **params))
    except (ValueError, IndexError):  # NumPy has no numbers for nothing
        return not found.size or not any(a.size for a in arrays) or np.isfinite(found).all()
    close = np.allclose(found, wanted, rtol=1e-3, atol=1e-3, equal_nan=True)
    return found.shape == wanted.shape and (close or not wanted.size)


def faults(variants, names):
    with np.errstate(all="ignore"):
        for name in names:
            for sample in samples(OPS[name]):
                for arrays in variants(sample):
                    if not agrees(OPS[name], arrays, sample.params):
                        yield f"{name} {[a.shape for a in arrays]} {sample.params}"


@pytest.mark.parametrize("variants", ["emptied", "out_of_range"])
def test_an_op_has_its_own_numbers_or_an_error(variants):
    from processes import python  # which that process has not

    done = python("-W", "ignore", __file__, variants)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_a_span_reaches_no_further_than_the_keys():
    rng = np.random.default_rng(0)
    shapes = ((5, 2, 8), (9, 2, 8), (9, 2, 8))
    q, k, v = (leaf(rng.standard_normal(s).astype(np.float32)) for s in shapes)
    for span in ((-1, 3), (0, 10), (0, 2**31 - 1), (-(2**31), 4), (10, 3), (2, -1)):
        spans = np.array([[0, 4]] * 5, np.int32)
        spans[3] = span
        node = OPS["flash_attn_ext"](
            *(q, k, v, leaf(spans)), scale=1.0, cap=0.0, max_bias=0.0, masked=False, longest=0
        )
        with pytest.raises(PyggmlError, match="query 3 sees the keys from"):
            run(node)


if __name__ == "__main__":
    found = list(faults(globals()[sys.argv[1]], sys.argv[2:] or list(OPS)))
    sys.stdout.write("\n".join(found))
    sys.exit(bool(found))
