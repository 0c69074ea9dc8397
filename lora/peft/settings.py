"""adapter_config.json: PEFT's settings of an adapter, read and checked, or written."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

from pyggml.errors import AdapterError, cause_of
from pyggml.files import open_regular
from pyggml.models.config import short

NAME = "adapter_config.json"
_MOST_BYTES = 1 << 20
_MOST_PATTERN = 200  # characters; names of modules are shorter
# A repeated group may take exponential time to fit; PEFT's own patterns are names.
_SLOW = re.compile(r"\)\s*[*+{?]")
# Starts that change the base model's weights: the adapter alone is only half of such a result.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_MERGE = "merge it in PEFT (merge_and_unload) and convert the whole model"
# Setting -> what else than its usual value means, and what to do then.
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "use_dora": ((None, False), f"an adapter file has no place for DoRA's magnitudes: {_MERGE}"),
    "modules_to_save": (
        (None, []),
        f"an adapter file has no place for whole modules: {_MERGE}, or train without them",
    ),
    "bias": ((None, "none"), f"an adapter file has no place for biases: {_MERGE}"),
    "lora_bias": ((None, False), f"an adapter file has no place for biases: {_MERGE}"),
    "trainable_token_indices": (
        (None, [], {}),
        f"an adapter file has no place for single tokens: {_MERGE}",
    ),
    "layer_replication": ((None, []), "the base has its layers once; wanted none"),
    "alora_invocation_tokens": (
        (None, []),
        "it works from these tokens on only; wanted an adapter of all tokens",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """What of PEFT's LoraConfig says how large each update is.

    Patterns are regular expressions for the end of a module's name; the first that fits counts.
    """

    rank: int
    alpha: float
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        return _fitting(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """The factor of BA: alpha / r, or alpha / √r."""
        rank, alpha = self.rank_of(module), _fitting(self.alpha_pattern, module, self.alpha)
        return alpha / (sqrt(rank) if self.rslora else rank)


def _fitting(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    names = (module, f"{module}.weight")  # that of a parameter, where one is the target
    values = (
        v for key, v in patterns.items() if any(re.match(rf"(.*\.)?({key})$", n) for n in names)
    )
    return next(values, default)


def read(folder: Path) -> UpdateSettings:
    """The settings of a PEFT folder. AdapterError names all that an adapter file cannot hold."""
    path = folder / NAME
    settings = _json(path)
    faults = [
        f"{key} is {short(settings[key])}, but {why}"
        for key, (usual, why) in _REFUSED.items()
        if key in settings and settings[key] not in usual
    ]
    kind, start = settings.get("peft_type", "LORA"), settings.get("init_lora_weights")
    if kind != "LORA":
        faults.append(f"peft_type is {short(kind)}, wanted 'LORA'")
    if isinstance(start, str) and start.startswith(_CHANGED_BASE):
        faults.append(
            f"init_lora_weights is {short(start)}, which changes the base model: save it in PEFT "
            "with path_initial_model_for_weight_conversion, which makes it a plain adapter"
        )
    rank = _number(settings, "r", faults, whole=True)
    alpha = _number(settings, "lora_alpha", faults)
    rank_pattern = _patterns(settings, "rank_pattern", faults, whole=True)
    alpha_pattern = _patterns(settings, "alpha_pattern", faults)
    if faults:
        raise AdapterError(faults, f"{path}: ")
    return UpdateSettings(
        rank=int(rank),
        alpha=alpha,
        rslora=settings.get("use_rslora") is True,
        rank_pattern={k: int(v) for k, v in rank_pattern.items()},
        alpha_pattern=alpha_pattern,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise AdapterError(f"{path}: has {path.stat().st_size} bytes, wanted a few thousand")
        with open_regular(path) as file:
            value = json.loads(file.read(_MOST_BYTES).decode())
    except OSError as error:
        raise AdapterError(f"{path}: cannot be read: {cause_of(error)}") from None
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise AdapterError(f"{path}: is {short(value)}, wanted an object of settings")
    return value


def _number(settings: Mapping[str, Any], key: str, faults: list[str], whole: bool = False) -> float:
    value = settings.get(key)
    kinds = int if whole else (int, float)
    if isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < 1e9:
        return float(value)
    was = short(value) if key in settings else "missing"
    faults.append(f"{key} is {was}, wanted {'a whole' if whole else 'a'} number above 0")
    return 1.0


def _patterns(
    settings: Mapping[str, Any], key: str, faults: list[str], whole: bool = False
) -> dict[str, float]:
    patterns = settings.get(key) or {}
    if not isinstance(patterns, dict):
        faults.append(f"{key} is {short(patterns)}, wanted numbers by pattern")
        return {}
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            faults.append(f"{key} has {short(pattern)}, which is no pattern: {error}")
        if len(pattern) > _MOST_PATTERN or _SLOW.search(pattern):
            faults.append(f"{key} has {short(pattern)}, wanted one without repeated groups")
    return {pattern: _number(patterns, pattern, faults, whole) for pattern in patterns}


def write(path: Path, ranks: Mapping[str, int], scales: Mapping[str, float], **more: Any) -> None:
    """The settings of updates of these ranks and scales, by module; alphas are scale · rank."""
    alphas = {name: _as_int(scales[name] * rank) for name, rank in ranks.items()}
    rank, alpha = (Counter(v.values()).most_common(1)[0][0] for v in (ranks, alphas))
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {re.escape(n): r for n, r in ranks.items() if r != rank},
        "alpha_pattern": {re.escape(n): a for n, a in alphas.items() if a != alpha},
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
        **more,
    }
    path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def _as_int(alpha: float) -> float:
    assert isfinite(alpha)
    return int(alpha) if alpha == int(alpha) else alpha
