"""Control vectors of a server: by name, and the models that add them as a request asks."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pyggml.cli.terminal.options import read_control
from pyggml.cli.web.errors import ApiError, of_input
from pyggml.errors import ConfigError, suggestion
from pyggml.look.control import ControlVector
from pyggml.model import Model

_MOST_MODELS = 32  # that are kept: a model has programs of its own
Scales = Mapping[str, float]


@dataclass(slots=True)
class Controls:
    """vectors   name -> a control vector that requests may name
    scales    of those that are added where a request names none
    """

    vectors: Mapping[str, ControlVector] = field(default_factory=dict)
    scales: Scales = field(default_factory=dict)
    _models: OrderedDict[object, Model] = field(default_factory=OrderedDict, init=False)

    @classmethod
    def read(
        cls,
        given: Sequence[tuple[str, tuple[Path, float]]],
        layers: tuple[int, int] | None,
        model: Model,
    ) -> "Controls":
        """Of names, files and scales. Raises GGUFError and ConfigError for files that are none of
        this model's, and for a name that is given twice."""
        vectors, scales = dict[str, ControlVector](), dict[str, float]()
        for name, (path, scale) in given:
            if name in vectors:
                raise ConfigError(f"--control-vector {name} is given twice, wanted another name")
            vectors[name], scales[name] = read_control(path, layers), scale
            vectors[name].addends(model, scale)  # raises for what does not fit
        return cls(vectors, scales)

    @property
    def words(self) -> list[str]:
        """Each by its name, with what the server does with it."""
        scales = self.scales.items()
        return [
            f"{name}, {scale:g}" if scale else f"{name}, where asked for" for name, scale in scales
        ]

    def model(self, model: Model, asked: Scales | None) -> Model:
        """The model with these vectors; with the server's own if none are asked for. The same
        scales give the same object, whose requests share passes and prompts; others never do.

        Raises ApiError for a name that there is not.
        """
        if strange := [name for name in asked or () if name not in self.vectors]:
            near = suggestion(strange[0], self.vectors) or "; the server was started with " + (
                ", ".join(self.vectors) or "none"
            )
            said = f"has {strange[0][:40]!r}, which is no control vector here{near}"
            raise ApiError(400, f"control_vectors {said}", "control_vectors")
        scales = {n: s for n, s in (self.scales if asked is None else asked).items() if s}
        if not scales:
            return model
        key = model, *sorted(scales.items())
        if key not in self._models:
            if len(self._models) == _MOST_MODELS:
                self._models.popitem(last=False)
            try:
                self._models[key] = model.with_added(self._addends(model, scales))
            except ConfigError as error:  # a scale that is too large
                raise of_input(error) from None
        self._models.move_to_end(key)
        return self._models[key]

    def _addends(self, model: Model, scales: Scales) -> dict[str, np.ndarray]:
        """What all of them add, by activation."""
        total = dict[str, np.ndarray]()
        for name, scale in scales.items():
            for at, addend in self.vectors[name].addends(model, scale).items():
                with np.errstate(over="ignore"):  # the sum is refused where it is none
                    total[at] = total[at] + addend if at in total else addend
        return total
