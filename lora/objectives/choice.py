"""The settings of all objectives as one: what a command line and a settings file hold.

A setting of several objectives has one option. Its help tells what it means to each, and its
default is that of the objective that is chosen.
"""

from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, make_dataclass
from typing import Any, cast

import numpy as np

from pyggml.errors import Fault
from pyggml.lora.objectives import OBJECTIVES, USUAL, Objective
from pyggml.settings import Settings, of_optimiser, one_of

_BRIEFLY = 5  # objectives that a short help names
_ROWS = {
    "training": "",
    "pairs": "From rows of prompt, chosen and rejected: ",
    "labels": "From rows of prompt, completion and label: ",
    "prompts": "From prompts: ",
    "classes": "From rows of text and label: ",
    "groups": "From rows of anchor and positive: ",
}


def _purposes() -> str:
    """Every objective and what it learns from which rows, for help."""
    by_rows: dict[str, list[str]] = {}
    for kind in OBJECTIVES.values():
        by_rows.setdefault(kind.rows, []).append(f"{kind.name} {kind.purpose}")
    parts = [_ROWS[rows] + "; ".join(purposes) for rows, purposes in by_rows.items()]
    return f"training objective: {'. '.join(parts)}"


def _users() -> dict[str, dict[str, Field[Any]]]:
    """Each setting, and its field in every objective that has it."""
    users: dict[str, dict[str, Field[Any]]] = {}
    for kind in OBJECTIVES.values():
        for each in fields(kind):
            users.setdefault(each.name, {})[kind.name] = each
    return users


USERS = _users()


def _join_fields(of: Mapping[str, Field[Any]]) -> Field[Any]:
    """One setting of several objectives: None stands for each one's default."""
    meanings: dict[str, list[str]] = {}
    for name, each in of.items():
        meanings.setdefault(each.metadata["help"], []).append(name)
    first = next(iter(of.values()))
    help = "; ".join(f"of {_alternatives(names)}, {text}" for text, names in meanings.items())
    default = _in_words({n: f.default for n, f in of.items() if f.default not in ((), "")})
    metadata = {**first.metadata, "help": help, "default": default, "like": first.default}
    return cast("Field[Any]", field(default=cast(Any, None), metadata=metadata))


def _in_words(defaults: Mapping[str, Any]) -> str:
    """A default by objective: 2e-4 of sft, else 2e-5; 0.1 of those that have it."""
    by_value: dict[Any, list[str]] = {}
    for name, value in defaults.items():
        by_value.setdefault(value, []).append(name)
    rest = max(by_value, key=lambda value: len(by_value[value])) if len(by_value) > 1 else None
    apart = [f"{_short(v)} of {_alternatives(of)}" for v, of in by_value.items() if v != rest]
    return ", ".join(apart if rest is None else [*apart, f"else {_short(rest)}"])


def _short(value: Any) -> str:
    """2e-4, 0.1."""
    few = isinstance(value, float) and 0 < value < 1e-3
    return np.format_float_scientific(value, trim="-", exp_digits=1) if few else f"{value}"


def defaults_of_runs() -> dict[str, str]:
    """The settings of runs that have a default by objective, and these in words."""
    by_name: dict[str, dict[str, float]] = {}
    for kind in OBJECTIVES.values():
        for name, value in kind.defaults.items():
            by_name.setdefault(name, {})[kind.name] = value
    for_all = {name: set(of.values()) for name, of in by_name.items() if len(of) == len(OBJECTIVES)}
    alike = {name: f"{values.pop()}" for name, values in for_all.items() if len(values) == 1}
    return {name: alike.get(name) or _in_words(of) for name, of in by_name.items()}


def _alternatives(names: list[str]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last


@dataclass(frozen=True, kw_only=True)
class _Chosen(Settings):
    """The objective, by its name."""

    objective: str = of_optimiser(
        USUAL.name,
        _purposes(),
        *one_of(tuple(OBJECTIVES)),
        common=True,
        brief=f"{', '.join([*OBJECTIVES][:_BRIEFLY])}, …",
    )

    def _faults(self) -> list[Fault]:
        return super()._faults() or list(self._unused_settings())

    def _unused_settings(self) -> Iterator[Fault]:
        """Settings of other objectives, unless they have their defaults."""
        for name, of in USERS.items():
            value = getattr(self, name)
            defaults = [f.default for f in of.values()]
            if self.objective not in of and value is not None and value not in defaults:
                yield name, f"is for {_alternatives([*of])}, not for {self.objective}"

    def build(self) -> Objective:
        """The objective with its settings. Raises ConfigError for one that is out of range."""
        kind = OBJECTIVES[self.objective]
        values = {f.name: getattr(self, f.name) for f in fields(kind)}
        return kind(**{name: value for name, value in values.items() if value is not None})


_FIRST = {name: next(iter(of.values())).default for name, of in USERS.items()}
_SHARED = [(name, type(_FIRST[name]) | None, _join_fields(of)) for name, of in USERS.items()]
ObjectiveConfig = make_dataclass(
    "ObjectiveConfig", _SHARED, bases=(_Chosen,), frozen=True, kw_only=True
)
ObjectiveConfig.__doc__ = "The choice of an objective, and the settings of all."


def objective_of(name: str, **settings: Any) -> Objective:
    """An objective by its name. Raises ConfigError for a setting that it lacks or out of range."""
    config = ObjectiveConfig(objective=name, **settings)
    assert isinstance(config, _Chosen)
    return config.build()


def usual() -> dict[str, Any]:
    """What held in runs that are older than a setting: the objective and the settings of all."""
    return {"objective": USUAL.name, **_FIRST}
