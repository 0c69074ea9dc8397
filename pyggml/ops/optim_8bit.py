"""AdamW whose moments are kept in 8 bits, by blocks of 256 numbers (Dettmers et al. 2022,
arXiv:2110.02861), as bitsandbytes computes it on a CPU.

A moment's block is a float32, its largest magnitude, and a code of one byte for each number: one of
256 values from -1 to 1 (of the second moment, from 0 to 1) times that magnitude. The values are
those of dynamic quantisation: of seven powers of ten, 1 down to 1e-6, each has half as many as the
one above it, evenly spaced. Each step widens both moments, goes on as opt_step_adamw does, and
packs them again.

A number is packed to the nearest of 65,536 even places from -1 to 1, none of which is 0, and then
to the value nearest to that place. So no second moment becomes 0, over whose root a first moment
would move its number by far more than the learning rate.
"""

from collections.abc import Iterator

import numpy as np

from pyggml.formulas.formula import formula
from pyggml.graph.call import Call
from pyggml.graph.dtypes import I8
from pyggml.graph.op import Memory, NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import exact, kernel, parallel, prange
from pyggml.kernels.formulas import inline_formula
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.expect import expect, expect_gapless, expect_type
from pyggml.ops.formulas import moments, move_parameter
from pyggml.ops.optim import OPT_STEP_ADAMW, adamw_settings

BLOCK = 256  # numbers that share a magnitude
SCALES = 4  # the place of the magnitudes among the op's sources
_POWERS = 7
_PLACES = 65536
HALF = np.float32((_PLACES - 1) / 2)  # places from 0 to 1
TINY = np.float32(1.2e-38)  # the least magnitude that numbers are divided by
_ONE = np.float32(1)


def opt_step_adamw_8bit(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, scales: Tensor, settings: Tensor
) -> Tensor:
    """The parameter p after one step, in p's own memory; m, v and scales are updated in place too.

    p, g F32 of one shape; m, v I8 of this shape, the codes of the moments; scales (2, n) F32, the
    magnitudes of their n blocks, from 0; settings (7,) F32, those of opt_step_adamw. All but g and
    settings without gaps.
    """
    for what, t in zip(("p", "m", "v", "scales"), (p, m, v, scales), strict=True):
        expect_gapless("opt_step_adamw_8bit", what, t)
    return OPT_STEP_ADAMW_8BIT(p, g, m, v, scales, settings)


def n_blocks(n: int) -> int:
    """Blocks of n numbers."""
    return -(-n // BLOCK)


# -- the values of codes ------------------------------------------------------------------------


def _magnitudes(n_lowest: int) -> np.ndarray:
    """0, the values of every power of ten, and 1; n_lowest: how many 1e-6 has."""
    values = [np.zeros(1)]
    for i in range(_POWERS):
        edges = np.linspace(0.1, 1, n_lowest * 2**i + 1)
        values.append(10.0 ** (i + 1 - _POWERS) * (edges[:-1] + edges[1:]) / 2)
    return np.concatenate([*values, np.ones(1)])


def _codes(values: np.ndarray) -> np.ndarray:
    """(65536,) the code of the value nearest to each place."""
    places = np.float32(-1) + np.float32(2) * np.arange(_PLACES, dtype=np.float32) / (_PLACES - 1)
    return np.searchsorted((values[:-1] + values[1:]) / 2, places).astype(np.uint8).view(np.int8)


_SIGNED, _UNSIGNED = _magnitudes(1), _magnitudes(2)
# By code: 0 to 254 are -127 to 127, 255 is 1, which no negative number has.
M_VALUES = np.concatenate([-_SIGNED[-2:0:-1], _SIGNED]).astype(np.float32)
V_VALUES = _UNSIGNED.astype(np.float32)
M_CODES, V_CODES = _codes(M_VALUES), _codes(V_VALUES)  # of each place


@kernel
def _place(x):
    """Of a share of the magnitude, -1 to 1; 0 of what is no number."""
    at = (x + _ONE) * HALF + np.float32(0.5)
    return np.int64(at) if at > 0 else 0


# -- the step -----------------------------------------------------------------------------------


# Reordered, g² would be taken from itself.
_new_moments = inline_formula(formula(moments), exact)
_move_parameter = inline_formula(formula(move_parameter))


@exact
def _moments(g, m, v, of_m, of_v, beta1, beta2):
    """Both moments of one number, with its gradient."""
    first, second = M_VALUES[np.uint8(m)] * of_m, V_VALUES[np.uint8(v)] * of_v
    return _new_moments(g, first, second, beta1, beta2)


@kernel
def _block_step(p, g, m, v, of_m, of_v, settings):
    """A block, of magnitudes of_m and of_v; its new ones. The moments are computed twice: once to
    learn these."""
    alpha, beta1, beta2, eps, decay, beta1h, beta2h = settings
    m_most, v_most = np.float32(0), np.float32(0)
    for j in range(p.size):
        first, second = _moments(g[j], m[j], v[j], of_m, of_v, beta1, beta2)
        m_most, v_most = max(m_most, abs(first)), max(v_most, second)
    m_whole, v_whole = max(m_most, TINY), max(v_most, TINY)
    for j in range(p.size):
        first, second = _moments(g[j], m[j], v[j], of_m, of_v, beta1, beta2)
        p[j] = _move_parameter(p[j], first, second, alpha, eps, decay, beta1h, beta2h)
        m[j], v[j] = M_CODES[_place(first / m_whole)], V_CODES[_place(second / v_whole)]
    return m_most, v_most


@parallel
def _adamw_8bit(p, g, m, v, of_m, of_v, settings):
    """of_m, of_v: the magnitudes of the blocks."""
    s = settings
    scalars = (s[0], s[1], s[2], s[3], s[4], s[5], s[6])
    for b in prange(of_m.size):
        i, j = b * BLOCK, min((b + 1) * BLOCK, p.size)
        of_m[b], of_v[b] = _block_step(p[i:j], g[i:j], m[i:j], v[i:j], of_m[b], of_v[b], scalars)


def _run(site: Site) -> Call:
    _, g, m, v, scales, settings = site.src
    return Call(
        _adamw_8bit, site.out.reshape(-1), g.reshape(-1), m.reshape(-1), v.reshape(-1), *scales,
        settings,
    )  # fmt: skip


def _spec(p: Tensor, g: Tensor, m: Tensor, v: Tensor, scales: Tensor, settings: Tensor) -> Spec:
    name = "opt_step_adamw_8bit"
    expect_type(name, "p", p)
    expect(name, "g", g, p.shape)
    for what, t in zip("mv", (m, v), strict=True):
        expect(name, what, t, p.shape, I8)
    expect(name, "scales", scales, (2, n_blocks(p.n_elements)))
    expect(name, "settings", settings, (7,))
    return Spec(p.shape)


def _ref(
    p: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    scales: np.ndarray,
    settings: np.ndarray,
) -> np.ndarray:
    wide = [
        widen_moment(codes, of_block, values)
        for codes, of_block, values in zip((m, v), scales, (M_VALUES, V_VALUES), strict=True)
    ]
    return OPT_STEP_ADAMW.ref(p, g, *wide, settings)


def widen_moment(codes: np.ndarray, scales: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The numbers of a moment in float64. values: M_VALUES or V_VALUES."""
    of_each = np.repeat(scales.astype(np.float64), BLOCK)[: codes.size].reshape(codes.shape)
    return np.asarray(values.astype(np.float64)[codes.astype(np.uint8)] * of_each)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, n_step in [((1,), 1), ((5, 33), 1), ((3, 700), 20)]:
        p, g = rng.standard_normal((2, *shape))
        m, v = rng.integers(-128, 128, (2, *shape), np.int8)
        scales = rng.uniform(0.1, 1, (2, n_blocks(p.size)))
        settings = adamw_settings(0.1, (0.9, 0.99), 1e-3, 0.2, n_step)
        yield Sample((p, g, m, v, scales, np.array(settings)))


OPT_STEP_ADAMW_8BIT = op(
    name="opt_step_adamw_8bit",
    spec=_spec,
    ref=_ref,
    grad=NoGrad("an optimiser step is not part of the loss"),
    samples=_samples,
    memory=Memory.ALIAS,
    changes=(2, 3, 4),
)
cpu_kernel(OPT_STEP_ADAMW_8BIT, _run)
