"""Numba's search for variables that are assigned once, in one round over a function's statements.

Its own goes through all of them for each variable. Kernels of packed weights are thousands of
statements without a branch: half of what Numba took for one of them was that.
"""

from collections import Counter
from typing import Any


def _find_singly_assigned(self: Any) -> None:
    """In place of numba.cuda.lowering.Lower's method: variables that one block alone assigns, once,
    and that no other reads."""
    from numba.cuda import lowering
    from numba.cuda.core import ir

    blocks, names = self.func_ir.blocks, set[str]()
    if not self.func_ir.func_id.is_generator:
        use_defs, in_memory = lowering.compute_use_defs(blocks), lowering.must_use_alloca(blocks)
        homes = Counter(name for here in use_defs.defmap.values() for name in here)
        reads = {name for here in use_defs.usemap.values() for name in here}
        every = (one for block in blocks.values() for one in block.find_insts(ir.assign_types))
        times = Counter(one.target.name for one in every)
        once = {name for name, n in homes.items() if n == times[name] == 1}
        names = once - reads - set(in_memory)
    self._singly_assigned_vars, self._blk_local_varmap = names, {}


def search_in_one_round() -> None:
    """Let Numba search so, if it is a version that has all this."""
    try:
        from numba.cuda import lowering
        from numba.cuda.core import ir
    except ImportError:
        return
    needed = hasattr(ir, "assign_types") and hasattr(lowering, "must_use_alloca")
    if needed and hasattr(lowering.Lower, "_find_singly_assigned_variable"):
        lowering.Lower._find_singly_assigned_variable = _find_singly_assigned
