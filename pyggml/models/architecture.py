"""The declaration of an architecture, and what each is written with: a `Reader` of
hyperparameters, of which a `Decoder` of `Part`s is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder
from pyggml.models.part import Part

__all__ = ["Architecture", "Decoder", "Part", "Reader"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `general.architecture`.

    decoder   hyperparameters -> parts; the reader collects faults, nothing is raised
    example   keys of a small model, without the architecture's name, beside those of models.small;
              warm-up and tests build models from them
    embeds    whether it embeds texts and predicts no token
    """

    name: str
    decoder: Callable[[Reader], Decoder]
    example: Mapping[str, object]
    embeds: bool = False
