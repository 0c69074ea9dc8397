"""Which path serves what, and that each computes attention in exactly the scratch that it names."""

from dataclasses import replace

import numpy as np
import pytest

from pyggml.graph.dtypes import BF16, DTYPES, F16, F32
from pyggml.kernels.attention import BACKWARD, FORWARD, backward_path, forward_path
from pyggml.kernels.attention.flash import IN_PAIRS
from pyggml.kernels.attention.row_softmax import SCALES
from pyggml.kernels.attention.rows import FEW
from pyggml.kernels.attention.unfused import SCORE_ROWS
from pyggml.kernels.gemm import CHOSEN, FLOAT_TILE, rounds
from pyggml.ops.attention.attention import FLASH_ATTN_BACK, FLASH_ATTN_EXT

from attending import arrays, backward_arrays, in_float16, problem_of, run_exactly

COMPILED = CHOSEN.compiled
MR = FLOAT_TILE.mr
Q4_0 = DTYPES["Q4_0"]
PAIRS = {IN_PAIRS.name, f"{IN_PAIRS.name}, widened"}
COUNTS = [1, MR - 1, MR, FEW, FEW + 1, 150, SCORE_ROWS + 9]


def spans(n_queries, n_keys):
    """A causal window of 40; the first query sees nothing."""
    last = np.arange(n_keys - n_queries, n_keys) + 1
    span = np.stack([np.maximum(last - 40, 0), last], axis=1)
    span[0] = 0 if n_queries > 1 else span[0]
    return span


def case(rng, n_queries, has_extras, dv=20):
    n_keys, heads = n_queries + 20, (6, 2)
    extras = {}
    if has_extras:
        extras = {
            "cap": np.float32(2),
            "mask": rng.standard_normal((2, n_queries, n_keys)).astype(np.float32),
            "sinks": rng.standard_normal(6).astype(np.float32),
            "slopes": np.ones(6, np.float32),
        }
    return arrays(rng, n_queries, n_keys, spans(n_queries, n_keys), heads, 20, dv, **extras)


def reference(op, a, has_extras, *more):
    """What the op's float64 reference makes of these arrays."""
    extras = (a.mask, a.sinks) if has_extras else ()
    params = {"scale": float(a.scale), "cap": float(a.cap), "max_bias": 0.0, "masked": has_extras}
    params["longest"] = 0
    wide = [x.astype(np.float64) for x in (a.q, a.k, a.v)]
    more = [x.astype(np.float64) for x in (*more, *extras)]
    return op.ref(*wide, a.span, *more, **params)


# -- which row serves ---------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [(F32, F32), (F16, F16), (F32, F16), (Q4_0, BF16)], ids=str)
@pytest.mark.parametrize("n_queries", COUNTS)
def test_which_path_serves_a_forward_pass(n_queries, kinds, rng):
    a = case(rng, n_queries, has_extras=False)
    plain = replace(problem_of(a), key_type=kinds[0], value_type=kinds[1])
    suffix = "" if kinds == (F32, F32) else ", widened"
    fast = "decode" if n_queries < MR else f"flash{suffix}"
    assert forward_path(plain).name == (fast if COMPILED else f"plain{suffix}")
    few = "rows" if BF16 not in kinds else "rows, widened"
    slow = few if n_queries <= FEW else f"unfused{suffix}"
    assert forward_path(replace(plain, has_extras=True)).name == slow


@pytest.mark.parametrize("n_queries", COUNTS)
def test_which_path_serves_a_backward_pass(n_queries, rng):
    plain = problem_of(case(rng, n_queries, has_extras=False))
    wanted = "flash" if COMPILED and n_queries >= MR else "plain"
    assert backward_path(plain).name == wanted
    assert backward_path(replace(plain, has_extras=True)).name == "unfused"


def test_no_row_is_out_of_reach(rng):
    """Each serves something, or stands below a faster one that needs the JIT."""
    problems = [
        replace(problem_of(case(rng, n, extras), extras), key_type=kind, value_type=F32)
        for n in COUNTS
        for extras in (False, True)
        for kind in (F32, F16, Q4_0)
    ]
    problems += [replace(p, compute="bf16", may_round=True) for p in problems]
    problems += [replace(problems[-1], longest=8)]
    serving = {forward_path(p).name for p in problems}
    below = {"plain", "plain, widened"} if COMPILED else set()
    below |= set() if SCALES else PAIRS
    assert serving == {path.name for path in FORWARD} - below
    assert len({path.name for path in FORWARD}) == len(FORWARD)


@pytest.mark.skipif(not SCALES, reason="this CPU lacks AVX512-BF16")
def test_what_attention_multiplies_is_rounded_where_it_may_be(rng):
    a = case(rng, 150, has_extras=False)
    for compute, may_round, wanted in (
        ("bf16", True, IN_PAIRS.name),
        ("int8", True, IN_PAIRS.name),
        ("bf16", False, "flash"),
        ("f32", True, "flash"),
    ):
        p = problem_of(a, False, compute, may_round)
        assert forward_path(p).name == wanted
        cached = replace(p, key_type=F16, value_type=Q4_0)
        assert forward_path(cached).name == f"{wanted}, widened"


# -- every row against the reference ------------------------------------------------------------


@pytest.mark.parametrize("dv", [20, 33, 7])
@pytest.mark.parametrize("has_extras", [False, True])
@pytest.mark.parametrize("n_queries", COUNTS)
@pytest.mark.parametrize("path", FORWARD, ids=lambda path: path.name)
def test_forward_is_the_reference(path, n_queries, has_extras, dv, rng):
    a = case(rng, n_queries, has_extras, dv)
    mixed = replace(a, k=a.k.astype(np.float16)), replace(a, v=a.v.astype(np.float16))
    how = ("bf16", True) if path.name in PAIRS else ("f32", False)
    taken = [(b, problem_of(b, has_extras, *how)) for b in (a, in_float16(a), *mixed)]
    taken = [(b, problem) for b, problem in taken if path.takes(problem)]
    for b, problem in taken:
        run_exactly(path, problem, b)
        wanted = reference(FLASH_ATTN_EXT, b, has_extras)
        if path.name in PAIRS:
            np.testing.assert_allclose(b.o, wanted, atol=0.02 * np.abs(wanted).max())
        else:
            np.testing.assert_allclose(b.o, wanted, rtol=1e-5, atol=1e-5)
    if not taken:
        assert forward_path(problem_of(a, has_extras)) is not path


@pytest.mark.parametrize("dv", [20, 33, 7])
@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize("has_extras", [False, True])
@pytest.mark.parametrize("n_queries", COUNTS)
@pytest.mark.parametrize("path", BACKWARD, ids=lambda path: path.name)
def test_backward_is_the_reference(path, n_queries, has_extras, compute, dv, rng):
    a = case(rng, n_queries, has_extras, dv)
    problem = problem_of(a, has_extras, compute)
    if not path.takes(problem):
        assert backward_path(problem) is not path
        return
    exact = replace(problem, compute="f32")  # o and lse that do not blur what is compared
    run_exactly(forward_path(exact), exact, a)
    b = backward_arrays(rng, a, a.o, a.lse)
    run_exactly(path, problem, b)
    wanted = reference(FLASH_ATTN_BACK, a, has_extras, b.o, b.lse, b.do)
    rounded = path.name == "amx" or (rounds(compute) and path.name == "flash")
    atol = (0.02 if rounded else 1e-5) * max(np.abs(wanted).max(), 1)
    np.testing.assert_allclose(b.dq, wanted, atol=atol)
    assert np.isfinite(b.dk).all() and np.isfinite(b.dv).all()


@pytest.mark.parametrize("dv", [20, 33, 7])
def test_paths_agree_on_the_gradients_of_keys_and_values(dv, rng):
    """dk and dv of each path that takes the problem, against those of the last."""
    a = case(rng, 150, has_extras=False, dv=dv)
    problem = problem_of(a)
    run_exactly(forward_path(problem), problem, a)
    b = backward_arrays(rng, a, a.o, a.lse)
    found = []
    for path in (p for p in BACKWARD if p.takes(problem)):
        run_exactly(path, problem, b)
        found.append((b.dk.copy(), b.dv.copy()))
    for pair in found[:-1]:
        for one, other in zip(pair, found[-1], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_too_little_scratch_is_seen(rng):
    """That run_exactly would notice: no path needs less than it says."""
    a = case(rng, 150, has_extras=True)
    path, problem = FORWARD[-2], problem_of(a, has_extras=True)
    memory = np.zeros(path.n_bytes(problem) - 64, np.uint8)
    with pytest.raises(TypeError, match="too small"):
        path.call(problem, a, memory)
