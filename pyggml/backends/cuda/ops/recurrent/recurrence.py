"""The recurrence of ssm_scan, gated_delta_net, rwkv_wkv6, rwkv_wkv7 and gated_linear_attn.

A head has a state S (dv, dk), as pyggml/ops/recurrent/recurrence.py defines it:

    S_t = S_{t-1}·diag(w_t) + (S_{t-1} a_t) b_tᵀ + v_t k_tᵀ
    y_t = S_t r_t,    of an `early` op (S_{t-1} + v_t (u·k_t)ᵀ) r_t

Rows of S do not meet: row i takes v_i and gives y_i. So `lanes` threads of a warp hold a row in
registers, a part of the columns each, and take the tokens in order. recurrence_back.py is the
gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.warp import LANES, lanes_sum
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.backends.cuda.runtime.simulator import small
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor

W, K, R, A, B = range(5)  # factors in the order of `Factors.read`; an early op's u stands at A
_THREADS = 128


@dataclass(frozen=True)
class Factors:
    """Where an op's factors come from.

    read   (src, sizes, t, h, j) -> (w, k, r, a, b) of column j, a device function
    value  (src, sizes, t, h, i) -> v of row i
    """

    read: Callable
    value: Callable
    coupled: bool = False  # has a and b
    early: bool = False  # reads the state before the token, and has u

    @property
    def n_roles(self) -> int:
        """How many factors have gradients by column."""
        return 5 if self.coupled else 4 if self.early else 3


def power(n: int) -> int:
    """The least power of two from n on."""
    return 1 << max(n - 1, 0).bit_length()


@device
def clear(s):
    for p in range(s.shape[0]):
        for e in range(s.shape[1]):
            s[p, e] = ZERO


@device
def along(s, p, f, role):
    """The product of row p with a factor."""
    total = ZERO
    for e in range(s.shape[1]):
        total += s[p, e] * f[role, e]
    return lanes_sum(total)


@device
def early_result(s, p, f, v):
    """(S_{t-1} + v_t (u·k_t)ᵀ) r_t of row p."""
    total = ZERO
    for e in range(s.shape[1]):
        total += (s[p, e] + v * f[A, e] * f[K, e]) * f[R, e]
    return lanes_sum(total)


@cache
def steps(factors: Factors) -> Any:
    """(fetch, step): device functions on a thread's part s (rows, columns) of a state."""
    read, coupled = factors.read, factors.coupled

    @device
    def fetch(f, src, sizes, t, h, dk):
        """f (5, columns) = the factors of the thread's columns; 0 beyond the last."""
        for e in range(f.shape[1]):
            j = cuda.threadIdx.x + e * cuda.blockDim.x
            w, k, r, a, b = ZERO, ZERO, ZERO, ZERO, ZERO
            if j < dk:
                w, k, r, a, b = read(src, sizes, t, h, j)
            f[W, e], f[K, e], f[R, e], f[A, e], f[B, e] = w, k, r, a, b

    @device
    def step(s, p, f, v):
        """S_{t-1} -> S_t of row p."""
        turned = along(s, p, f, A) if coupled else ZERO
        for e in range(s.shape[1]):
            s[p, e] = s[p, e] * f[W, e] + turned * f[B, e] + v * f[K, e]

    return fetch, step


@cache
def _forward(factors: Factors, columns: int) -> Any:
    fetch, step = steps(factors)
    value, early = factors.value, factors.early

    @kernel
    def forward(y, last, src, sizes, initial, positions, n_heads, dv, dk):
        s = cuda.local.array((1, columns), np.float32)
        f = cuda.local.array((5, columns), np.float32)
        row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        is_row = row < n_heads * dv
        row = min(row, n_heads * dv - 1)  # surplus threads take part in the sums of their warp
        h, i = row // dv, row % dv
        for e in range(columns):
            j = cuda.threadIdx.x + e * cuda.blockDim.x
            s[0, e] = initial[row * dk + j] if j < dk else ZERO
        for t in range(positions.size):
            if positions[t] == 0:
                clear(s)
            v = value(src, sizes, t, h, i)
            fetch(f, src, sizes, t, h, dk)
            if early:
                result = early_result(s, 0, f, v)
                step(s, 0, f, v)
            else:
                step(s, 0, f, v)
                result = along(s, 0, f, R)
            if is_row and cuda.threadIdx.x == 0:
                y[(t * n_heads + h) * dv + i] = result
        for e in range(columns):
            j = cuda.threadIdx.x + e * cuda.blockDim.x
            if is_row and j < dk:
                last[row * dk + j] = s[0, e]

    return forward


def several_states(node: Tensor) -> str | None:
    """What the kernels lack."""
    return "states besides the last" if node.params["n_states"] > 1 else None


def bind_forward(site: CudaSite, factors: Factors, src: tuple, sizes: tuple) -> Call:
    """y (T, H, dv) and, as `saved[0]`, the last state. The node's sources begin with the state and
    end with the positions; src and sizes are what `factors` reads."""
    n_heads, dv, dk = site.node.src[0].shape
    lanes = min(LANES, power(dk))
    columns = -(-dk // lanes)
    rows = small(_THREADS // lanes)
    run = _forward(factors, columns)
    return launch(
        run, -(-n_heads * dv // rows), (lanes, rows), site.stream, site.out, site.saved[0], src,
        sizes, site.src[0], site.src[-1], n_heads, dv, dk,
    )  # fmt: skip
