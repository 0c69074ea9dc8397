"""The compute type and vector unit of a run, which a resumed run must match.

The compute type is taken over from the checkpoint: `"auto"` may mean another one on another
machine. The vector unit cannot be chosen. Another unit adds in another order, so results are then
equal up to rounding, and a warning says so.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from pyggml import gguf
from pyggml._isa import CHOSEN, ENVIRONMENT, ISAS, why_not
from pyggml.errors import CheckpointError, GGUFError
from pyggml.gguf.fields import shown
from pyggml.model import COMPUTE_TYPES, Model

_TYPES = COMPUTE_TYPES[1:]  # all but "auto"
_COMPUTE, _VECTORS = "checkpoint.compute", "checkpoint.vectors"


@dataclass(frozen=True, slots=True)
class Computed:
    """A compute type, never "auto", and a vector unit: "int8", "avx512bf16"."""

    compute: str
    vectors: str

    @staticmethod
    def by(model: Model) -> Computed:
        """What computes a model in this process."""
        return Computed(model.backend.compute, CHOSEN.name)

    def metadata(self) -> dict[str, str]:
        """As a checkpoint's file holds it."""
        return {_COMPUTE: self.compute, _VECTORS: self.vectors}

    def check(self, file: gguf.GGUFFile) -> None:
        """Warn if a checkpoint's run computed with another vector unit.

        Raises CheckpointError if it did with another compute type.
        """
        found = _stored(file)
        if found is None:
            return
        if found.compute != self.compute:
            raise CheckpointError(
                f"{file.path}: its run computed as {found.compute}, this one computes as "
                f"{self.compute}: load the model with compute={found.compute!r}"
            )
        if found.vectors != self.vectors:
            exactly = f"; {ENVIRONMENT}={found.vectors} continues it exactly"
            warnings.warn(
                f"{file.path}: its run computed with {found.vectors}, this process computes with "
                f"{self.vectors}: results are equal to rounding, not bit for bit"
                + ("" if why_not(ISAS[found.vectors]) else exactly),
                RuntimeWarning,
                stacklevel=2,
            )


def stored_compute(path: Path) -> str | None:
    """The compute type of a checkpoint's run; None in files older than this entry.

    Raises CheckpointError for a file that is no checkpoint.
    """
    try:
        with gguf.open(path) as file:
            found = _stored(file)
    except GGUFError as error:
        raise CheckpointError(f"{error}; wanted a checkpoint") from None
    return None if found is None else found.compute


def _stored(file: gguf.GGUFFile) -> Computed | None:
    compute, vectors = file.get(_COMPUTE), file.get(_VECTORS)
    if compute is None and vectors is None:
        return None
    wrong = [
        f"{key} is {shown(value)}, wanted one of {', '.join(known)}"
        for key, value, known in ((_COMPUTE, compute, _TYPES), (_VECTORS, vectors, ISAS))
        if not isinstance(value, str) or value not in known
    ]
    if wrong:
        raise CheckpointError(wrong, f"{file.path}: ")
    return Computed(str(compute), str(vectors))
