"""The backward pass of swiglu in one node, on the CPU.

Where gate and up are kept as bfloat16, it is five: the two widened to float32, swiglu_back_gate,
swiglu(gate, dy), and swiglu(gate, up) made again. They move 52 bytes for each number of gate, and
take three exponentials. swiglu_back moves 20 and takes one; its bits are the same.
"""

from pyggml.graph.dtypes import BF16
from pyggml.graph.pattern import Match, Pattern
from pyggml.graph.rewrite import Replacements
from pyggml.graph.table import Rewrite
from pyggml.ops.activation.glu import SWIGLU_BACK


def _are_kept(m: Match) -> bool:
    """Whether gate and up are rounded copies; no result is the caller's."""
    are_rounded = all(t.dtype is BF16 and t.is_contiguous for t in (m.kept_gate, m.kept_up))
    return are_rounded and {m.dgate, m.dup, m.y}.isdisjoint(m.graph.outputs)


def _at_once(m: Match) -> Replacements:
    joint = SWIGLU_BACK(m.kept_gate, m.kept_up, m.dy)
    return dict(zip((m.dgate, m.dup, m.y), (joint, *joint.saved), strict=True))


# What reads y then waits for dy. So it stays as it is where dy needs y.
JOINT_BACK = Rewrite(
    Pattern("""
        gate = cpy(kept_gate)
        up = cpy(kept_up)
        y = swiglu(gate, up)
        dup = swiglu(gate, dy)
        dgate = swiglu_back_gate(gate, up, dy)
    """),
    _are_kept,
    _at_once,
)
