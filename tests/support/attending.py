"""Attention straight through its paths, in memory that shows a byte written past its end."""

from dataclasses import replace

import numpy as np

from pyggml.graph.dtypes import F16, F32
from pyggml.kernels.attention import AttentionProblem, Backward, Forward

GUARD = 64  # bytes before and behind the scratch


def arrays(rng, n_queries, n_keys, span, heads=(6, 2), d=40, dv=None, **extras):
    """The arrays of a forward pass, its results NaN; no extras but these. dv: of values, else d."""
    (n_heads, n_key_heads), dv = heads, dv or d
    shapes = (n_queries, n_heads, d), (n_keys, n_key_heads, d), (n_keys, n_key_heads, dv)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    absent = {
        "cap": np.float32(0),
        "mask": np.zeros((1, 1, 0), np.float32),
        "sinks": np.full(n_heads, -np.inf, np.float32),
        "slopes": np.zeros(n_heads, np.float32),
    }
    return Forward(
        q=q,
        k=k,
        v=v,
        span=np.array(span, np.int32),
        scale=np.float32(0.4),
        **{**absent, **extras},
        o=np.full((n_queries, n_heads, dv), np.nan, np.float32),
        lse=np.full((n_heads, n_queries), np.nan, np.float32),
    )


def in_float16(a):
    """The same with keys and values as a cache keeps them."""
    return replace(a, k=a.k.astype(np.float16), v=a.v.astype(np.float16))


def backward_arrays(rng, a, o, lse):
    """The arrays of the backward pass after a forward pass of `a` that gave o and lse."""
    fields = {name: getattr(a, name) for name in Forward.__dataclass_fields__}
    wanted = {name: np.full_like(x, np.nan) for name, x in (("dq", a.q), ("dk", a.k), ("dv", a.v))}
    do = rng.standard_normal(a.o.shape).astype(np.float32)
    dsinks = np.full_like(a.sinks, np.nan)
    return Backward(**{**fields, "o": o, "lse": lse}, do=do, dsinks=dsinks, **wanted)


def problem_of(a, has_extras=False, compute="f32", may_round=False):
    kinds = (F16 if x.dtype == np.float16 else F32 for x in (a.k, a.v))
    sizes = *a.q.shape[:2], *a.k.shape[:2], a.q.shape[2], a.o.shape[2]
    return AttentionProblem(*sizes, *kinds, has_extras, compute, may_round)


def run_exactly(path, problem, a):
    """Run a path in exactly the scratch that it asks for, which is NaN before."""
    n = path.n_bytes(problem)
    memory = np.full(n + 2 * GUARD + 64, 255, np.uint8)
    start = GUARD + -(memory.ctypes.data + GUARD) % 64
    path.call(problem, a, memory[start : start + n])()
    assert (memory[:start] == 255).all() and (memory[start + n :] == 255).all(), path.name
