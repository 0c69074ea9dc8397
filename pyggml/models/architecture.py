"""What one architecture declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `general.architecture`.

    decoder   hyperparameters -> parts; faults are collected by the reader, never raised
    example   the keys, without the architecture's name, that a small model needs besides the common
              ones; warm-up and tests make models of it
    """

    name: str
    decoder: Callable[[Reader], Decoder]
    example: Mapping[str, object]
