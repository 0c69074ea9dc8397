"""Fine-tune LoRA adapters on quantised GGUF models, and look inside while it happens.

stage                verb            from → to
pyggml.gguf          open            file → metadata + memory-mapped tensors
pyggml.lora          attach          model, config → Adapter: A and B of every matched matrix
pyggml.models        build           weights, inputs, adapters → logits Tensor (a graph)
pyggml.backward      build_backward  Graph of a loss, parameters → Graph with its gradients
pyggml.runtime       schedule        Graph, devices → Schedule: what runs where, plans of memory
pyggml.runtime       bind            Schedule → Program: a bound kernel call per node
pyggml.lora.optim    FlatAdamW.step      parameters, gradients → updated in place
pyggml.lora.adapter  Adapter.save    Adapter → GGUF that llama.cpp loads

Between backward and schedule stand passes from graph to graph: what is rounded, and what is
computed again (pyggml.backward). A schedule asks pyggml.alloc for the place of every tensor.

`pyggml.load("model.gguf")` is the short way in. `pyggml.show_run` is what a run shows itself with:
the one thing that the library asks of the command line. `pyggml.eager` computes graphs as they
are built, to learn from and to look at: docs/values.md. Packages are imported when first used, so
that `import pyggml` costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyggml.eager import Value, apply, tensor
    from pyggml.eager.fit import fit
    from pyggml.eager.gradcheck import gradcheck
    from pyggml.eager.own_op import op
    from pyggml.eager.rounding import rounding
    from pyggml.eager.steps import backward_steps
    from pyggml.generation import Sampling, generate
    from pyggml.model import Model, load
    from pyggml.models.edits import At

__version__ = "0.1.0"

_CHECKOUT = Path(__file__).resolve().parents[1]
_BESIDE = {f"pyggml.{name}": _CHECKOUT / name / "__init__.py" for name in ("lora", "cli")}


class _Checkout:
    """Finds pyggml.lora and pyggml.cli where a checkout has them: beside this folder, not in it."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        file = _BESIDE.get(name)
        return spec_from_file_location(name, file) if file else None


if all(file.is_file() for file in (_CHECKOUT / "pyproject.toml", *_BESIDE.values())):
    sys.meta_path.insert(0, _Checkout)  # before those of other checkouts, installed as editable

_WHERE = {
    "Value": "pyggml.eager",
    "apply": "pyggml.eager",
    "backward_steps": "pyggml.eager.steps",
    "fit": "pyggml.eager.fit",
    "gradcheck": "pyggml.eager.gradcheck",
    "op": "pyggml.eager.own_op",
    "rounding": "pyggml.eager.rounding",
    "tensor": "pyggml.eager",
    "At": "pyggml.models.edits",
    "Model": "pyggml.model",
    "load": "pyggml.model",
    "Sampling": "pyggml.generation",
    "generate": "pyggml.generation",
    "show_run": "pyggml.cli.terminal.progress",
}
_MODULES = {
    "functions": "pyggml.eager.functions",
    "lab": "pyggml.lab",
    "lens": "pyggml.look.lens",
    "optim": "pyggml.eager.optim",
    "overview": "pyggml.look.overview",
}
_MODULES |= {
    name: f"pyggml.{name}"
    for name in (
        *("alloc", "backward", "eager", "gguf", "graph", "look", "lora", "models", "ops", "quants"),
        *("runtime", "threads", "tokenizer"),
    )
}

__all__ = ["At", "Model", "Sampling", "Value", "apply", "backward_steps", "fit", "generate"]
__all__ += ["gradcheck", "load", "op", "rounding", "tensor"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'pyggml' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})


def _picture(graph: Any) -> str:
    from pyggml.look.draw import picture

    return picture(graph)


def _show_graphs_as_pictures() -> None:
    """Where IPython runs, as in a notebook: a cell that returns a graph shows its picture."""
    if (ipython := sys.modules.get("IPython")) and (shell := ipython.get_ipython()):
        svg = shell.display_formatter.formatters["image/svg+xml"]
        svg.for_type_by_name("pyggml.graph.graph", "Graph", _picture)


_show_graphs_as_pictures()
