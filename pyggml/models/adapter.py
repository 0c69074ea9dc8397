"""LoRA adapters in llama.cpp's file format, read as updates of a model's tensors.

keys      general.type = "adapter", adapter.type = "lora", general.architecture of the base model,
          adapter.lora.alpha
tensors   NAME.lora_a (r, n_in) and NAME.lora_b (n_out, r) for a base tensor NAME; experts have a
          leading axis n_expert; the token embedding has (n_vocab, r) and (n_embd, r)
update    y += alpha / r · B(A x); the factor is 1 if alpha is 0 or missing

Two keys of our own, which others ignore, tell how training may go on; tensors come in their order:

pyggml.lora.alphas        float64 array: each tensor's own alpha, where they differ. B is written
                          times own alpha / adapter.lora.alpha and read back divided by it.
pyggml.lora.fixed_ranks   int32 array: so many of a tensor's last ranks are not to be trained
"""

import os
from dataclasses import replace

import numpy as np

from pyggml import gguf
from pyggml.backends.cpu import read
from pyggml.errors import AdapterError
from pyggml.graph.tensor import Tensor, leaf
from pyggml.models.build import Parts
from pyggml.models.config import short
from pyggml.models.low_rank import LoraPair
from pyggml.models.weights import TensorSpec
from pyggml.quants import QUANTS, dequantize

SUFFIXES = (".lora_a", ".lora_b")
ALPHAS, FIXED_RANKS = "pyggml.lora.alphas", "pyggml.lora.fixed_ranks"
_INVOCATION = "adapter.alora.invocation_tokens"
TIED = (
    "this model's output matrix is its token embedding, and llama.cpp would apply an update of the "
    "one to the other as well, whose shapes do not fit"
)


def read_adapter(path: str | os.PathLike[str], parts: Parts) -> dict[str, LoraPair]:
    """An adapter file's updates, copied as F32: full name of the base tensor -> update.

    Raises AdapterError with the misfits between adapter and model, at most ten.
    """
    with gguf.open(path) as file:
        faults = _wrong_kind(file, parts)
        if any(fault.startswith("general.type") for fault in faults):  # no tensor would fit either
            raise AdapterError(f"{path}: " + "; ".join(faults))
        alpha = file.get("adapter.lora.alpha", 0.0)
        if not isinstance(alpha, float) or not np.isfinite(alpha):
            faults.append(f"adapter.lora.alpha is {short(alpha)}, wanted a finite float")
            alpha = 0.0
        if not file.tensors:
            faults.append("there are no tensors, wanted an A and a B of at least one matrix")
        pairs = {}
        specs = parts.decoder.tensors()
        for base in _bases(file, faults):
            a, b = (file.tensors[base + s] for s in SUFFIXES)
            fault = _misfit(base, a, b, parts, specs.get(base))
            if fault:
                faults.append(fault)
            else:
                scale = alpha / b.shape[-1] if alpha else 1.0
                pairs[base] = LoraPair(_leaf(file, a.name), _leaf(file, b.name), scale)
        if not faults:
            pairs = _with_own_alphas(file, pairs, alpha, faults)
            pairs = _with_fixed_ranks(file, pairs, faults)
    if faults:
        raise AdapterError(f"{path}: " + "; ".join(faults[:10]))
    return pairs


def _wrong_kind(file: gguf.GGUFFile, parts: Parts) -> list[str]:
    wanted = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "general.architecture": parts.config.architecture,
    }
    given = {key: file.get(key) for key in wanted}
    faults = [
        f"{key} is {'missing' if given[key] is None else short(given[key])}, wanted {value!r}"
        for key, value in wanted.items()
        if not isinstance(given[key], str) or given[key] != value
    ]
    if _INVOCATION in file.metadata:
        faults.append(
            f"{_INVOCATION} is there, wanted an adapter of all tokens: this one works from such "
            "tokens on only"
        )
    return faults


def _bases(file: gguf.GGUFFile, faults: list[str]) -> list[str]:
    """Names of base tensors with both A and B. A tensor without its partner is a fault, as in
    llama.cpp."""
    bases = []
    for name in file.tensors:
        base, suffix = name[:-7], name[-7:]
        if suffix not in SUFFIXES:
            faults.append(f"{name[:60]} is neither a lora_a nor a lora_b")
        elif base + SUFFIXES[suffix == SUFFIXES[0]] not in file.tensors:
            faults.append(f"{name[:60]} has no partner, wanted a lora_a and a lora_b")
        elif suffix == SUFFIXES[0]:
            bases.append(base)
    return bases


def _misfit(
    base: str, a: gguf.TensorInfo, b: gguf.TensorInfo, parts: Parts, spec: TensorSpec | None
) -> str | None:
    if spec is None or base not in parts.weights:
        return f"{base[:60]} is no tensor of the model"
    wanted = spec.update(b.shape[-1])
    if wanted is None:
        return f"{base[:60]} is no linear module, so an update of it would have no effect"
    if base == f"{parts.output_name}.weight" and spec.table:
        return f"{base}: {TIED}"
    if (a.shape, b.shape) != wanted:
        return f"{base}: A {a.shape} and B {b.shape} do not make {spec.shape}"
    if a.dtype.name not in QUANTS or b.dtype.name not in QUANTS:
        return f"{base}: types {a.dtype} and {b.dtype}, known are {', '.join(QUANTS)}"
    return None


def _with_own_alphas(
    file: gguf.GGUFFile, pairs: dict[str, LoraPair], alpha: float, faults: list[str]
) -> dict[str, LoraPair]:
    """The same updates, as they were before B was written for one alpha."""
    alphas = _own(file, ALPHAS, np.float64, len(pairs), faults)
    if alphas is None or not alpha:
        return pairs
    if not (np.isfinite(alphas).all() and (alphas > 0).all()):
        faults.append(f"{ALPHAS} is not finite and above 0")
        return pairs
    return {
        base: replace(p, b=_divide(p.b, own / alpha), scale=float(own) / p.rank)
        for (base, p), own in zip(pairs.items(), alphas, strict=True)
    }


def _with_fixed_ranks(
    file: gguf.GGUFFile, pairs: dict[str, LoraPair], faults: list[str]
) -> dict[str, LoraPair]:
    fixed = _own(file, FIXED_RANKS, np.int32, len(pairs), faults)
    if fixed is None:
        return pairs
    for (base, p), n in zip(pairs.items(), fixed, strict=True):
        matrix = p.a.shape[0] == p.b.shape[-1] and len(p.a.shape) == 2
        if n and not (matrix and 0 < n < p.rank):
            faults.append(f"{FIXED_RANKS} is {n} for {base}, wanted less than its rank {p.rank}")
    return {b: replace(p, n_fixed=int(n)) for (b, p), n in zip(pairs.items(), fixed, strict=True)}


def _own(
    file: gguf.GGUFFile, key: str, kind: type[np.generic], n: int, faults: list[str]
) -> np.ndarray | None:
    """An array of ours, if it is there."""
    value = file.get(key)
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.dtype == kind and value.shape == (n,):
        return value
    faults.append(f"{key} is {short(value)}, wanted an array of {n} {np.dtype(kind)}")
    return None


def _divide(t: Tensor, by: float) -> Tensor:
    return leaf(read(t) / np.float32(by), t.name)


def _leaf(file: gguf.GGUFFile, name: str) -> Tensor:
    info = file.tensors[name]
    return leaf(np.array(dequantize(file.data(name), info.dtype.name), np.float32), name)
