"""Names of target modules as users of transformers know them → those of the model's file."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from pyggml.lora.config import LoraConfig
from pyggml.models import Parts

ALL_LINEAR = "all-linear"
T = TypeVar("T")


def resolve(parts: Parts, config: LoraConfig) -> LoraConfig:
    """The settings with the file's names in place of those of the model's class in transformers.

    A name, such as q_proj or mlp.down_proj, means every module whose name ends with it, as in
    PEFT. What is known by neither name stays, for `targets` to refuse.
    """
    words = [*(config.modules or ()), *(config.rank_pattern or ()), *(config.alpha_pattern or ())]
    ours = meanings(parts, words)
    if not ours:
        return config
    modules = [ours.get(word, (word,)) for word in config.modules or ()]
    return replace(
        config,
        modules=tuple(dict.fromkeys(name for names in modules for name in names)) or None,
        rank_pattern=_by_our_names(config.rank_pattern, ours),
        alpha_pattern=_by_our_names(config.alpha_pattern, ours),
    )


def meanings(parts: Parts, words: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Of these words, the ones that are no names in the file but name modules of its class, and
    the modules that each means."""
    own = {*parts.decoder.modules, "output", "token_embd"}
    foreign = [word for word in dict.fromkeys(words) if word not in own and "*" not in word]
    if not foreign:
        return {}
    if foreign == [ALL_LINEAR]:
        return {ALL_LINEAR: parts.usual_modules}
    from pyggml.lora.peft.twins import class_modules  # which imports gguf

    known = [*class_modules(parts), *((ALL_LINEAR, m) for m in parts.usual_modules)]
    means = {
        word: tuple(dict.fromkeys(m for name, m in known if f".{name}".endswith(f".{word}")))
        for word in foreign
    }
    return {word: modules for word, modules in means.items() if modules}


def _by_our_names(
    patterns: Mapping[str, T] | None, ours: Mapping[str, tuple[str, ...]]
) -> dict[str, T] | None:
    if patterns is None:
        return None
    return {name: value for word, value in patterns.items() for name in ours.get(word, (word,))}
