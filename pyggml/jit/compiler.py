"""Numba's compiler in less time, to the same code: no garbage is looked for while it compiles, and
what it asks most often is answered sooner.

Each changes what Numba does not promise, and does nothing where another version lacks it.
"""

import gc
import threading
from typing import Any

from numba.core import event, ir
from numba.core.targetconfig import TargetConfig


class _Pause(event.Listener):  # type: ignore[misc]  # Numba has no annotations
    """Python's collector of cycles, off while any thread compiles or waits to compile."""

    def __init__(self) -> None:
        self._lock, self._n, self._was_on = threading.Lock(), 0, False

    def on_start(self, _: Any) -> None:
        with self._lock:
            if self._n == 0:
                self._was_on = gc.isenabled()
                gc.disable()
            self._n += 1

    def on_end(self, _: Any) -> None:
        with self._lock:
            self._n -= 1
            if self._n == 0 and self._was_on:
                gc.enable()


def compile_without_collecting() -> None:
    """Look for no garbage while Numba compiles. Its objects are in cycles and many, nearly all of
    them alive: going through them again and again would take an eighth of the time to compile."""
    event.register("numba:compiler_lock", _Pause())


def compare_flags_by_what_is_set() -> None:
    """Compare and hash the settings of two compilations by those that were set, not by all.

    Numba looks for the types of each call by the flags it compiles with, of which there are some
    thirty, nearly all as they are where nobody sets them: reading them took a tenth of the time.
    """
    if not hasattr(TargetConfig(), "_values") or not hasattr(TargetConfig, "options"):
        return
    hashes: dict[type, int] = {}

    def equals(one: Any, other: Any) -> Any:
        if type(one) is not type(other):
            return NotImplemented
        a, b = one._values, other._values
        if a == b:
            return True
        defaults = {name: one.options[name].default for name in a.keys() ^ b.keys()}
        return {**defaults, **a} == {**defaults, **b}

    def hash_of(flags: Any) -> int:
        kind = type(flags)
        if kind not in hashes:
            hashes[kind] = hash(tuple(sorted(kind.options)))
        return hashes[kind]

    methods: Any = TargetConfig
    methods.__eq__, methods.__hash__ = equals, hash_of


def list_variables_by_type() -> None:
    """List the variables of an instruction by the types of its parts, most of which hold none."""
    plain = getattr(ir.Inst, "_rec_list_vars", None)
    if plain is None:
        return
    without = frozenset((ir.Loc, str, int, bool, type(None)))

    def list_variables(instruction: Any, part: Any) -> Any:
        if type(part) is not dict:
            return plain(instruction, part)
        listed: list[Any] = []
        for each in part.values():
            kind = type(each)
            if kind is ir.Var:
                listed.append(each)
            elif kind not in without:
                listed += plain(instruction, each)
        return listed

    ir.Inst._rec_list_vars = list_variables
