"""Steps of the optimisers on parameters that are kept in 16 bits: F16 or BF16.

opt_step_NAME_half   the step of opt_step_NAME in float32, rounded by chance to one of the two
                     halves around its result, whose mean over all draws it is

A step that is less than half of the distance to the next half would be lost if it went to the
nearest one. By chance it is made as often as it is large (Gupta et al. 2015, arXiv:1502.02551;
Zamirai et al. 2020, arXiv:2010.06192). The bits are Philox's, of seed, step, tensor and place: any
number of threads and a resumed run round alike.
"""

from collections.abc import Callable, Iterator

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call, one_by_one
from pyggml.graph.dtypes import BF16, F32, HALVES
from pyggml.graph.op import Memory, NoGrad, Op, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit.tasks import SHARE
from pyggml.kernels.kernel import KERNELS, Site, cpu_kernel
from pyggml.ops.arithmetic.dropout import DRAW, STREAMS, expect_draw, round_by_draw
from pyggml.ops.expect import expect_gapless
from pyggml.ops.optim import OPT_STEP_ADAMW, OPT_STEP_LION, OPT_STEP_SGD
from pyggml.ops.optim_8bit import BLOCK, OPT_STEP_ADAMW_8BIT, SCALES

_PIECE = 64 * SHARE  # numbers that are in float32 at a time, in caches: a multiple of BLOCK


def opt_step_half(step: Op, p: Tensor, *sources: Tensor, stream: int) -> Tensor:
    """The parameter p, F16 or BF16, after one step of OPT_STEP_ADAMW, OPT_STEP_ADAMW_8BIT,
    OPT_STEP_LION or OPT_STEP_SGD, in p's own memory.

    sources: g, moments and settings as those of that op, then draw (3,) I32 and stream as those of
    `dropout`: another stream for each parameter. p and moments without gaps.
    """
    for t in (p, *(sources[i - 1] for i in step.changes)):
        expect_gapless(f"{step.name}_half", "parameter or moment", t)
    return _HALVES[step](p, *sources, stream=stream)


def _declare(step: Op) -> Op:
    """The op on halves of an optimiser's op."""
    name = f"{step.name}_half"

    def spec(p: Tensor, *sources: Tensor, stream: int) -> Spec:
        if p.dtype not in HALVES or not sources:
            raise ShapeError(f"{name}: p is {p!r}, wanted F16 or BF16")
        *rest, draw = sources
        expect_draw(name, draw, stream)
        step.spec(Tensor(p.shape, F32), *rest)
        return Spec(p.shape, p.dtype)

    def ref(p: np.ndarray, *sources: np.ndarray, stream: int) -> np.ndarray:
        return step.ref(p, *sources[:-1])

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for sample in step.samples(rng):
            p, *sources = sample.arrays
            draw = rng.integers(-(1 << 31), 1 << 31, DRAW)
            yield Sample((np.asarray(p).astype(np.float16), *sources, draw), {"stream": 7})

    half = op(
        name=name,
        spec=spec,
        ref=ref,
        grad=NoGrad("an optimiser step is not part of the loss"),
        samples=samples,
        refuses={"stream": (-1, STREAMS)},
        memory=Memory.ALIAS,
        changes=step.changes,
    )
    cpu_kernel(half, _run_of(step), scratch=lambda node, compute: 6 * _n_at_once(node))
    return half


def _n_at_once(node: Tensor) -> int:
    """Numbers that are in float32 at a time, as whole shares."""
    return min(-(-node.n_elements // SHARE) * SHARE, _PIECE)


def _run_of(step: Op) -> Callable[[Site], Call]:
    return lambda site: Call(one_by_one, list(_calls(step, site)))


def _calls(step: Op, site: Site) -> Iterator[Call]:
    """Of each piece: widen it, take the step, round the result."""
    out, (_, *sources, draw), n = site.out.reshape(-1), site.src, _n_at_once(site.node)
    wide, bits = site.scratch[: 4 * n].view(np.float32), site.scratch[4 * n :].view(np.uint16)
    node, stream = Tensor(site.node.shape, F32, step), np.uint64(site.node.params["stream"])
    for i in range(0, out.size, _PIECE):
        half = out[i : i + _PIECE]
        x = wide[: half.size]
        src = (x, *(_part(step, j, a, site.out, i) for j, a in enumerate(sources, 1)))
        yield Call(_widen, x, half)
        yield KERNELS[step].bind(Site(node, x, src, (), site.scratch[:0], True, site.compute))
        yield Call(
            round_by_draw, half.view(np.uint16), x, bits, i // SHARE, draw, stream,
            site.node.dtype is BF16,
        )  # fmt: skip


def _part(step: Op, place: int, a: np.ndarray, p: np.ndarray, start: int) -> np.ndarray:
    """What a source, by its place, has for the piece that begins at a number of p."""
    if step is OPT_STEP_ADAMW_8BIT and place == SCALES:
        return a[:, start // BLOCK : (start + _PIECE) // BLOCK]
    return a.reshape(-1)[start : start + _PIECE] if a.shape == p.shape else a


def _widen(x: np.ndarray, half: np.ndarray) -> None:
    if half.dtype == np.float16:
        np.copyto(x, half)
    else:
        np.left_shift(half, np.uint32(16), out=x.view(np.uint32))


_HALVES = {
    step: _declare(step)
    for step in (OPT_STEP_ADAMW, OPT_STEP_ADAMW_8BIT, OPT_STEP_LION, OPT_STEP_SGD)
}
