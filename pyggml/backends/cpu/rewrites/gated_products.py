"""Gate and up of a feed-forward part become one node with the unit of both, on the CPU.

Where tiles multiply, the unit is taken of what a task has just multiplied: a prompt's gate and up
are never written (pyggml.kernels.gemm.amx.gated). The bits are the same.
"""

from functools import cache, partial

from pyggml import threads
from pyggml.graph.dtypes import F32
from pyggml.graph.pattern import Match, Pattern
from pyggml.graph.rewrite import Replacements
from pyggml.graph.table import Rewrite
from pyggml.kernels import gemm
from pyggml.kernels.gemm.amx import gated
from pyggml.kernels.gemm.amx.product import MANY
from pyggml.kernels.kernel import Compute
from pyggml.ops.product.gated import MUL_MAT_GATED, UNITS
from pyggml.ops.product.problem import problem_of

# A task multiplies for both, so there are half as many, and threads wait longer for the last ones.
# A prompt of 512 of 0.6B takes 0.95 to 0.99 of its time on 16 threads of a Xeon, 1.0 to 1.1 on 32.
_MOST_THREADS = 16
_PATTERN = "gate = mul_mat(g, x); up = mul_mat(u, x); y = UNIT(gate, up)"


@cache
def gated_products(compute: Compute) -> tuple[Rewrite, ...]:
    """A rewrite for each unit."""
    holds = partial(_are_on_tiles, compute=compute)
    patterns = {unit: Pattern(_PATTERN.replace("UNIT", unit)) for unit in UNITS}
    return tuple(Rewrite(p, holds, partial(_joint, unit=u)) for u, p in patterns.items())


def _are_on_tiles(m: Match, compute: Compute) -> bool:
    if threads.most() > _MOST_THREADS:
        return False
    are_leaves = m.g.root.op is None and m.u.root.op is None and m.g.dtype is not F32
    are_alike = (m.g.dtype, m.g.shape) == (m.u.dtype, m.u.shape)
    if not (are_leaves and are_alike and len(m.g.shape) == len(m.x.shape) == 2):
        return False
    p = problem_of("mul_mat", m.gate, m.x, compute)
    return gemm.path_of(p) is MANY and gated.takes(p)


def _joint(m: Match, unit: str) -> Replacements:
    return {m.y: MUL_MAT_GATED(m.g, m.u, m.x, unit=unit)}
