"""The tensors of a GGUF model and the modules of transformers that they are.

Names come from gguf's own map, which its converters use. It knows nearly every class's names; the
layouts say which of them are this architecture's, and the few that it lacks.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pyggml.errors import AdapterError
from pyggml.graph.tensor import Shape
from pyggml.lora.peft.layout import ModuleLayout
from pyggml.lora.peft.layouts import LAYOUTS, NO_LAYOUT, TOWERS, layout_of
from pyggml.lora.peft.orders import HeadCounts
from pyggml.model import Model
from pyggml.models import Parts

# A module of experts, and its parameters; up_proj is of experts without gates.
EXPERTS = {
    "gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "up_proj": ("ffn_up_exps",),
    "down_proj": ("ffn_down_exps",),
}
# A module that is two matrices for each head: the first upright, from columns to rows.
_BY_HEAD = {"self_attn.kv_b_proj": ("attn_k_b", "attn_v_b")}
# Likewise where a class has a module for each expert.
_PARTS = ("gate", "up", "down")
_EACH_EXPERT = {f"{x}_proj": (f"ffn_{x}_exps",) for x in _PARTS}
_EXPERT = re.compile(r"(.+\.experts)\.(\d{1,5})\.(.+)")
_THIRD = re.compile(r".+\.(\d{1,5})\.self_attn\.([qkv])_proj")


@dataclass(frozen=True, slots=True)
class ModulePart:
    """A tensor of the file, or some of its rows, as it lies in a module.

    rows      (n_out,): for each row of the tensor its row in the module, -1 if that is of another;
              of a matrix for each head (n_head, n_out)
    columns   (n_in,): for each column likewise
    expert    of a stack of matrices, the number of the one that the module is; else None
    upright   rows and columns of the tensor are columns and rows of the module
    factor    (n_out,) of what the rows are multiplied by, if they are
    """

    tensor: str
    rows: np.ndarray
    columns: np.ndarray
    expert: int | None = None
    upright: bool = False
    factor: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Module:
    """A module of transformers: its name, its shape (n_out, n_in), and the tensors that it is.

    table      whether it is an embedding: (n_rows, n)
    n_expert   of a parameter that is a stack of matrices, their number; else 0
    upright    of such a parameter, whether PEFT takes its columns for rows: its A is B
    """

    name: str
    shape: Shape
    parts: tuple[ModulePart, ...]
    table: bool = False
    n_expert: int = 0
    upright: bool = False


class Twins:
    """The modules of a model's class, and the parameters of its experts.

    modules   by name, in the model's order
    layout    their layout
    changed   tensors that an adapter file cannot update, and why
    """

    def __init__(self, model: Model) -> None:
        """AdapterError if no class is known for the architecture."""
        architecture, parts = model.config.architecture, model.parts
        layout = layout_of(architecture, parts.weights)
        if layout is None:
            why = NO_LAYOUT.get(architecture, "no class is known whose modules are its tensors")
            raise AdapterError(
                f"{model.file.path}: adapters of PEFT are not converted for {architecture!r}: "
                f"{why}; wanted one of {', '.join(LAYOUTS)}"
            )
        self.layout, self._model, self._specs = layout, model, parts.decoder.tensors()
        self._names = _names(parts)
        self._unread = frozenset(parts.decoder.unread)
        modules = [*_modules(model, layout, self._names), *_experts(model, layout)]
        lists = ((tensor, f"{name}.{{}}") for name, tensor in layout.lists.items())
        modules += (m for each in lists for m in _each_of(model, *each))
        self.modules = {m.name: m for m in modules}
        self.changed = {self._tensor(name): why for name, why in layout.changed.items()}
        self._by_text = {_of_text(m.name): m for m in modules}
        if layout.in_thirds:
            for i in range(model.config.n_layer):
                stacks = _stacks(model, layout, f"{layout.layers}.{i}.{layout.experts}", i)
                self._by_text.update((m.name, m) for m in stacks)
        self._by_tensor = {
            m.parts[0].tensor: m for m in modules if len(m.parts) == 1 and m.parts[0].expert is None
        }

    def find(self, name: str, shape: Shape) -> Module | None:
        """The module that an update of this shape is for, by any name that a class has for it."""
        name = _of_text(name)
        module = self._by_text.get(name) or self._by_tensor.get(self._tensor(name))
        if module is None and f".{name}".endswith((".experts", ".experts.base_layer")):
            return self._stack(name.removesuffix(".base_layer"), shape)
        return module or self._expert(name) or self._router(name) or self._third(name)

    def change(self, name: str) -> str | None:
        """Why this module cannot be updated, if it cannot."""
        return self.changed.get(self._tensor(_of_text(name)))

    def without_effect(self, name: str) -> str | None:
        """Why a module that the text does not have changes nothing of it; None if it may."""
        if TOWERS & set(name.split(".")):
            return "for pictures or sound"
        if self._tensor(_of_text(name)) in self._unread:
            return "of a layer that has the keys of another"
        return None

    def _tensor(self, name: str) -> str:
        return f"{self._names.get(name)}.weight"

    def _stack(self, experts: str, shape: Shape) -> Module | None:
        """A parameter of a module of experts. PEFT names the first of two as the module's base
        layer, and the second or only one as the module, so that the shape must tell."""
        both = (self._by_text.get(f"{experts}.{parameter}") for parameter in EXPERTS)
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
        return _whole(name, tensor, *shape[1:], i)

    def _router(self, name: str) -> Module | None:
        """The router of a mixture, which is a module in some versions of a class."""
        tensor = self._tensor(name)
        if not tensor.endswith(".ffn_gate_inp.weight") or tensor not in self._specs:
            return None
        return _whole(name, tensor, *self._specs[tensor].shape)

    def _third(self, name: str) -> Module | None:
        """The queries, keys or values of a file's attn_qkv, where a class has a module for each."""
        match = _THIRD.fullmatch(name) if self.layout.in_thirds else None
        tensor = f"blk.{match[1]}.attn_qkv.weight" if match else ""
        if match is None or tensor not in self._specs:
            return None
        n_rows, n_in = self._specs[tensor].shape
        heads = _heads(self._model, int(match[1]))
        sizes = np.array([heads.n, heads.n_kv, heads.n_kv]) * (n_rows // (heads.n + 2 * heads.n_kv))
        which = "qkv".index(match[2])
        rows, at = np.full(n_rows, -1), sizes[:which].sum()
        rows[at : at + sizes[which]] = np.arange(sizes[which])
        return Module(name, (int(sizes[which]), n_in), (ModulePart(tensor, rows, np.arange(n_in)),))


def _of_text(name: str) -> str:
    """A module's name without that of the text model within one that reads pictures."""
    return name.replace("language_model.", "")


def class_modules(parts: Parts) -> list[tuple[str, str]]:
    """Pairs of a module's name in transformers, behind its layer's number, and one of the modules
    of the file that it is: ("self_attn.q_proj", "attn_q"). Of a class that is not known, all names
    that gguf's converter has for the file's modules."""
    layout, names = layout_of(parts.config.architecture, parts.weights), _names(parts)
    modules = names.items() if layout is None else _pairs(parts, layout, names)
    pairs = ((name, (tensor or "").split(".", 2)[-1]) for name, tensor in modules)
    return [*dict.fromkeys((name, m) for name, m in pairs if _has(parts, m))]


def _pairs(
    parts: Parts, layout: ModuleLayout, names: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Names of a layout's modules, and of tensors that they are."""
    for name, ending, i in _names_of(layout, parts.config.n_layer):
        for tensor in _tensors(layout, names, parts, name, ending, i):
            yield ending, tensor
    for ending in layout.modules:
        yield from ((ending, f"blk.0.{t}") for t in _BY_HEAD.get(ending, ()))
    each = EXPERTS | _EACH_EXPERT
    if layout.apart:
        each = {x: (f"ffn_{y}_exps",) for x, y in zip(layout.apart, _PARTS, strict=True)}
    for parameter, tensors in each.items():
        yield from ((f"{layout.experts}.{parameter}", f"blk.0.{t}") for t in tensors)


def _has(parts: Parts, module: str) -> bool:
    if module in ("output", "token_embd"):
        return f"{module}.weight" in parts.weights
    n_layer = parts.config.n_layer
    return module in parts.decoder.modules and any(
        f"blk.{i}.{module}.weight" in parts.weights for i in range(n_layer)
    )


def _names(parts: Parts) -> dict[str, str]:
    """Every name that a class has for a module of the file → the module, as in "blk.0.attn_q".

    gguf's map of an architecture, or of one that the package does not know yet what its map of all
    has for these modules.
    """
    import gguf

    n_blocks, architecture = parts.config.n_blocks, parts.config.architecture
    arch = next((k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture), None)
    if arch is not None:
        mapping = gguf.get_tensor_name_map(arch, n_blocks).mapping
        return {name: module for name, (_, module) in mapping.items()}
    own = {*parts.decoder.modules, "token_embd", "output"}
    every = gguf.TensorNameMap.mappings_cfg.items(), gguf.TensorNameMap.block_mappings_cfg.items()
    return {
        name.format(bid=i): gguf.TENSOR_NAMES[tensor].format(bid=i)
        for i in range(n_blocks)
        for of_kind in every
        for tensor, names in of_kind
        if gguf.TENSOR_NAMES[tensor].rpartition(".")[2] in own
        for name in names
    }


def _tensors(
    layout: ModuleLayout, names: Mapping[str, str], parts: Parts, name: str, ending: str, i: int
) -> list[str]:
    """The tensors of a module of this layer, without ".weight"."""
    at = "" if name == ending else f"blk.{i}."
    for fused in layout.tensors.get(ending, ()):
        if all(f"{at}{t}.weight" in parts.weights for t in fused):
            return [f"{at}{t}" for t in fused]
    tensor = names.get(_of_text(name))
    return [tensor] if tensor and ending not in layout.tensors else []


def _modules(model: Model, layout: ModuleLayout, names: Mapping[str, str]) -> Iterator[Module]:
    """Every module of the class that the file has tensors for."""
    specs, weights = model.parts.decoder.tensors(), model.parts.weights
    for name, ending, i in _names_of(layout, model.config.n_layer):
        if name in layout.changed:
            continue
        by_head = [f"blk.{i}.{t}.weight" for t in _BY_HEAD.get(ending, ())]
        if by_head and all(t in weights for t in by_head):
            yield _of_heads(name, *((t, specs[t].shape) for t in by_head))
            continue
        tensors = _tensors(layout, names, model.parts, name, ending, i)
        in_file = [f"{t}.weight" for t in tensors]
        if not in_file or not all(t in weights and specs[t].update(1) for t in in_file):
            continue
        if len(specs[in_file[0]].shape) != 2:
            continue
        sizes = [specs[t].shape[0] for t in in_file]
        shape = (sum(sizes), specs[in_file[0]].shape[1])
        heads, factor = _heads(model, i), layout.factors.get(ending)
        rows, columns = np.arange(shape[0]), np.arange(shape[1])
        if ending in layout.columns:
            (columns,) = layout.columns[ending](columns, heads)
        order = layout.rows.get(ending)
        split = order(rows, heads) if order else np.split(rows, np.cumsum(sizes)[:-1])
        parts = (
            ModulePart(t, r, columns, factor=factor(r, heads) if factor else None)
            for t, r in zip(in_file, split, strict=True)
        )
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


def _experts(model: Model, layout: ModuleLayout) -> Iterator[Module]:
    """The parameters of all experts, or the modules of each."""
    both = {layout.experts: "exps", layout.chunks: "chexps"}
    for i in range(model.config.n_layer):
        for experts, kind in both.items():
            if not experts:
                continue
            at = f"{layout.layers}.{i}.{experts}"
            if layout.apart is None:
                yield from _stacks(model, layout, at, i)
                continue
            for x, name in zip(_PARTS, layout.apart, strict=True):
                yield from _each_of(model, f"blk.{i}.ffn_{x}_{kind}", f"{at}.{{}}.{name}")


def _each_of(model: Model, tensor: str, name: str) -> Iterator[Module]:
    """A module for each matrix of a stack, if the file has it."""
    specs = model.parts.decoder.tensors()
    if f"{tensor}.weight" in specs:
        n, n_out, n_in = specs[f"{tensor}.weight"].shape
        yield from (_whole(name.format(i), f"{tensor}.weight", n_out, n_in, i) for i in range(n))


def _whole(name: str, tensor: str, n_out: int, n_in: int, expert: int | None = None) -> Module:
    """The module that is a tensor, or one matrix of a stack."""
    part = ModulePart(tensor, np.arange(n_out), np.arange(n_in), expert)
    return Module(name, (n_out, n_in), (part,))


def _stacks(model: Model, layout: ModuleLayout, at: str, i: int) -> Iterator[Module]:
    specs = model.parts.decoder.tensors()
    for parameter, endings in EXPERTS.items():
        if parameter == "gate_up_proj" and f"blk.{i}.ffn_gate_up_exps.weight" in specs:
            endings = ("ffn_gate_up_exps",)
        tensors = [f"blk.{i}.{t}.weight" for t in endings]
        gated = parameter == "up_proj" and f"blk.{i}.ffn_gate_exps.weight" in specs
        if gated or not all(t in specs for t in tensors):
            continue
        n_expert, n_out, n_in = specs[tensors[0]].shape
        rows = np.arange(n_out * len(tensors))
        split = layout.gate_up(rows, _heads(model, i)) if len(tensors) == 2 else [rows]
        parts = (ModulePart(t, r, np.arange(n_in)) for t, r in zip(tensors, split, strict=True))
        shape = (n_in, len(rows)) if layout.upright else (len(rows), n_in)
        yield Module(f"{at}.{parameter}", shape, tuple(parts), False, n_expert, layout.upright)


def _names_of(layout: ModuleLayout, n_layer: int) -> Iterator[tuple[str, str, int]]:
    """Name, what of it stands behind the layer's number, and that number."""
    yield from ((name, name, 0) for name in layout.outer)
    for i in range(n_layer):
        yield from ((f"{layout.layers}.{i}.{ending}", ending, i) for ending in layout.modules)


def _heads(model: Model, i: int) -> HeadCounts:
    def count(key: str, default: int) -> int:
        value = model.file.get(f"{model.config.architecture}.{key}", default)
        if isinstance(value, np.ndarray):
            value = value[i].item()
        return value if isinstance(value, int) else default

    n = count("attention.head_count", 1)
    return HeadCounts(
        n=n,
        n_kv=count("attention.head_count_kv", n),
        n_keys=count("ssm.group_count", 0),
        n_values=count("ssm.time_step_rank", 0),
        size=count("ssm.state_size", 0),
        layer=i,
        rescale_every=count("rescale_every_n_layers", 0),
    )
