"""The cosines and sines of rotary positions (Su et al. 2021) with YaRN (Peng et al. 2023).

    θ     = position · base^(−2e/n_dims) / freq_factor[i]  for pair i;  e = i
    angle = θ · (s·(1 − mix) + mix),  s = freq_scale
    mix   = ext_factor · (1 − clip((i − low) / max(0.001, high − low), 0, 1))
    the table holds m·cos(angle) and m·sin(angle)

low and high are the pairs that turn beta_fast and beta_slow times within n_ctx_orig tokens.
m is attn_factor, multiplied by 1 + 0.1·ln(1/s) if ext_factor is not 0.

A token of an image has four positions: time, height, width and one more. `sections` holds how many
pairs use each of them. Modes "mrope" and "vision" take the sections one after the other, and begin
again after the fourth. Mode "imrope" takes them in turns: pair 3j uses time, 3j + 1 height,
3j + 2 width, until a section is used up. In mode "vision" e counts from the start of the section,
and there are n_dims pairs; in the others, n_dims/2.
"""

from collections.abc import Iterator
from math import pi
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import I32
from pyggml.graph.op import NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import JIT, kernel
from pyggml.jit.tasks import code_for, launch, tuple_stage
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.attention.positions import (
    FOUR_POSITIONS,
    ONE_POSITION,
    Sections,
    n_pairs,
    rotations,
)
from pyggml.ops.expect import NONE_ABOVE_ZERO, expect_above_zero, expect_axes, expect_type


def rope_table(
    positions: Tensor,
    freq_factors: Tensor | None = None,
    *,
    n_dims: int,
    mode: str = "neox",
    sections: Sections = (),
    freq_base: float = 10000.0,
    freq_scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    n_ctx_orig: int = 0,
) -> Tensor:
    """(n_tokens, 2, n_pairs) F32: for each position a row of cosines and a row of sines.

    positions (n_tokens,) I32, or (4, n_tokens) in modes "mrope", "imrope" and "vision", which need
    four `sections`; freq_factors (at least n_pairs,) F32.

    Raises ShapeError for an odd n_dims, a mode that is unknown or lacks sections, a freq_base or
    freq_scale that is not above 0, and an ext_factor other than 0 if a beta, n_ctx_orig or
    freq_base does not allow YaRN. With an ext_factor of 0 the betas are not read.
    """
    return ROPE_TABLE(
        *(t for t in (positions, freq_factors) if t is not None),
        n_dims=n_dims,
        mode=mode,
        sections=tuple(sections),
        freq_base=freq_base,
        freq_scale=freq_scale,
        ext_factor=ext_factor,
        attn_factor=attn_factor,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        n_ctx_orig=n_ctx_orig,
    )


def check_mode(mode: str) -> None:
    """ShapeError unless the mode is one of ggml's."""
    modes = (*ONE_POSITION, *FOUR_POSITIONS)
    if mode not in modes:
        raise ShapeError(f"rope: mode is {mode!r}, wanted one of {', '.join(modes)}")


_REFUSES = {
    "n_dims": (0, -2, 7),
    "mode": ("sideways",),
    "sections": ((-1, 1, 1, 1), (0, 0, 0, 1), (1, 1)),
    "ext_factor": (),
    "attn_factor": (),
    "n_ctx_orig": (0, -1),
    **dict.fromkeys(("freq_base", "freq_scale", "beta_fast", "beta_slow"), NONE_ABOVE_ZERO),
}


def _spec(
    positions: Tensor,
    *factors: Tensor,
    n_dims: int,
    mode: str,
    sections: Sections,
    ext_factor: float,
    n_ctx_orig: int,
    attn_factor: float,
    **frequencies: float,
) -> Spec:
    check_mode(mode)
    expect_type("rope_table", "positions", positions, I32)
    several = mode in FOUR_POSITIONS
    expect_axes("rope_table", "positions", positions, 2 if several else 1)
    if several and positions.shape[0] != 4:
        raise ShapeError(f"rope_table: positions is {positions!r}, wanted 4 rows for {mode!r}")
    if several and (len(sections) != 4 or min(sections) < 0 or not any(sections[:3])):
        raise ShapeError(f"rope_table: sections {sections}, wanted 4 numbers from 0 on, one above")
    if n_dims <= 0 or n_dims % 2:
        raise ShapeError(f"rope_table: n_dims is {n_dims}, wanted an even number above 0")
    pairs = n_pairs(mode, n_dims)
    for f in factors:
        expect_type("rope_table", "freq_factors", f)
        expect_axes("rope_table", "freq_factors", f, 1)
        if f.shape[0] < pairs:
            raise ShapeError(f"rope_table: freq_factors is {f!r}, wanted {pairs} or more")
    _check_settings(ext_factor, n_ctx_orig, **frequencies)
    return Spec((positions.shape[-1], 2, pairs))


def _check_settings(ext_factor: float, n_ctx_orig: int, **frequencies: float) -> None:
    """ShapeError unless base and scale are above 0, and YaRN, if asked for, is possible."""
    for what, value in frequencies.items():
        if ext_factor or not what.startswith("beta_"):
            expect_above_zero("rope_table", what, value)
    if ext_factor and (n_ctx_orig <= 0 or frequencies["freq_base"] <= 1):
        raise ShapeError(
            "rope_table: YaRN needs n_ctx_orig > 0 and freq_base > 1, found "
            f"{n_ctx_orig} and {frequencies['freq_base']}"
        )


@kernel
def _rope_table(table, positions, axes, radians, factors, m):
    for t in range(table.shape[0]):
        for i in range(table.shape[2]):
            angle = positions[axes[i], t] * radians[i] / factors[i]
            table[t, 0, i] = m * np.cos(angle)
            table[t, 1, i] = m * np.sin(angle)


_TOKENS = 16  # of a task


def _table_task(arguments, task, thread):
    table, positions, axes, radians, factors, m = arguments[0]
    first = task * _TOKENS
    last = min(first + _TOKENS, table.shape[0])
    _rope_table(table[first:last], positions[:, first:last], axes, radians, factors, m)


def _run(site: Site) -> Call:
    p = site.node.params
    axes, radians, m = rotations(**p)
    ones = np.ones(radians.shape, np.float32)
    factors = site.src[1] if len(site.src) > 1 else ones
    positions = site.src[0].reshape(-1, site.out.shape[0])
    values = site.out, positions, axes, radians, factors, float(m)
    if not JIT:
        return Call(_rope_table, *values)
    return Call(
        launch, tuple_stage(code_for(_table_task, values), values, -(-len(site.out) // _TOKENS))
    )


def _sector_ref(i: int, mode: str, sections: Sections) -> tuple[int, int]:
    """Which position pair i uses, and its number inside the section, by counting."""
    number = i % sum(sections)
    if mode == "imrope":
        turn = number % 3
        return (turn if number < 3 * sections[turn] else 3), i
    axis = 0
    while axis < 3 and number >= sections[axis]:
        number -= sections[axis]
        axis += 1
    return axis, number


def _ref(positions: np.ndarray, *factors: np.ndarray, **params: Any) -> np.ndarray:
    """Pair by pair, in the order of ggml's rope_yarn."""
    n_dims, s, ext, mode = (
        params["n_dims"],
        params["freq_scale"],
        params["ext_factor"],
        params["mode"],
    )
    pairs = []
    for i in range(n_pairs(mode, n_dims)):
        axis, e = (0, i) if mode in ONE_POSITION else _sector_ref(i, mode, params["sections"])
        position = positions.reshape(-1, positions.shape[-1])[axis]
        e = e if mode == "vision" else i
        extrapolated = position * params["freq_base"] ** (-2 * e / n_dims)
        if factors:
            extrapolated = extrapolated / factors[0][i]
        theta, m = s * extrapolated, params["attn_factor"]
        if ext != 0:
            low, high = (
                n_dims
                * np.log(params["n_ctx_orig"] / (turns * 2 * pi))
                / (2 * np.log(params["freq_base"]))
                for turns in (params["beta_fast"], params["beta_slow"])
            )
            low, high = max(0, np.floor(low)), min(n_dims - 1, np.ceil(high))
            mix = ext * (1 - min(1, max(0, (i - low) / max(0.001, high - low))))
            theta = theta * (1 - mix) + extrapolated * mix
            m *= 1 + 0.1 * np.log(1 / s)
        pairs.append([m * np.cos(theta), m * np.sin(theta)])
    return np.array(pairs).transpose(2, 1, 0)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    plain: dict[str, Any] = {
        "n_dims": 8,
        "mode": "neox",
        "sections": (),
        "freq_base": 10000.0,
        "freq_scale": 1.0,
        "ext_factor": 0.0,
        "attn_factor": 1.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "n_ctx_orig": 0,
    }
    positions = np.array([0, 1, 2, 3, 900], np.int32)
    yield Sample((positions,), plain)
    yield Sample((positions, rng.uniform(1, 8, 5)), {**plain, "freq_scale": 0.125})
    yarn = {"n_dims": 64, "freq_scale": 0.25, "ext_factor": 1.0, "n_ctx_orig": 4096}
    many = np.arange(0, 30 * _TOKENS, 13, dtype=np.int32)
    yield Sample((many,), {**plain, **yarn, "attn_factor": 0.8})
    positions = rng.integers(0, 99, (4, 3), np.int32)
    for mode, sections in (
        *(("mrope", (3, 2, 4, 1)), ("mrope", (2, 0, 1, 0)), ("imrope", (4, 3, 3, 0))),
        *(("imrope", (3, 1, 2, 2)), ("vision", (5, 5, 0, 0)), ("vision", (5, 5, 5, 5))),
    ):
        yield Sample((positions,), {**plain, "mode": mode, "sections": sections, "n_dims": 20})
    several = {"mode": "mrope", "sections": (12, 10, 10, 0)}
    yield Sample((positions, rng.uniform(1, 8, 32)), {**plain, **yarn, **several})


ROPE_TABLE = op(
    name="rope_table",
    spec=_spec,
    ref=_ref,
    grad=NoGrad("positions and frequencies are constants"),
    samples=_samples,
    refuses=_REFUSES,
)
cpu_kernel(ROPE_TABLE, _run)
