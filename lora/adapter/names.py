"""Names of target modules as users of transformers know them → those of the model's file; names of
parts of a model → its tensors."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar

from pyggml.lora.config import LoraConfig
from pyggml.models import Parts

ALL_LINEAR = "all-linear"
PARTS: Mapping[str, tuple[str, ...]] = {  # word → patterns of its tensors
    "norms": ("*norm*", "*_ln.*"),
    "biases": ("*.bias",),
    "embeddings": ("*token_embd", "position_embd", "token_types"),
    "experts": ("ffn_[gud]*exps.*", "ffn_[ud]*_shexp.*", "ffn_gate_shexp.*", "ffn_gate_up_shexp.*"),
    "router": ("ffn_gate_inp.*", "ffn_gate_inp_shexp.*"),
}
# Of positions, of choices by number, and read by nothing: no loss has a slope along them.
FIXED = ("rope_freqs", "rope_factors_*", "exp_probs_b.bias", "blk.0.time_mix_v[012]")
LAST = re.compile(r"last-([1-9]\d{0,4})")  # so many of the model's blocks
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

    pairs = [*class_modules(parts), *((ALL_LINEAR, m) for m in parts.usual_modules)]
    means = {
        word: tuple(dict.fromkeys(m for name, m in pairs if f".{name}".endswith(f".{word}")))
        for word in foreign
    }
    return {word: modules for word, modules in means.items() if modules}


def part_patterns(parts: Parts, words: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The patterns of names of tensors that each word stands for: a part of the model, such as
    norms or last-4, a module by its name in transformers, or the word itself."""
    patterns = {word: PARTS.get(word, (word,)) for word in words}
    n_layer = parts.config.n_layer
    for word in patterns:
        if last := LAST.fullmatch(word):
            first = n_layer - min(int(last[1]), n_layer)
            patterns[word] = tuple(f"blk.{i}.*" for i in range(first, n_layer))
    names = [*parts.weights]
    strange = [w for w, own in patterns.items() if not any(fits(p, n) for p in own for n in names)]
    return patterns | meanings(parts, strange)


def fits(pattern: str, name: str) -> bool:
    """Whether a pattern matches a tensor's name, with or without .weight, or its module's name."""
    short = name.removesuffix(".weight")
    modules = (full.split(".", 2)[-1] for full in (short, name))
    return any(fnmatchcase(n, pattern) for n in (name, short, *modules))


def _by_our_names(
    patterns: Mapping[str, T] | None, ours: Mapping[str, tuple[str, ...]]
) -> dict[str, T] | None:
    if patterns is None:
        return None
    return {name: value for word, value in patterns.items() for name in ours.get(word, (word,))}
