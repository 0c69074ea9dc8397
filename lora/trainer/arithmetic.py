"""The compute type, vector unit and compiler of a run, which a resumed run must match.

The compute type is taken over from the checkpoint: `"auto"` may mean another one on another
machine. The others cannot be chosen. Another unit adds in another order; so may kernels compiled
with another version of Python or Numba, since LLVM chooses the order of a sum. Results are then
equal up to rounding, and a warning says so.
"""

from __future__ import annotations

import platform
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pyggml import gguf
from pyggml.errors import CheckpointError, GGUFError
from pyggml.gguf.fields import brief
from pyggml.jit.isa import CHOSEN, ENVIRONMENT, ISAS, why_not
from pyggml.model import COMPUTE_TYPES, Model

_TYPES = COMPUTE_TYPES[1:]  # all but "auto"
_COMPUTE, _VECTORS, _COMPILER = (f"checkpoint.{n}" for n in ("compute", "vectors", "compiler"))
_PYTHON = platform.python_version().rpartition(".")[0]
_COMPILER_HERE = f"Python {_PYTHON}, Numba {version('numba')}"


@dataclass(frozen=True, slots=True)
class RunArithmetic:
    """A compute type, never "auto", a vector unit, and what compiled the kernels: "int8",
    "avx512bf16", "Python 3.12, Numba 0.68.1"; "" if a checkpoint does not say."""

    compute: str
    vectors: str
    compiler: str = _COMPILER_HERE

    @staticmethod
    def by(model: Model) -> RunArithmetic:
        """What computes a model in this process."""
        return RunArithmetic(model.backend.compute, CHOSEN.name)

    def metadata(self) -> dict[str, str]:
        """As a checkpoint's file holds it."""
        return {_COMPUTE: self.compute, _VECTORS: self.vectors, _COMPILER: self.compiler}

    def check(self, file: gguf.GGUFFile) -> None:
        """Warn if a checkpoint's run computed with another vector unit or compiler.

        Raises CheckpointError if it did with another compute type.
        """
        stored = _arithmetic_of(file)
        if stored is None:
            return
        if stored.compute != self.compute:
            raise CheckpointError(
                f"{file.path}: its run computed as {stored.compute}, this one computes as "
                f"{self.compute}: load the model with compute={stored.compute!r}"
            )
        if stored.vectors != self.vectors:
            is_alike = stored.compiler == self.compiler and not why_not(ISAS[stored.vectors])
            exactly = f"; {ENVIRONMENT}={stored.vectors} continues it exactly"
            warnings.warn(
                f"{file.path}: its run computed with {stored.vectors}, this process computes with "
                f"{self.vectors}: results are equal to rounding, not bit for bit"
                + (exactly if is_alike else ""),
                RuntimeWarning,
                stacklevel=2,
            )
        if stored.compiler not in ("", self.compiler):
            warnings.warn(
                f"{file.path}: its kernels were compiled by {brief(stored.compiler)}, here by "
                f"{self.compiler!r}: results are equal to rounding, not bit for bit",
                RuntimeWarning,
                stacklevel=2,
            )


def stored_compute(path: Path) -> str | None:
    """The compute type of a checkpoint's run; None in files older than this entry.

    Raises CheckpointError for a file that is no checkpoint.
    """
    try:
        with gguf.open(path) as file:
            stored = _arithmetic_of(file)
    except GGUFError as error:
        raise CheckpointError(f"{error}; wanted a checkpoint") from None
    return None if stored is None else stored.compute


def _arithmetic_of(file: gguf.GGUFFile) -> RunArithmetic | None:
    compute, vectors = file.get(_COMPUTE), file.get(_VECTORS)
    if compute is None and vectors is None:
        return None
    wrong = [
        f"{key} is {brief(value)}, wanted one of {', '.join(names)}"
        for key, value, names in ((_COMPUTE, compute, _TYPES), (_VECTORS, vectors, ISAS))
        if not isinstance(value, str) or value not in names
    ]
    compiler = file.get(_COMPILER)
    if not isinstance(compiler, str | None):
        wrong.append(f"{_COMPILER} is {brief(compiler)}, wanted text")
    if wrong:
        raise CheckpointError(wrong, f"{file.path}: ")
    return RunArithmetic(str(compute), str(vectors), str(compiler or ""))
