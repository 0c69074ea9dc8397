"""From the logits of a token to the pass of the next one, where no host looks in between.

likeliest    the token with the greatest logit, and that logit's bits
advance      a pass's inputs become those of the chosen token, one position further

Neither changes smoothly, so gradients end here. ggml has no such ops: llama.cpp's host does both.
"""

from collections.abc import Iterator

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import I32
from pyggml.graph.op import Memory, NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.expect import expect, expect_gapless, expect_type

_NO_GRADIENT = NoGrad("a choice does not change smoothly")


def likeliest(logits: Tensor) -> Tensor:
    """(2,) I32: the index of the greatest of all logits, F32, and the bits of that number.

    The first of equals, and a NaN before all others, as NumPy's argmax takes them. Raises
    ShapeError for another type or no numbers.
    """
    return LIKELIEST(logits)


def advance(
    tokens: Tensor, choice: Tensor, positions: Tensor, rows: Tensor, span: Tensor
) -> Tensor:
    """The tokens (1,) I32 of a pass, which become choice[0], in their own memory.

    positions and rows (1,) I32 become one more, and the end of span (1, 2) I32: all leaves of
    pyggml.models.Inputs. choice as `likeliest` gives it. Raises ShapeError for other shapes or
    types.
    """
    leaves = {"tokens": tokens, "positions": positions, "rows": rows, "span": span}
    for what, t in leaves.items():
        expect_gapless("advance", what, t)
    return ADVANCE(tokens, choice, positions, rows, span)


# -- likeliest ----------------------------------------------------------------------------------


def _likeliest_spec(logits: Tensor) -> Spec:
    expect_type("likeliest", "logits", logits)
    if not logits.n_elements:
        raise ShapeError(f"likeliest: logits are {logits!r}, wanted one number or more")
    return Spec((2,), I32)


def _likeliest(out: np.ndarray, logits: np.ndarray) -> None:
    best = int(logits.argmax())
    out[0], out[1:] = best, logits[best : best + 1].view(np.int32)


def _likeliest_ref(logits: np.ndarray) -> np.ndarray:
    """By Python's max, which takes the first of equals too."""
    flat = logits.reshape(-1).tolist()
    best = max(range(len(flat)), key=lambda i: (flat[i] != flat[i], flat[i]))
    return np.array([best, np.float32(flat[best]).view(np.int32)])


def _likeliest_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1,), (1, 40), (1, 1500), (3, 333)]:
        yield Sample((rng.standard_normal(shape),))
    yield Sample((np.array([1.0, 3.0, 3.0, 2.0]),))
    yield Sample((np.array([-np.inf, 1.0, np.inf]),))
    yield Sample((np.full(300, -np.inf),))
    yield Sample((np.array([1.0, np.nan, 3.0, np.nan]),))


LIKELIEST = op(
    name="likeliest",
    spec=_likeliest_spec,
    ref=_likeliest_ref,
    grad=_NO_GRADIENT,
    samples=_likeliest_samples,
)
cpu_kernel(LIKELIEST, lambda site: Call(_likeliest, site.out, site.src[0].reshape(-1)))

# -- advance ------------------------------------------------------------------------------------


def _advance_spec(
    tokens: Tensor, choice: Tensor, positions: Tensor, rows: Tensor, span: Tensor
) -> Spec:
    of_token = {"tokens": tokens, "positions": positions, "rows": rows}
    for what, t in of_token.items():
        expect("advance", what, t, (1,), I32)
    expect("advance", "choice", choice, (2,), I32)
    expect("advance", "span", span, (1, 2), I32)
    return Spec((1,), I32)


def _advance(
    tokens: np.ndarray,
    choice: np.ndarray,
    positions: np.ndarray,
    rows: np.ndarray,
    span: np.ndarray,
) -> None:
    tokens[0] = choice[0]
    positions += 1
    rows += 1
    span[:, 1] += 1


def _advance_run(site: Site) -> Call:
    _, *rest = site.src
    return Call(_advance, site.out, *rest)


def _advance_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for n in (0, 7):
        choice, one = np.array([n + 40, 1], np.int32), np.full(1, n, np.int32)
        yield Sample((one + 1, choice, one, one + 2, np.array([[2, n + 3]], np.int32)))


ADVANCE = op(
    name="advance",
    spec=_advance_spec,
    ref=lambda tokens, choice, positions, rows, span: choice[:1],
    grad=_NO_GRADIENT,
    samples=_advance_samples,
    memory=Memory.ALIAS,
    changes=(2, 3, 4),
)
cpu_kernel(ADVANCE, _advance_run)
