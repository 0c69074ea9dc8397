"""`pyggml inspect --machine`: the CPU, its vector unit and the chosen paths, with reasons."""

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from textwrap import fill

from pyggml import threads
from pyggml.backends.cpu import CPU
from pyggml.cli.terminal.show import plural, row, say, size
from pyggml.errors import DeviceError
from pyggml.graph.dtypes import F32, dtype
from pyggml.jit import CACHE
from pyggml.jit.isa import CHOSEN, ENVIRONMENT, ISAS, cpu_name, why_not
from pyggml.kernels.attention import AttentionProblem as Attention
from pyggml.kernels.attention import backward_path, forward_path
from pyggml.kernels.gemm import FASTEST, FLOATS, Form, Problem, path_of
from pyggml.look.limits import multiply_limit, read_limit
from pyggml.quants import QUANTS
from pyggml.runtime import Devices
from pyggml.runtime.choice import KINDS, backends_of

_TOKENS = (1, 8, 16, 64, 512)
_LABEL = 24  # columns before the paths
_INDENT, _WIDTH = 4 * " ", 80
_SIDE = 2048  # rows and columns of the matrix that is asked about
_HEADS, _KEY_HEADS, _HEAD_SIZE = 16, 8, 128


def say_machine() -> None:
    """The CPU, the vector unit with what was passed over, and the path of each kind of product."""
    row("cpu", f"{cpu_name()}; {plural(os.cpu_count() or 1, 'core')}, "
               f"at most {plural(threads.most(), 'thread')}")  # fmt: skip
    row("vectors", f"{CHOSEN.name}{_forced_note()}: {CHOSEN.lanes} float32 numbers in one")
    better = [*ISAS][: [*ISAS].index(CHOSEN.name)]  # that stand before the chosen one
    for name in [] if _forced_note() else better:
        row("", f"not {name}: {why_not(ISAS[name])}")
    row("compute", f"auto is {FASTEST}; weights that are no whole numbers: {FLOATS}")
    _say_limits("limits", Devices([CPU(FASTEST)]))
    _say_cache()
    _say_devices()
    say()
    say("what computes, by tokens")
    for first, *rest in _alike():
        say(_line(f"  {first} · x", _products("mul_mat", first)))
        say(_line(f"  {first}ᵀ · dy", _products("out_prod", first)))
        if rest:
            text = f"and so {', '.join(rest)}"
            say(fill(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT))
    problems = [_attention(n) for n in _TOKENS]
    say(_line("  attention", [forward_path(p).name for p in problems]))
    say(_line("  attention, backward", [backward_path(p).name for p in problems]))


def _forced_note() -> str:
    return f", which {ENVIRONMENT} asks for" if os.environ.get(ENVIRONMENT) else ""


def _say_limits(label: str, devices: Devices) -> None:
    """Measured now; of this and what was kept the better."""
    products, reads = multiply_limit(devices, dtype("Q8_0"), True), read_limit(devices, True)
    if products is not None and reads is not None:
        rate = f"{products / 1e9:,.3g}" if products < 1e11 else f"{products / 1e9:,.0f}"
        row(label, f"{rate} G operations/s in products of Q8_0, {size(round(reads))}/s from memory")


def _say_cache() -> None:
    if CACHE is None:
        row("kernels", "are compiled by every process: no folder can keep them")
        return
    sizes = [p.stat().st_size for p in Path(CACHE).rglob("*") if p.is_file()]
    row("kernels", f"{size(sum(sizes))} of compiled ones in {CACHE}")


def _say_devices() -> None:
    label = "devices"
    for kind in KINDS.values():
        try:
            for word, about in kind.machine():
                row(label, f"{word}: {about}")
                label = ""
                _say_limits(label, Devices(backends_of(word)))
        except DeviceError as error:
            row(label, str(error))
        label = ""


def _alike() -> list[list[str]]:
    """All weight types; those that the same paths compute are together."""
    together: dict[tuple[str, ...], list[str]] = {}
    for name in QUANTS:
        paths = *_products("mul_mat", name), *_products("out_prod", name)
        together.setdefault(paths, []).append(name)
    return list(together.values())


def _products(form: Form, weight: str) -> list[str]:
    """The path for each number of tokens."""
    problems = (Problem(form, n, _SIDE, _SIDE, dtype(weight), FASTEST) for n in _TOKENS)
    return [path_of(p).name for p in problems]


def _attention(n_tokens: int) -> Attention:
    """Of so many tokens at the end of 512 keys."""
    return Attention(
        n_tokens, _HEADS, max(_TOKENS), _KEY_HEADS, _HEAD_SIZE, _HEAD_SIZE, F32, F32,
        has_extras=False, compute=FASTEST,
    )  # fmt: skip


def _line(label: str, paths: Sequence[str]) -> str:
    """The path of each number of tokens; of neighbours with the same one, that once."""
    runs = [[*run] for _, run in groupby(range(len(paths)), key=lambda i: paths[i])]
    spans = [(_TOKENS[run[0]], _TOKENS[run[-1]], paths[run[0]]) for run in runs]
    cells = [f"{a}: {name}" if a == b else f"{a} to {b}: {name}" for a, b, name in spans]
    text = f"{label:<{_LABEL}}" + "; ".join(cells)
    return fill(text, _WIDTH, subsequent_indent=_LABEL * " ", break_on_hyphens=False)
