"""The tensors of a GGUF model and the modules of transformers that they are.

Names come from gguf's own map, which its converters use. It knows every class's names; the layouts
say which of them are this architecture's.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml.errors import AdapterError
from pyggml.graph.tensor import Shape
from pyggml.lora.peft.layouts import LAYOUTS, Heads, Layout
from pyggml.model import Model
from pyggml.models import Parts

# A module of experts, and its parameters.
EXPERTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
# A module that is two matrices for each head: the first upright, from columns to rows.
_BY_HEAD = {"self_attn.kv_b_proj": ("attn_k_b", "attn_v_b")}
# Likewise where a class has a module for each expert.
_EACH_EXPERT = {f"{x}_proj": (f"ffn_{x}_exps",) for x in ("gate", "up")}
_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,5})\.(.+)")


@dataclass(frozen=True, slots=True)
class ModulePart:
    """A tensor of the file, or some of its rows, as it lies in a module.

    rows      (n_out,): for each row of the tensor its row in the module; of a matrix for each head
              (n_head, n_out)
    columns   (n_in,): for each column likewise
    expert    of a stack of matrices, the number of the one that the module is; else None
    upright   rows and columns of the tensor are columns and rows of the module
    """

    tensor: str
    rows: np.ndarray
    columns: np.ndarray
    expert: int | None = None
    upright: bool = False


@dataclass(frozen=True, slots=True)
class Module:
    """A module of transformers: its name, its shape (n_out, n_in), and the tensors that it is.

    table      whether it is an embedding: (n_rows, n)
    n_expert   of a parameter that is a stack of matrices, their number; else 0
    """

    name: str
    shape: Shape
    parts: tuple[ModulePart, ...]
    table: bool = False
    n_expert: int = 0


class Twins:
    """The modules of a model's class, and the parameters of its experts.

    modules   by name, in the model's order
    layout    their layout
    """

    def __init__(self, model: Model) -> None:
        """AdapterError if transformers has no class for the architecture."""
        architecture = model.config.architecture
        if architecture not in LAYOUTS:
            raise AdapterError(
                f"{model.file.path}: transformers has no class for {architecture!r}, wanted one of "
                f"{', '.join(LAYOUTS)}"
            )
        self.layout = LAYOUTS[architecture]
        self._specs = model.parts.decoder.tensors()
        self._names = _name_map(architecture, model.config.n_blocks)
        modules = [*_modules(model, self.layout, self._names), *_stacks(model, self.layout)]
        self.modules = {m.name: m for m in modules}
        self._by_tensor = {m.parts[0].tensor: m for m in modules if len(m.parts) == 1}

    def find(self, name: str, shape: Shape) -> Module | None:
        """The module that an update of this shape is for, by any name that a class has for it."""
        name = name.replace("language_model.", "")
        if name.endswith((".experts", ".experts.base_layer")):
            return self._stack(name.removesuffix(".base_layer"), shape)
        module = self.modules.get(name) or self._by_tensor.get(self._tensor(name))
        return module or self._expert(name)

    def _tensor(self, name: str) -> str:
        return f"{self._names.get_name(name)}.weight"

    def _stack(self, experts: str, shape: Shape) -> Module | None:
        """A parameter of a module of experts. PEFT names the first of two as the module's base
        layer, and the second or only one as the module, so that the shape must tell."""
        both = (self.modules.get(f"{experts}.{parameter}") for parameter in EXPERTS)
        return next((m for m in both if m is not None and m.shape == shape), None)

    def _expert(self, name: str) -> Module | None:
        """One of the experts, where a class has a module for each: …mlp.experts.3.up_proj."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None
        tensor, i = self._tensor(f"{match[1]}.{match[3]}"), int(match[2])
        shape = self._specs[tensor].shape if tensor in self._specs else ()
        if len(shape) != 3 or i >= shape[0]:
            return None
        part = ModulePart(tensor, np.arange(shape[1]), np.arange(shape[2]), i)
        return Module(name, shape[1:], (part,))


def class_modules(parts: Parts) -> list[tuple[str, str]]:
    """Pairs of a module's name in transformers, behind its layer's number, and one of the modules
    of the file that it is: ("self_attn.q_proj", "attn_q"). Of a class that is not known, all names
    that gguf's converter has for the file's modules."""
    architecture, n_layer = parts.config.architecture, parts.config.n_layer
    try:
        names = _name_map(architecture, parts.config.n_blocks)
    except AdapterError:
        return []
    layout = LAYOUTS.get(architecture)
    if layout is None:
        modules = [(name, tensor) for name, (_, tensor) in names.mapping.items()]
    else:
        modules = [
            (ending, tensor)
            for name, ending, i in _names_of(layout, n_layer)
            for tensor in [f"blk.{i}.{t}" for t in layout.fused.get(ending, ())]
            or [names.get_name(name)]
        ]
        modules += [
            (ending, f"blk.0.{t}") for ending in layout.modules for t in _BY_HEAD.get(ending, ())
        ]
        modules += [
            (f"{layout.experts}.{parameter}", f"blk.0.{t}")
            for parameter, tensors in (EXPERTS | _EACH_EXPERT).items()
            for t in tensors
        ]
    pairs = ((name, (tensor or "").split(".", 2)[-1]) for name, tensor in modules)
    return [*dict.fromkeys((name, m) for name, m in pairs if _has(parts, m))]


def _has(parts: Parts, module: str) -> bool:
    if module in ("output", "token_embd"):
        return f"{module}.weight" in parts.weights
    n_layer = parts.config.n_layer
    return module in parts.decoder.modules and any(
        f"blk.{i}.{module}.weight" in parts.weights for i in range(n_layer)
    )


def _name_map(architecture: str, n_blocks: int) -> Any:
    import gguf

    arch = next((k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture), None)
    if arch is None:
        raise AdapterError(
            f"the installed package gguf does not know {architecture!r}, wanted a newer one"
        )
    return gguf.get_tensor_name_map(arch, n_blocks)


def _modules(model: Model, layout: Layout, names: Any) -> Iterator[Module]:
    """Every module of the class that the file has tensors for."""
    specs, weights = model.parts.decoder.tensors(), model.parts.weights
    for name, ending, i in _names_of(layout, model.config.n_layer):
        by_head = [f"blk.{i}.{t}.weight" for t in _BY_HEAD.get(ending, ())]
        if by_head and all(t in weights for t in by_head):
            yield _of_heads(name, *((t, specs[t].shape) for t in by_head))
            continue
        tensors = [f"blk.{i}.{t}" for t in layout.fused.get(ending, ())] or [names.get_name(name)]
        in_file = [f"{t}.weight" for t in tensors]
        if not all(t in weights and specs[t].update(1) for t in in_file):
            continue
        if len(specs[in_file[0]].shape) != 2:
            continue
        shapes = [specs[t].shape for t in in_file]
        shape = (sum(s[0] for s in shapes), shapes[0][1])
        heads = _heads(model, i)
        rows, columns = np.arange(shape[0]), np.arange(shape[1])
        if ending in layout.columns:
            (columns,) = layout.columns[ending](columns, heads)
        split = layout.rows[ending](rows, heads) if ending in layout.rows else [rows]
        parts = (ModulePart(t, r, columns) for t, r in zip(in_file, split, strict=True))
        yield Module(name, shape, tuple(parts), specs[in_file[0]].table)


def _of_heads(name: str, k: tuple[str, Shape], v: tuple[str, Shape]) -> Module:
    """The module of keys and values of latent attention, whose rows lie by heads."""
    (n_head, rank, n_key), n_value = k[1], v[1][1]
    rows, columns = np.arange(n_head * (n_key + n_value)).reshape(n_head, -1), np.arange(rank)
    parts = (
        ModulePart(k[0], rows[:, :n_key], columns, upright=True),
        ModulePart(v[0], rows[:, n_key:], columns),
    )
    return Module(name, (rows.size, rank), parts)


def _stacks(model: Model, layout: Layout) -> Iterator[Module]:
    """The parameters of all experts."""
    specs = model.parts.decoder.tensors()
    for i in range(model.config.n_layer):
        for parameter, endings in EXPERTS.items():
            if parameter == "gate_up_proj" and f"blk.{i}.ffn_gate_up_exps.weight" in specs:
                endings = ("ffn_gate_up_exps",)
            tensors = [f"blk.{i}.{t}.weight" for t in endings]
            if not all(t in specs for t in tensors):
                continue
            n_expert, n_out, n_in = specs[tensors[0]].shape
            rows = np.arange(n_out * len(tensors))
            split = layout.gate_up(rows, _heads(model, i)) if len(tensors) == 2 else [rows]
            parts = [ModulePart(t, r, np.arange(n_in)) for t, r in zip(tensors, split, strict=True)]
            name = f"{layout.layers}.{i}.{layout.experts}.{parameter}"
            yield Module(name, (len(rows), n_in), tuple(parts), n_expert=n_expert)


def _names_of(layout: Layout, n_layer: int) -> Iterator[tuple[str, str, int]]:
    """Name, what of it stands behind the layer's number, and that number."""
    yield from ((name, name, 0) for name in layout.outer)
    for i in range(n_layer):
        yield from ((f"{layout.layers}.{i}.{ending}", ending, i) for ending in layout.modules)


def _heads(model: Model, i: int) -> Heads:
    def count(key: str, default: int) -> int:
        value = model.file.get(f"{model.config.architecture}.{key}", default)
        if isinstance(value, np.ndarray):
            value = value[i].item()
        return value if isinstance(value, int) else default

    n = count("attention.head_count", 1)
    return Heads(
        n=n,
        n_kv=count("attention.head_count_kv", n),
        n_keys=count("ssm.group_count", 0),
        n_values=count("ssm.time_step_rank", 0),
        size=count("ssm.state_size", 0),
    )
