"""Several sequences in one cache: each is attended to as it would be alone."""

from dataclasses import replace

import numpy as np
import pytest

from pyggml.kernels.attention import FORWARD, by_sequence, forward_path
from pyggml.kernels.attention.by_sequence import MOST_TOGETHER
from pyggml.kernels.gemm import CHOSEN

from attending import arrays, in_float16, problem_of, run_exactly

N_CTX, N_SLOTS = 90, 5
PATH = next(path for path in FORWARD if path.name == "by sequence")


def span_of(slot, first, n, window=0):
    """The spans of n tokens of a slot, of which `first` came before."""
    start, ends = slot * N_CTX, slot * N_CTX + first + 1 + np.arange(n)
    starts = np.maximum(start, ends - window) if window else np.full(n, start)
    return np.stack([starts, ends], axis=1)


def check(rng, pieces, heads=(4, 2), **extras):
    """pieces: (slot, tokens before, tokens, window) of each, in one call and alone."""
    spans = [span_of(*piece) for piece in pieces]
    span = np.concatenate([*spans, [(7, 7)] * 3])  # three that fill the pass up
    a = arrays(rng, len(span), N_CTX * N_SLOTS + 15, span, heads, 40, **extras)
    for b in (a, in_float16(a)):
        problem = replace(problem_of(b, bool(extras)), longest=N_CTX)
        run_exactly(forward_path(problem), problem, b)
        at = 0
        for (slot, *_), own in zip(pieces, spans, strict=True):
            rows, keys = slice(at, at + len(own)), slice(slot * N_CTX, (slot + 1) * N_CTX)
            at += len(own)
            alone = replace(
                b, q=b.q[rows], k=b.k[keys], v=b.v[keys], o=np.full_like(b.o[rows], np.nan),
                lse=np.full((heads[0], len(own)), np.nan, np.float32),
                span=(own - slot * N_CTX).astype(np.int32),
            )  # fmt: skip
            problem = problem_of(alone, bool(extras))
            run_exactly(forward_path(problem), problem, alone)
            np.testing.assert_array_equal(b.o[rows], alone.o)
            np.testing.assert_array_equal(b.lse[:, rows], alone.lse)
        assert not b.o[at:].any()


EXTRAS = {"cap": np.float32(2), "sinks": np.array([0.5, -1, 2, 0], np.float32)}


@pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["plain", "extras"])
@pytest.mark.parametrize(
    "pieces",
    [
        [(slot, 10 * slot, 1) for slot in range(N_SLOTS)],
        [(0, 3, 1), (1, 0, 60), (2, 80, 1), (4, 30, 2)],
        [(0, 30, 60), (1, 0, 30)],  # the next sequence begins where a full one ends
        [(1, 0, 40), (4, 40, 1, 7), (2, 0, 50, 7), (3, 89, 1)],
        [(i % 5, 20 + i, 1) for i in range(MOST_TOGETHER + 3)],
        [(1, 0, 40)],  # one sequence, behind the first keys
    ],
)
def test_as_each_alone(pieces, extras, rng):
    check(rng, pieces, **extras)


@pytest.mark.skipif(not CHOSEN.compiled, reason="Python runs every path")
@pytest.mark.parametrize("piece", [(0, 0, 40), (0, 25, 61), (0, 0, 40, 7)])
def test_one_sequence_from_the_first_key_on_needs_no_python(piece, rng, monkeypatch):
    monkeypatch.setattr(by_sequence._BoundSequences, "run", lambda *_: pytest.fail("Python runs"))
    check(rng, [piece])


def test_scratch_does_not_grow_with_the_cache(rng):
    a = arrays(rng, 64, 100, span_of(0, 0, 64))
    problem = replace(problem_of(in_float16(a)), longest=100)
    few, many = (replace(problem, n_keys=n) for n in (1000, 100000))
    assert PATH.takes(few)
    assert PATH.n_bytes(few) == PATH.n_bytes(many)
