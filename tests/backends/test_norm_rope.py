"""Norms and rotations of heads without a card: an array stands for the lanes of a warp."""

from types import SimpleNamespace

import numpy as np
import pytest
from extras import reason

from pyggml.ops import OPS

pytest.importorskip("numba_cuda", reason=reason("numba_cuda"))
from pyggml.backends.cuda.ops.norm import norm_rope
from pyggml.backends.cuda.runtime.toolkit import SIMULATED

pytestmark = pytest.mark.skipif(SIMULATED, reason="the simulator has other kernels")
RNG, LANES = np.random.default_rng(4), np.arange(32)
TOKENS, HEADS, EPS = 5, 6, np.float32(1e-3)


@pytest.fixture(autouse=True)
def warp(monkeypatch):
    """A number of each lane is an array of 32 numbers."""

    def load_four(x, i):
        return tuple(x[i + k] for k in range(4))

    def store_four(y, i, *four):
        for k, v in enumerate(four):
            y[i + k] = v

    lanes = {
        "cuda": SimpleNamespace(
            threadIdx=SimpleNamespace(x=LANES, y=0),
            blockIdx=SimpleNamespace(x=0),
            syncthreads=lambda: None,
            shared=SimpleNamespace(array=np.zeros),
            shfl_xor_sync=lambda _, v, step: v[LANES ^ step],
            local=SimpleNamespace(array=lambda shape, _: np.empty(shape, object)),
        ),
        "load_four": load_four,
        "loader": lambda in_bf16: load_four,
        "storer": lambda in_bf16: store_four,
        "warp_sum": lambda v: v.sum(),
        "ptx": SimpleNamespace(inverse_root=lambda x: np.float32(1) / np.sqrt(x)),
        "follow": lambda: None,
        "first_row": lambda: 0,
        "rows_apart": lambda: 1,
        **{
            name: getattr(norm_rope, name).py_func
            for name in ("_rotate", "angles", "normed_and_turned", "_head_back", "_hold", "_four")
        },
        "_dot": norm_rope._dot.py_func,
        "_WARPS": 1,
    }
    for name, value in lanes.items():
        monkeypatch.setattr(norm_rope, name, value)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def table():
    angles = RNG.uniform(0, 6, (TOKENS, 1, 64))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def computed(kernel, *arrays, sums=()):
    """sums: of a kernel that may write some."""
    out = np.zeros(TOKENS * HEADS * 128, np.float32)
    kernel.py_func(out, *sums, *(a.reshape(-1) for a in arrays), HEADS, TOKENS, EPS)
    return out.reshape(TOKENS, HEADS, 128)


@pytest.mark.parametrize("together", [1, 2])
def test_the_norm_of_heads_is_turned(together):
    x, w, turns = normal(TOKENS, HEADS, 128), normal(128), table()
    wanted = OPS["rope_apply"].ref(
        OPS["rms_norm_mul"].ref(x, w, eps=EPS), turns, neox=True, offset=0
    )
    np.testing.assert_allclose(
        computed(norm_rope._norm_turn.__wrapped__(False, False, together), x, w, turns),
        wanted,
        atol=1e-5,
    )


@pytest.mark.parametrize("together", [1, 2])
def test_the_gradient_is_turned_back_and_goes_through_the_norm(together):
    x, w, dy, turns = normal(TOKENS, HEADS, 128), normal(128), normal(TOKENS, HEADS, 128), table()
    back = OPS["rope_apply_back"].ref(dy, turns, neox=True, offset=0)
    wanted = OPS["rms_norm_mul_back"].ref(x, w, back, eps=EPS)
    for_weight = OPS["rms_norm_mul_back_w"].ref(x, back, eps=EPS)
    for has_sums in (False, True):
        kernel = norm_rope._turn_norm_back.__wrapped__(False, False, False, together, has_sums)
        sums = np.zeros(128, np.float32)
        found = computed(kernel, x, w, dy, turns, sums=[sums])
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        np.testing.assert_allclose(sums, for_weight if has_sums else 0, atol=2e-5)
