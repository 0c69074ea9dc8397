"""The declaration of an architecture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyggml.models.config import Reader
from pyggml.models.decoder import Decoder


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
