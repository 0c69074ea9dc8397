"""How preferences are learned."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml.errors import Fault
from pyggml.settings import Settings, one_of, setting

OBJECTIVES = ("sft", "dpo", "orpo", "kto")
_WEIGHT = ("0 to 1000", lambda x: 0 <= x <= 1000)
_MEANT_FOR = {
    "beta": ("dpo", "orpo", "kto"),
    "label_smoothing": ("dpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(Settings):
    """What a run minimises; formulas in `pyggml.lora.objectives.losses`."""

    objective: str = setting(
        "sft",
        "what is minimised: sft learns to write the text, or the answers; dpo and orpo learn from "
        "rows of prompt, chosen and rejected, kto from prompt, completion and label",
        *one_of(OBJECTIVES),
        group="optimiser",
        common=True,
    )
    beta: float = setting(
        0.1,
        "how closely dpo and kto keep to the model as it was; of orpo, its odds ratio's weight",
        "above 0, at most 100",
        lambda x: 0 < x <= 100,
        group="optimiser",
    )
    label_smoothing: float = setting(
        0.0,
        "of dpo: the share of pairs that are taken to be the wrong way round",
        "at least 0 and below 0.5",
        lambda x: 0 <= x < 0.5,
        group="optimiser",
    )
    desirable_weight: float = setting(
        1.0, "of kto: weight of the wanted answers", *_WEIGHT, group="optimiser"
    )
    undesirable_weight: float = setting(
        1.0, "of kto: weight of the others", *_WEIGHT, group="optimiser"
    )

    @property
    def is_preference(self) -> bool:
        return self.objective != "sft"

    def _faults(self) -> list[Fault]:
        faults = super()._faults()
        if not faults:
            faults += [
                (name, f"is for {' and '.join(users)}, not for {self.objective}")
                for name, users in _MEANT_FOR.items()
                if self.objective not in users and getattr(self, name) != getattr(_USUAL, name)
            ]
        return faults


_USUAL = object.__new__(PreferenceConfig)  # the defaults, which are the class's attributes
