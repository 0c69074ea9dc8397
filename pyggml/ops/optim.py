"""One step of an optimiser on one parameter, in place, as ggml's OPT_STEP ops take it. Before it,
the gradient's norm can be limited.

clip_norm        n = ‖g‖,  g = g·min(1, limit / n)
opt_step_adamw   m = β1·m + (1 − β1)·g,  v = β2·v + (1 − β2)·g²
                 p = p·(1 − α·wd) − α·(m·β1h) / (√(v·β2h) + ε)      (Loshchilov, Hutter 2019)
opt_step_lion    p = p·(1 − α·wd) − α·sign(β1·m + (1 − β1)·g),  m = β2·m + (1 − β2)·g
                                                                        (Chen et al. 2023)
opt_step_sgd     p = p·(1 − α·wd) − α·g

The settings are data, not parameters of the node, so that one plan serves every step. AdamW takes
[α, β1, β2, ε, wd, β1h, β2h], with β1h = 1/(1 − β1ⁿ) and β2h = 1/(1 − β2ⁿ) at step n; Lion takes
[α, β1, β2, wd], SGD [α, wd].
"""

from collections.abc import Iterator
from math import isfinite, prod, sqrt

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NO_SETTINGS, Memory, NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel, parallel, prange
from pyggml.jit.tasks import SHARE
from pyggml.kernels.kernel import Site, cpu_kernel, flat
from pyggml.ops.expect import NONE_FROM_ZERO, expect, expect_gapless, expect_number, expect_type

_NO_LOSS = NoGrad("an optimiser step is not part of the loss")
_ONE = np.float32(1)


def clip_norm(g: Tensor, limit: float) -> Tensor:
    """The Euclidean norm of g, F32 (1,). A longer g is scaled to the norm `limit`, in place.

    With limit 0, or a norm that is not finite, g stays as it is. g is F32 without gaps.
    """
    expect_gapless("clip_norm", "g", g)
    return CLIP_NORM(g, limit=float(limit))


def opt_step_adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, settings: Tensor) -> Tensor:
    """The parameter p after one step, in p's own memory; m and v are updated in place too.

    p, g, m, v F32 of one shape, without gaps; settings (7,) F32 as above.
    """
    for what, t in zip("pmv", (p, m, v), strict=True):
        expect_gapless("opt_step_adamw", what, t)
    return OPT_STEP_ADAMW(p, g, m, v, settings)


def opt_step_lion(p: Tensor, g: Tensor, m: Tensor, settings: Tensor) -> Tensor:
    """The parameter p after one step, in p's own memory; m is updated in place too.

    p, g, m F32 of one shape, without gaps; settings (4,) F32 as above.
    """
    for what, t in zip("pm", (p, m), strict=True):
        expect_gapless("opt_step_lion", what, t)
    return OPT_STEP_LION(p, g, m, settings)


def opt_step_sgd(p: Tensor, g: Tensor, settings: Tensor) -> Tensor:
    """The parameter p after one step, in p's own memory.

    p, g F32 of one shape, p without gaps; settings (2,) F32 as above.
    """
    expect_gapless("opt_step_sgd", "p", p)
    return OPT_STEP_SGD(p, g, settings)


def adamw_settings(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, n: int
) -> tuple[float, ...]:
    """What AdamW's step n reads; steps count from 1."""
    hats = (1 / (1 - beta**n) for beta in betas)
    return lr, *betas, eps, weight_decay, *hats


def adamw_moments(
    g: np.ndarray, m: np.ndarray, v: np.ndarray, beta1: float, beta2: float
) -> tuple[np.ndarray, np.ndarray]:
    """m and v after one step."""
    return m * beta1 + g * (1 - beta1), v * beta2 + g * g * (1 - beta2)


# -- clip_norm ----------------------------------------------------------------------------------


def _clip_spec(g: Tensor, limit: float) -> Spec:
    expect_type("clip_norm", "g", g)
    expect_number("clip_norm", "limit", limit)
    return Spec((1,))


@parallel
def _clip_pieces(sums, g, factor):
    """sums[i] = Σ g² over piece i, in float64, or, with a factor, g *= factor: in one kernel, which
    compiles in half the time of two."""
    for i in prange(sums.size):
        piece, total = g[i * SHARE : (i + 1) * SHARE], np.float64(0)
        if factor > 0:
            for j in range(piece.size):
                piece[j] *= factor
        else:
            for j in range(piece.size):
                total += np.float64(piece[j]) * np.float64(piece[j])
            sums[i] = total


def _clip(out: np.ndarray, g: np.ndarray, sums: np.ndarray, limit: float) -> None:
    """The pieces have a fixed length: the norm is the same at any number of threads."""
    _clip_pieces(sums, g, np.float32(0))
    norm = sqrt(float(sums.sum()))
    out[0] = norm
    if limit and isfinite(norm) and norm > limit:
        _clip_pieces(sums, g, np.float32(limit / norm))


def _n_pieces(node: Tensor) -> int:
    return -(-prod(node.src[0].shape) // SHARE)


def _run_clip(site: Site) -> Call:
    sums = site.scratch.view(np.float64)[: _n_pieces(site.node)]
    return Call(_clip, site.out, site.src[0].reshape(-1), sums, site.node.params["limit"])


def _clip_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, limit in [((1,), 0.0), ((5, 33), 0.5), ((70000,), 1e9)]:
        yield Sample((rng.standard_normal(shape),), {"limit": limit})


CLIP_NORM = op(
    name="clip_norm",
    ggml=GGMLOp.CUSTOM,
    spec=_clip_spec,
    ref=lambda g, limit: np.array([np.linalg.norm(g)]),
    grad=_NO_LOSS,
    samples=_clip_samples,
    refuses={"limit": NONE_FROM_ZERO},
    memory=Memory.FRESH,
    changes=(0,),
)
cpu_kernel(CLIP_NORM, _run_clip, scratch=lambda node, compute: 8 * _n_pieces(node))

# -- opt_step_adamw -----------------------------------------------------------------------------


def _adamw_spec(p: Tensor, g: Tensor, m: Tensor, v: Tensor, settings: Tensor) -> Spec:
    expect_type("opt_step_adamw", "p", p)
    for what, t in zip("gmv", (g, m, v), strict=True):
        expect("opt_step_adamw", what, t, p.shape)
    expect("opt_step_adamw", "settings", settings, (7,))
    return Spec(p.shape)


@kernel
def _adamw_strip(p, g, m, v, settings):
    alpha, beta1, beta2, eps, decay, beta1h, beta2h = settings
    keep = _ONE - alpha * decay
    for j in range(p.size):
        m[j] = m[j] * beta1 + g[j] * (_ONE - beta1)
        v[j] = v[j] * beta2 + g[j] * g[j] * (_ONE - beta2)
        p[j] = p[j] * keep - alpha * (m[j] * beta1h) / (np.sqrt(v[j] * beta2h) + eps)


@parallel
def _adamw(out, p, g, m, v, settings):
    s = settings
    scalars = (s[0], s[1], s[2], s[3], s[4], s[5], s[6])
    for c in prange((p.size + SHARE - 1) // SHARE):
        a, b = c * SHARE, min((c + 1) * SHARE, p.size)
        _adamw_strip(out[a:b], g[a:b], m[a:b], v[a:b], scalars)


def _adamw_ref(
    p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, settings: np.ndarray
) -> np.ndarray:
    alpha, beta1, beta2, eps, decay, beta1h, beta2h = settings
    m, v = adamw_moments(g, m, v, beta1, beta2)
    return np.asarray(p * (1 - alpha * decay) - alpha * m * beta1h / (np.sqrt(v * beta2h) + eps))


def _adamw_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, n_step in [((1,), 1), ((5, 33), 1), ((3, 1700), 20)]:
        p, g, m = rng.standard_normal((3, *shape))
        v = rng.uniform(0.1, 1, shape)
        settings = adamw_settings(0.1, (0.9, 0.99), 1e-3, 0.2, n_step)
        yield Sample((p, g, m, v, np.array(settings)))


OPT_STEP_ADAMW = op(
    name="opt_step_adamw",
    ggml=GGMLOp.OPT_STEP_ADAMW,
    spec=_adamw_spec,
    ref=_adamw_ref,
    grad=_NO_LOSS,
    samples=_adamw_samples,
    refuses=NO_SETTINGS,
    memory=Memory.ALIAS,
    changes=(2, 3),
)
cpu_kernel(OPT_STEP_ADAMW, flat(_adamw))

# -- opt_step_lion ------------------------------------------------------------------------------


def _lion_spec(p: Tensor, g: Tensor, m: Tensor, settings: Tensor) -> Spec:
    expect_type("opt_step_lion", "p", p)
    for what, t in zip("gm", (g, m), strict=True):
        expect("opt_step_lion", what, t, p.shape)
    expect("opt_step_lion", "settings", settings, (4,))
    return Spec(p.shape)


@kernel
def _lion(out, p, g, m, settings):
    """out and p are the same memory."""
    alpha, beta1, beta2, decay = settings[0], settings[1], settings[2], settings[3]
    keep = _ONE - alpha * decay
    for j in range(out.size):
        direction = np.sign(m[j] * beta1 + g[j] * (_ONE - beta1))
        out[j] = out[j] * keep - alpha * direction
        m[j] = m[j] * beta2 + g[j] * (_ONE - beta2)


def _lion_ref(p: np.ndarray, g: np.ndarray, m: np.ndarray, settings: np.ndarray) -> np.ndarray:
    alpha, beta1, _, decay = settings
    return np.asarray(p * (1 - alpha * decay) - alpha * np.sign(m * beta1 + g * (1 - beta1)))


def _lion_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1,), (5, 33), (3, 1700)]:
        p, g, m = rng.standard_normal((3, *shape))
        yield Sample((p, g, m, np.array([0.1, 0.9, 0.99, 0.2])))


OPT_STEP_LION = op(
    name="opt_step_lion",
    ggml=GGMLOp.CUSTOM,
    spec=_lion_spec,
    ref=_lion_ref,
    grad=_NO_LOSS,
    samples=_lion_samples,
    refuses=NO_SETTINGS,
    memory=Memory.ALIAS,
    changes=(2,),
)
cpu_kernel(OPT_STEP_LION, flat(_lion))

# -- opt_step_sgd -------------------------------------------------------------------------------


def _sgd_spec(p: Tensor, g: Tensor, settings: Tensor) -> Spec:
    expect_type("opt_step_sgd", "p", p)
    expect("opt_step_sgd", "g", g, p.shape)
    expect("opt_step_sgd", "settings", settings, (2,))
    return Spec(p.shape)


@kernel
def _sgd(out, p, g, settings):
    """out and p are the same memory."""
    keep = _ONE - settings[0] * settings[1]
    rate = settings[0]
    for j in range(out.size):
        out[j] = out[j] * keep - rate * g[j]


def _sgd_ref(p: np.ndarray, g: np.ndarray, settings: np.ndarray) -> np.ndarray:
    return np.asarray(p * (1 - settings[0] * settings[1]) - settings[0] * g)


def _sgd_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1,), (5, 33)]:
        p, g = rng.standard_normal((2, *shape))
        yield Sample((p, g, np.array([0.1, 0.2])))


OPT_STEP_SGD = op(
    name="opt_step_sgd",
    ggml=GGMLOp.OPT_STEP_SGD,
    spec=_sgd_spec,
    ref=_sgd_ref,
    grad=_NO_LOSS,
    samples=_sgd_samples,
    refuses=NO_SETTINGS,
    memory=Memory.ALIAS,
)
cpu_kernel(OPT_STEP_SGD, flat(_sgd))
