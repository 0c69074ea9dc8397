"""`pyggml combine`: several adapters of a model → one adapter, and what its rank leaves out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import pyggml.threads
from pyggml import gguf, load
from pyggml.cli.terminal.chat_templates import choose_template
from pyggml.cli.terminal.exit import end_if_signalled
from pyggml.cli.terminal.help import grouped_command, grouped_option
from pyggml.cli.terminal.kinds import ADAPTER
from pyggml.cli.terminal.options import (
    ADAPTERS,
    adapter_word,
    given_settings,
    model_option,
    output_option,
    settings_options,
    threads_option,
)
from pyggml.cli.terminal.progress import ChangingLine
from pyggml.cli.terminal.show import percent, row, say, with_size
from pyggml.lora import Combination, combine

_LORA: dict[str, Any] = {**ADAPTERS, "required": True}


class TensorLine:
    """One line that changes on a terminal, nothing elsewhere."""

    def __init__(self) -> None:
        self._line = ChangingLine()

    def __call__(self, done: int, n: int) -> None:
        end_if_signalled()
        self._line.show(f"{done} of {n} tensors" if done < n else "")


@grouped_command(
    "combine",
    "pyggml combine -m m.gguf --lora a.gguf:0.7 --lora b.gguf:0.3 -o both.gguf",
    "pyggml combine -m m.gguf --lora a.gguf --lora b.gguf -o both.gguf --method ties",
    "pyggml combine -m m.gguf --lora large.gguf -o small.gguf --error 0.1",
    params=[*settings_options(Combination, {})],
)
@model_option
@grouped_option("model", "--lora", "adapter, and its weight; several", **_LORA)
@output_option(ADAPTER, "adapter to write")
@threads_option
def command(
    model: Path, lora: tuple[tuple[Path, float], ...], output: Path, threads: int, **given: Any
) -> None:
    """Make one adapter of several, as llama.cpp loads it; says what its rank leaves out."""
    how = Combination(**given_settings(Combination, {}, given))
    pyggml.threads.set(threads)
    opened = load(model, [*lora])
    choice = choose_template(opened.tokenizer, lora, None)
    left_out = combine(opened, output, how, choice.metadata, TensorLine())
    if any(left_out.values()):
        mean, most = mean_and_most(left_out)
        row("rank", f"{ranks_of(output)} leaves {mean} out, root mean square; {most}")
    row("adapter", with_size(output))
    say(f"of {', '.join(adapter_word(given) for given in lora)}")
    choice.say()


def mean_and_most(left_out: Mapping[str, float]) -> tuple[str, str]:
    """The shares that tensors lose, in words: their root mean square, and the largest."""
    worst = max(left_out, key=lambda name: left_out[name])
    mean = float(np.sqrt(np.mean(np.square([*left_out.values()]))))
    return percent(mean), f"most {percent(left_out[worst])}, {worst}"


def ranks_of(adapter: Path) -> str:
    """8; or 3 to 8."""
    with gguf.open(adapter) as file:
        ranks = [t.shape[-1] for t in file.tensors.values() if t.name.endswith(".lora_b")]
    return " to ".join(str(rank) for rank in {min(ranks): 0, max(ranks): 0})
