"""One step of an optimiser on one parameter, in place, as ggml's OPT_STEP ops take it. Before it,
the gradient's norm can be limited.

clip_norm        n = ‖g‖,  g = g·min(1, limit / n)
clip_factor      n = ‖g‖ and f = min(1, limit / n); g stays
opt_step_adamw   m = β1·m + (1 − β1)·g,  v = β2·v + (1 − β2)·g²
                 p = p·(1 − α·wd) − α·(m·β1h) / (√(v·β2h) + ε)      (Loshchilov, Hutter 2019)
opt_step_lion    p = p·(1 − α·wd) − α·sign(β1·m + (1 − β1)·g),  m = β2·m + (1 − β2)·g
                                                                        (Chen et al. 2023)
opt_step_sgd     p = p·(1 − α·wd) − α·g
opt_step_NAME_clipped   the step by f·g, where f is one more setting, the last: a gradient that is
                        longer than memory is fast is neither written nor read once more for it
accumulate       Σ = Σ + g, or 0 + g where a sum begins: of the gradients before the step

The settings are data, not parameters of the node, so that one plan serves every step. AdamW takes
[α, β1, β2, ε, wd, β1h, β2h], with β1h = 1/(1 − β1ⁿ) and β2h = 1/(1 − β2ⁿ) at step n; Lion takes
[α, β1, β2, wd], SGD [α, wd], `accumulate` [1], or [0] where a sum begins. Their formulas are in
pyggml/ops/formulas.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import isfinite, prod, sqrt

import numpy as np

from pyggml.formulas.expression import rebuild, symbol
from pyggml.formulas.formula import Formula, formula
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, NoGrad, Op, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import parallel, prange
from pyggml.jit.tasks import SHARE
from pyggml.kernels.formulas import by_step
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops import formulas
from pyggml.ops.expect import NONE_FROM_ZERO, expect, expect_gapless, expect_number, expect_type

_NO_LOSS = NoGrad("an optimiser step is not part of the loss")


def clip_norm(g: Tensor, limit: float) -> Tensor:
    """The Euclidean norm of g, F32 (1,). A longer g is scaled to the norm `limit`, in place.

    With limit 0, or a norm that is not finite, g stays as it is. g is F32 without gaps.
    """
    expect_gapless("clip_norm", "g", g)
    return CLIP_NORM(g, limit=float(limit))


def clip_factor(g: Tensor, limit: float) -> Tensor:
    """The Euclidean norm of g and the factor that makes a longer g as long as `limit`, F32 (2,).

    The factor is 1 with limit 0, or a norm that is not finite. g is F32 without gaps.
    """
    expect_gapless("clip_factor", "g", g)
    return CLIP_FACTOR(g, limit=float(limit))


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


def accumulate(total: Tensor, g: Tensor, keeps: Tensor) -> Tensor:
    """total + g, in total's own memory; 0 + g where keeps is 0: total is not read then.

    total, g F32 of one shape, total without gaps; keeps (1,) F32, 0 or 1.
    """
    expect_gapless("accumulate", "total", total)
    return ACCUMULATE(total, g, keeps)


def adamw_settings(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, n: int
) -> tuple[float, ...]:
    """What AdamW's step n reads; steps count from 1."""
    hats = (1 / (1 - beta**n) for beta in betas)
    return lr, *betas, eps, weight_decay, *hats


# -- clip_norm ----------------------------------------------------------------------------------


def _clip_spec(name: str, n: int, g: Tensor, limit: float) -> Spec:
    expect_type(name, "g", g)
    expect_number(name, "limit", limit)
    return Spec((n,))


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


def _norm_and_factor(g: np.ndarray, sums: np.ndarray, limit: float) -> tuple[float, np.float32]:
    """The pieces have a fixed length: the norm is the same at any number of threads."""
    _clip_pieces(sums, g, np.float32(0))
    norm = sqrt(float(sums.sum()))
    is_longer = limit and isfinite(norm) and norm > limit
    return norm, np.float32(limit / norm if is_longer else 1)


def _clip(out: np.ndarray, g: np.ndarray, sums: np.ndarray, limit: float) -> None:
    out[0], factor = _norm_and_factor(g, sums, limit)
    if factor != 1:
        _clip_pieces(sums, g, factor)


def _clip_factor(out: np.ndarray, g: np.ndarray, sums: np.ndarray, limit: float) -> None:
    out[:] = _norm_and_factor(g, sums, limit)


def _n_pieces(node: Tensor) -> int:
    return -(-prod(node.src[0].shape) // SHARE)


def _run_clip(kernel: Callable[..., None], site: Site) -> Call:
    sums = site.scratch.view(np.float64)[: _n_pieces(site.node)]
    return Call(kernel, site.out, site.src[0].reshape(-1), sums, site.node.params["limit"])


def _factor_ref(g: np.ndarray, limit: float) -> np.ndarray:
    norm = np.linalg.norm(g)
    return np.array([norm, min(1, limit / norm) if limit else 1])


def _clip_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, limit in [((1,), 0.0), ((5, 33), 0.5), ((70000,), 1e9)]:
        yield Sample((rng.standard_normal(shape),), {"limit": limit})


CLIP_NORM = op(
    name="clip_norm",
    spec=partial(_clip_spec, "clip_norm", 1),
    ref=lambda g, limit: np.array([np.linalg.norm(g)]),
    grad=_NO_LOSS,
    samples=_clip_samples,
    refuses={"limit": NONE_FROM_ZERO},
    changes=(0,),
)
CLIP_FACTOR = op(
    name="clip_factor",
    spec=partial(_clip_spec, "clip_factor", 2),
    ref=_factor_ref,
    grad=_NO_LOSS,
    samples=_clip_samples,
    refuses={"limit": NONE_FROM_ZERO},
)
for _op, _kernel in ((CLIP_NORM, _clip), (CLIP_FACTOR, _clip_factor)):
    cpu_kernel(_op, partial(_run_clip, _kernel), scratch=lambda node, compute: 8 * _n_pieces(node))

# -- steps --------------------------------------------------------------------------------------

STEPS = {  # by the name of the op
    function.__name__: formula(function)
    for function in (formulas.opt_step_adamw, formulas.opt_step_lion, formulas.opt_step_sgd)
}


def _step_op(of: Formula, ggml: GGMLOp, samples: Callable[..., Iterator[Sample]]) -> Op:
    """The op of a step: of p, which it changes, g, moments, which change too, and settings."""
    name, shape = of.name, (len(of.settings),)

    def spec(p: Tensor, *sources: Tensor) -> Spec:
        expect_type(name, "p", p)
        for what, t in zip(of.sources[1:], sources, strict=False):
            expect(name, what, t, p.shape)
        expect(name, "settings", sources[-1], shape)
        return Spec(p.shape)

    def ref(*arrays: np.ndarray) -> np.ndarray:
        *sources, settings = arrays
        return of(*sources, **dict(zip(of.settings, settings, strict=True)))

    step = op(
        name=name,
        ggml=ggml,
        spec=spec,
        ref=ref,
        grad=_NO_LOSS,
        samples=samples,
        memory=Memory.ALIAS,
        changes=tuple(range(2, len(of.sources))),
    )
    cpu_kernel(step, by_step(of))
    return step


def _clipped_formula(of: Formula) -> Formula:
    """The step by the gradient times one more setting."""
    g, factor = symbol("g"), symbol("factor")
    results = tuple(rebuild(of.results, {g: g * factor}))
    settings = (*of.settings, "factor")
    return replace(of, name=f"{of.name}_clipped", settings=settings, results=results)


def _clipped_samples(
    samples: Callable[..., Iterator[Sample]], rng: np.random.Generator
) -> Iterator[Sample]:
    for sample in samples(rng):
        *arrays, settings = sample.arrays
        yield Sample((*arrays, np.append(np.asarray(settings), 0.3)))


def _adamw_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, n_step in [((1,), 1), ((5, 33), 1), ((3, 1700), 20)]:
        p, g, m = rng.standard_normal((3, *shape))
        v = rng.uniform(0.1, 1, shape)
        settings = adamw_settings(0.1, (0.9, 0.99), 1e-3, 0.2, n_step)
        yield Sample((p, g, m, v, np.array(settings)))


def _lion_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1,), (5, 33), (3, 1700)]:
        p, g, m = rng.standard_normal((3, *shape))
        yield Sample((p, g, m, np.array([0.1, 0.9, 0.99, 0.2])))


def _sgd_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1,), (5, 33)]:
        p, g = rng.standard_normal((2, *shape))
        yield Sample((p, g, np.array([0.1, 0.2])))


def _accumulate_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, keeps in [((1,), 1.0), ((5, 33), 0.0), ((3, 1700), 1.0)]:
        yield Sample((*rng.standard_normal((2, *shape)), np.array([keeps])))


OPT_STEP_ADAMW = _step_op(STEPS["opt_step_adamw"], GGMLOp.OPT_STEP_ADAMW, _adamw_samples)
OPT_STEP_LION = _step_op(STEPS["opt_step_lion"], GGMLOp.CUSTOM, _lion_samples)
OPT_STEP_SGD = _step_op(STEPS["opt_step_sgd"], GGMLOp.OPT_STEP_SGD, _sgd_samples)
CLIPPED = {  # by the op of the step
    step: _step_op(
        _clipped_formula(STEPS[step.name]), GGMLOp.CUSTOM, partial(_clipped_samples, step.samples)
    )
    for step in (OPT_STEP_ADAMW, OPT_STEP_LION, OPT_STEP_SGD)
}
ACCUMULATE = _step_op(formula(formulas.accumulate), GGMLOp.CUSTOM, _accumulate_samples)
