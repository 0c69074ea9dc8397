"""What the modules of a model's class are, for adapters: see `pyggml.lora.peft.layouts`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyggml.lora.peft.orders import Factor, Order, halves

# A module's tensors, and others that it is in files that lack those.
Tensors = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLayout:
    """A class's modules.

    layers    what stands before the number of a layer
    modules   what stands behind it
    outer     modules outside of layers
    changed   modules that an adapter file cannot update, and why
    rows      module → the order of its rows, if it is another than that of its tensors in turn
    columns   module → the order of its columns, if it is another
    factors   module → what its rows are multiplied by, if they are
    tensors   module → its tensors, where gguf's map does not have them
    experts   the module whose parameters gate_up_proj and down_proj are all experts' matrices; ""
              where parameters are others, which PEFT updates as one matrix
    gate_up   the order of the rows of gate_up_proj: those of the gates, those of the ups
    upright   whether these parameters are (n_expert, n_in, n_out) without PEFT's knowing it
    apart     where each expert is a module of modules, the names of its gate, up and down
    chunks    of experts that are shared by groups of experts, the module
    lists     a list of modules outside of layers → the tensor that is all their matrices
    conv1d    whether the matrices are transformers' Conv1D, stored as (n_in, n_out)
    by_weight  endings of modules that are PEFT's targets by their weight alone: it takes the names
              for those of experts, or cannot wrap what gives two tensors
    warned    endings of modules whose updates PEFT does not apply as they are, and why
    stored    a part of modules' names → that of published files, which transformers renames as it
              loads an adapter
    in_thirds  whether another class of the same files has a module for each of queries, keys and
            values, and parameters that are all experts' matrices: they are read, not written
    """

    layers: str = "model.layers"
    modules: tuple[str, ...]
    outer: tuple[str, ...] = ("model.embed_tokens", "lm_head")
    changed: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, Order] = field(default_factory=dict)
    columns: Mapping[str, Order] = field(default_factory=dict)
    factors: Mapping[str, Factor] = field(default_factory=dict)
    tensors: Mapping[str, Tensors] = field(default_factory=dict)
    experts: str = "mlp.experts"
    gate_up: Order = halves
    upright: bool = False
    apart: tuple[str, str, str] | None = None
    chunks: str = ""
    lists: Mapping[str, str] = field(default_factory=dict)
    conv1d: bool = False
    by_weight: tuple[str, ...] = ()
    warned: Mapping[str, str] = field(default_factory=dict)
    stored: tuple[str, str] = ("", "")
    in_thirds: bool = False
