"""Random draws of training.

dropout         elements become 0 with probability p, the others grow by 1 / (1 − p)
uniform_noise   y[r, :] = x[r, :] + size[r] · u,   u uniform in [−1, 1) for every element
round_by_draw   x as one of the two halves around it, the nearer one with the larger probability, so
                that the mean is x (stochastic rounding; Gupta et al. 2015, arXiv:1502.02551)

Random numbers are Philox4x32-10's (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011): a function of a key and a counter, without a state. Any number of threads, a recomputed
layer, the backward pass and a resumed run therefore drop the same elements.

key (2 words)       the seed
counter (4 words)   (column in a quarter of the row, row, stream, number of the draw); its four
                    numbers are of the same column in the row's four quarters
"""

from collections.abc import Iterator

import numpy as np

from pyggml.errors import ShapeError
from pyggml.formulas.formula import formula
from pyggml.graph.call import Call
from pyggml.graph.dtypes import I32
from pyggml.graph.op import Memory, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import exact, kernel, parallel, prange
from pyggml.jit.tasks import SHARE
from pyggml.kernels.formulas import inline_formula
from pyggml.kernels.kernel import Site, as_rows, cpu_kernel
from pyggml.ops.expect import INF, NAN, expect, expect_type
from pyggml.ops.formulas import keep, noisy
from pyggml.quants.bits import float_to_bf16, float_to_f16

DRAW = 3  # words of a draw: the seed's lower and upper 32 bits, and the number of the draw
STREAMS, _WORD = 1 << 32, 0xFFFFFFFF


def dropout(x: Tensor, draw: Tensor, p: float, stream: int) -> Tensor:
    """x (…, n) F32 with elements dropped (no op of ggml; Srivastava et al. 2014).

    draw (3,) I32 is the seed (two words) and the number of the draw, all read as unsigned. It is
    data, so that one plan serves every step. p: 0 to below 1. stream: 0 to 2^32 − 1, another for
    each dropout of a graph.
    """
    return DROPOUT(x, draw, p=float(p), stream=stream)


def draw_words(seed: int, number: int) -> np.ndarray:
    """The (3,) int32 of a draw: of a seed up to 64 bits, and a number of which 32 bits count."""
    words = np.array([seed & _WORD, seed >> 32, number & _WORD], np.uint32)
    return words.view(np.int32)


def quarters(x: Tensor) -> tuple[int, int, int]:
    """(length of a row, of a quarter of it, quarters of all rows): a counter draws for one column
    in the four quarters of a row."""
    n = x.shape[-1] if x.shape else 1
    quarter = (n + 3) // 4
    return n, quarter, x.n_elements // n * quarter


def uniform_noise(x: Tensor, size: Tensor, draw: Tensor, stream: int) -> Tensor:
    """x (T, n) F32 with noise, at most size[r] in row r (no op of ggml; Jain et al. 2023).

    size (T,) F32 is data and gets no gradient; draw and stream as those of `dropout`.
    """
    return UNIFORM_NOISE(x, size, draw, stream=stream)


# -- Philox4x32-10 ------------------------------------------------------------------------------

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10


def philox_words(c0, c1, c2, c3, k0, k1):
    """Four random words of a counter and a key, all uint64 below 2^32, or arrays of such: LLVM
    multiplies these numbers in vectors."""
    for _ in range(_ROUNDS):
        a, b = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (b >> _SHIFT) ^ c1 ^ k0, b & _LOW, (a >> _SHIFT) ^ c3 ^ k1, a & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


_philox = kernel(philox_words)


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Four random words (4, …) of each counter (4, …) and key (2,): uint64 below 2^32, in NumPy."""
    return np.stack(philox_words(*counter.astype(np.uint64), *key.astype(np.uint64)))


# -- dropout ------------------------------------------------------------------------------------

KEEP = formula(keep)
_keep = inline_formula(KEEP)


@kernel
def _dropout_row(out, x, quarter, row, draw, stream, least, grown):
    """Drop the elements whose random word is below `least`."""
    k0, k1, n = np.uint64(draw[0]) & _LOW, np.uint64(draw[1]) & _LOW, np.uint64(draw[2]) & _LOW
    whole = x.size - 3 * quarter  # columns that all four quarters have
    first, second = out[:quarter], out[quarter : 2 * quarter]
    third, fourth = out[2 * quarter : 3 * quarter], out[3 * quarter :]
    x0, x1, x2 = x[:quarter], x[quarter : 2 * quarter], x[2 * quarter : 3 * quarter]
    x3 = x[3 * quarter :]
    for j in range(whole):
        w0, w1, w2, w3 = _philox(np.uint64(j), row, stream, n, k0, k1)
        first[j] = _keep(x0[j], w0, least, grown)
        second[j] = _keep(x1[j], w1, least, grown)
        third[j] = _keep(x2[j], w2, least, grown)
        fourth[j] = _keep(x3[j], w3, least, grown)
    for j in range(max(whole, 0), quarter):
        words = _philox(np.uint64(j), row, stream, n, k0, k1)
        for w in range(4):
            i = w * quarter + j
            if i < x.size:
                out[i] = _keep(x[i], words[w], least, grown)


@parallel
def _dropout(out, x, draw, stream, least, grown):
    quarter = (x.shape[1] + 3) // 4
    for r in prange(x.shape[0]):
        _dropout_row(out[r], x[r], quarter, np.uint64(r), draw, stream, least, grown)


def _dropout_run(site: Site) -> Call:
    x, draw = site.src
    least, grown = share_kept(site.node.params["p"])
    return Call(
        _dropout, as_rows(site.out), as_rows(x), draw, np.uint64(site.node.params["stream"]),
        np.uint64(least), np.float32(grown),
    )  # fmt: skip


def share_kept(p: float) -> tuple[int, float]:
    """The settings of `keep`: the least random word whose element is kept, and its factor."""
    return round(p * (1 << 32)), 1 / (1 - p)


def expect_draw(name: str, draw: Tensor, stream: int) -> None:
    """ShapeError for what is no draw, or no stream."""
    expect(name, "draw", draw, (DRAW,), I32)
    if not 0 <= stream < STREAMS:
        raise ShapeError(f"{name}: stream is {stream}, wanted 0 to 2^32 - 1")


def _dropout_spec(x: Tensor, draw: Tensor, p: float, stream: int) -> Spec:
    expect_type("dropout", "x", x)
    expect_draw("dropout", draw, stream)
    if not 0 <= p < 1:
        raise ShapeError(f"dropout: p is {p}, wanted 0 to below 1")
    return Spec(x.shape)


def _words(rows: np.ndarray, draw: np.ndarray, stream: int) -> np.ndarray:
    """The random word of each element of rows (R, n)."""
    n_rows, n = rows.shape
    quarter = -(-n // 4)
    words = draw.astype(np.int32).view(np.uint32).astype(np.uint64)
    counter = np.empty((4, n_rows, quarter), np.uint64)
    counter[0], counter[1] = np.arange(quarter), np.arange(n_rows)[:, None]
    counter[2], counter[3] = stream, words[2]
    return philox(counter, words[:2]).swapaxes(0, 1).reshape(n_rows, -1)[:, :n]


def _dropout_ref(x: np.ndarray, draw: np.ndarray, p: float, stream: int) -> np.ndarray:
    n = x.shape[-1] if x.ndim else 1
    rows = x.reshape(-1, n) if x.size else x.reshape(0, n)
    least, grown = share_kept(p)
    words = _words(rows, draw, stream)
    return KEEP(rows, words, least=least, grown=grown).reshape(x.shape)


def _dropout_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy · mask / (1 - p)

    Dropped elements have no gradient. The same words are drawn again.
    """
    _, draw = node.src
    return dropout(dy, draw, **node.params), None


def _dropout_samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases = [((1, 1), 0.0, 0), ((3, 8), 0.25, 7), ((2, 3, 5), 0.5, STREAMS - 1)]
    for shape, p, stream in [*cases, ((67,), 0.9, 1), ((4, int(rng.integers(1, 70))), 0.3, 5)]:
        draw = rng.integers(-(1 << 31), 1 << 31, DRAW)
        yield Sample((rng.standard_normal(shape), draw), {"p": p, "stream": stream})


DROPOUT = op(
    name="dropout",
    spec=_dropout_spec,
    ref=_dropout_ref,
    grad=_dropout_grad,
    samples=_dropout_samples,
    refuses={"p": (-0.1, 1.0, NAN, INF), "stream": (-1, STREAMS)},
    memory=Memory.INPLACE,
)
cpu_kernel(DROPOUT, _dropout_run)

# -- uniform_noise ------------------------------------------------------------------------------

NOISY = formula(noisy)
_noisy = inline_formula(NOISY)


@kernel
def _noise_row(out, x, quarter, row, size, draw, stream):
    k0, k1, n = np.uint64(draw[0]) & _LOW, np.uint64(draw[1]) & _LOW, np.uint64(draw[2]) & _LOW
    for j in range(quarter):
        words = _philox(np.uint64(j), row, stream, n, k0, k1)
        for w in range(4):
            i = w * quarter + j
            if i < x.size:
                out[i] = _noisy(x[i], size, np.float32(np.int64(words[w] >> np.uint64(8))))


@parallel
def _noise(out, x, size, draw, stream):
    quarter = (x.shape[1] + 3) // 4
    for r in prange(x.shape[0]):
        _noise_row(out[r], x[r], quarter, np.uint64(r), size[r], draw, stream)


def _noise_run(site: Site) -> Call:
    x, size, draw = site.src
    return Call(_noise, site.out, x, size, draw, np.uint64(site.node.params["stream"]))


def _noise_spec(x: Tensor, size: Tensor, draw: Tensor, stream: int) -> Spec:
    expect_type("uniform_noise", "x", x)
    expect("uniform_noise", "size", size, x.shape[:1])
    if len(x.shape) != 2:
        raise ShapeError(f"uniform_noise: x is {x.shape}, wanted (T, n)")
    expect_draw("uniform_noise", draw, stream)
    return Spec(x.shape)


def _noise_ref(x: np.ndarray, size: np.ndarray, draw: np.ndarray, stream: int) -> np.ndarray:
    return NOISY(x, size[:, None], _words(x, draw, stream) >> np.uint64(8))


def _noise_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy

    The noise does not depend on x.
    """
    return dy, None, None


def _noise_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, stream in [((1, 1), 0), ((3, 8), 7), ((5, 67), STREAMS - 1)]:
        draw = rng.integers(-(1 << 31), 1 << 31, DRAW)
        size = rng.uniform(0, 2, shape[0])
        yield Sample((rng.standard_normal(shape), size, draw), {"stream": stream})


UNIFORM_NOISE = op(
    name="uniform_noise",
    spec=_noise_spec,
    ref=_noise_ref,
    grad=_noise_grad,
    samples=_noise_samples,
    refuses={"stream": (-1, STREAMS)},
    memory=Memory.INPLACE,
)
cpu_kernel(UNIFORM_NOISE, _noise_run)

# -- round_by_draw, the kernel of steps on halves (pyggml.ops.optim_half) -----------------------

EIGHTH = SHARE // 8  # a counter draws for eight numbers of a share: two of each word


@kernel
def _draw_bits(bits, share, draw, stream):
    """16 random bits of each number of a share."""
    k0, k1, n = np.uint64(draw[0]) & _LOW, np.uint64(draw[1]) & _LOW, np.uint64(draw[2]) & _LOW
    half, low = np.uint64(16), np.uint64(0xFFFF)
    parts = bits.reshape(8, EIGHTH)
    a, b, c, d = parts[0], parts[1], parts[2], parts[3]
    e, f, g, h = parts[4], parts[5], parts[6], parts[7]
    for j in range(EIGHTH):
        w0, w1, w2, w3 = _philox(np.uint64(j), share, stream, n, k0, k1)
        a[j], b[j], c[j], d[j] = w0 & low, w1 & low, w2 & low, w3 & low
        e[j], f[j], g[j], h[j] = w0 >> half, w1 >> half, w2 >> half, w3 >> half


@exact
def _as_bf16(x, r):
    """16 random bits are added to those that go: the carry is as probable as these are large."""
    u = np.float32(x).view(np.uint32)
    if (u & np.uint32(0x7F800000)) == np.uint32(0x7F800000):
        return float_to_bf16(x)
    return np.uint16((u + np.uint32(r)) >> np.uint32(16))


@exact
def _as_f16(x, r):
    """The same of 13 bits; a number below 2⁻¹⁴ is a share of units of 2⁻²⁴."""
    u = np.float32(x).view(np.uint32)
    size = np.uint32(u & np.uint32(0x7FFFFFFF))
    if size < np.uint32(0x38800000):
        units = np.float64(size.view(np.float32)) * 2.0**24 + np.float64(r) / 65536
        size = np.float32(np.floor(units) * 2.0**-24).view(np.uint32)
    elif size < np.uint32(0x7F800000):
        size = np.uint32((size + (np.uint32(r) >> np.uint32(3))) & np.uint32(0xFFFFE000))
    return float_to_f16(np.uint32((u & np.uint32(0x80000000)) | size).view(np.float32))


@parallel
def round_by_draw(out, x, bits, first, draw, stream, is_bf16):
    """x (n,) float32 as halves, of which out (n,) uint16 are the bits. bits (m,) uint16, m a
    multiple of SHARE and no less than n, is memory for random ones; first: number of the first
    share of SHARE numbers, which is a counter of the draw."""
    for c in prange((x.size + SHARE - 1) // SHARE):
        a, b = c * SHARE, (c + 1) * SHARE
        drawn, wide, narrow = bits[a:b], x[a:b], out[a:b]
        _draw_bits(drawn, np.uint64(first + c), draw, stream)
        if is_bf16:
            for i in range(wide.size):
                narrow[i] = _as_bf16(wide[i], drawn[i])
        else:
            for i in range(wide.size):
                narrow[i] = _as_f16(wide[i], drawn[i])
