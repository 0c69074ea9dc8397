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
import warnings
from dataclasses import replace

import numpy as np

from pyggml import gguf
from pyggml.errors import AdapterError, first_names
from pyggml.files import in_characters
from pyggml.gguf.identity import Identity
from pyggml.graph.arrays import read
from pyggml.graph.tensor import Tensor, leaf
from pyggml.models.build import Parts
from pyggml.models.config import short
from pyggml.models.low_rank import LoraPair, LoraPairs
from pyggml.models.pooling import POOLED
from pyggml.models.stack import BASE, LABELS, POOLING, FilePairs, digest, read_below
from pyggml.models.weights import TensorSpec
from pyggml.quants import QUANTS, dequantize
from pyggml.tokenizer.metadata import template_in

Path = str | os.PathLike[str]
AdapterFile = Path | tuple[Path, float]  # a file, or a file and its weight
SUFFIXES = (".lora_a", ".lora_b")
ALPHAS, FIXED_RANKS = "pyggml.lora.alphas", "pyggml.lora.fixed_ranks"
BASE_NAME = "general.base_model.0.name"
_NORM = "_norm.weight"
_LARGEST = float(np.finfo(np.float32).max)
_INVOCATION = "adapter.alora.invocation_tokens"
TIED = (
    "this model's output matrix is its token embedding, and llama.cpp would apply an update of the "
    "one to the other as well, whose shapes do not fit"
)


def read_weighted(given: AdapterFile, parts: Parts) -> LoraPairs:
    """The updates of a file, times its weight. Raises AdapterError as `read_adapter` does, and for
    a weight that is no number, or none that float32 holds."""
    path, weight = given if isinstance(given, tuple) else (given, 1.0)
    if not isinstance(weight, int | float) or not abs(weight) <= _LARGEST:
        raise AdapterError(f"{path}: its weight is {short(weight)}, wanted a number of float32")
    pairs = read_adapter(path, parts)
    return pairs if weight == 1 else pairs.times(weight)


def read_adapter(path: Path, parts: Parts) -> FilePairs:
    """An adapter file's updates, copied as F32: full name of the base tensor -> update.

    Norm vectors beside them are passed over, as in llama.cpp, with a warning. Raises AdapterError:
    that the adapter was made for another model, or with the misfits, at most ten.
    """
    with gguf.open(path) as file:
        faults = _wrong_kind(file)
        if any(fault.startswith("general.type") for fault in faults):  # no tensor would fit either
            raise AdapterError(f"{path}: " + "; ".join(faults))
        _check_architecture(file, parts)
        alpha = _alpha(file, faults)
        if not file.tensors:
            faults.append("there are no tensors, wanted an A and a B of at least one matrix")
        bases = _bases(file, faults)
        misfits = _misfits(file, bases, parts)
        about = _another_model(file) if bases and len(misfits) > len(bases) / 2 else ""
        faults += misfits
        if not faults:
            pairs = FilePairs(_pairs(file, bases, alpha, faults))
            pairs.name, pairs.below = in_characters(file.path.name), read_below(file)
            pairs.base, pairs.chats = Identity.of(file.get(BASE)), template_in(file)
            pairs.labels = file.get(LABELS)
            pairs.pooling = pooling_in(file, faults)
    if faults:
        raise AdapterError(f"{path}: {about}" + "; ".join(faults[:10]))
    return pairs


def pooling_in(file: gguf.GGUFFile, faults: list[str]) -> str | None:
    """How texts become vectors, if the file says so."""
    pooling = file.get(POOLING)
    if pooling is None or (isinstance(pooling, str) and pooling in POOLED):
        return pooling
    faults.append(f"{POOLING} is {short(pooling)}, wanted one of {', '.join(POOLED)}")
    return None


def file_digest(path: str | os.PathLike[str]) -> str:
    """The digest of an adapter file's updates, without a model."""
    with gguf.open(path) as file:
        faults: list[str] = []
        pairs = _pairs(file, _bases(file, faults), _alpha(file, faults), faults)
    if faults:
        raise AdapterError(f"{path}: " + "; ".join(faults[:10]))
    return digest(pairs)


def _alpha(file: gguf.GGUFFile, faults: list[str]) -> float:
    alpha = file.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, float) and np.isfinite(alpha):
        return alpha
    faults.append(f"adapter.lora.alpha is {short(alpha)}, wanted a finite float")
    return 0.0


def _pairs(
    file: gguf.GGUFFile, bases: list[str], alpha: float, faults: list[str]
) -> dict[str, LoraPair]:
    pairs = {}
    for base in bases:
        a, b = (file.tensors[base + s] for s in SUFFIXES)
        scale = alpha / b.shape[-1] if alpha else 1.0
        pairs[base] = LoraPair(_leaf(file, a.name), _leaf(file, b.name), scale)
    return _with_fixed_ranks(file, _with_own_alphas(file, pairs, alpha, faults), faults)


def _misfits(file: gguf.GGUFFile, bases: list[str], parts: Parts) -> list[str]:
    specs = parts.decoder.tensors()
    infos = {base: [file.tensors[base + s] for s in SUFFIXES] for base in bases}
    faults = (_misfit(base, a, b, parts, specs.get(base)) for base, (a, b) in infos.items())
    return [fault for fault in faults if fault]


def _another_model(file: gguf.GGUFFile) -> str:
    """The beginning of a sentence: which model the adapter says that it was made for."""
    names = (file.get(key) for key in (BASE_NAME, "general.name"))
    name = next((short(name) for name in names if isinstance(name, str)), "which it does not name")
    return f"was made for another model, {name}: "


def _check_architecture(file: gguf.GGUFFile, parts: Parts) -> None:
    """AdapterError if the adapter is for models of another architecture."""
    key, of_model = "general.architecture", parts.config.architecture
    stored = file.get(key)
    if not isinstance(stored, str) or stored != of_model:
        there = "missing" if stored is None else short(stored)
        about = _another_model(file)
        raise AdapterError(f"{file.path}: {about}{key} is {there}, wanted {of_model!r}")


def _wrong_kind(file: gguf.GGUFFile) -> list[str]:
    kinds = {"general.type": "adapter", "adapter.type": "lora"}
    values = {key: file.get(key) for key in kinds}
    faults = [
        f"{key} is {'missing' if values[key] is None else short(values[key])}, wanted {value!r}"
        for key, value in kinds.items()
        if not isinstance(values[key], str) or values[key] != value
    ]
    if faults and "token_embd.weight" in file.tensors:
        faults.append("it is a whole model: open it by itself, nothing is to be added to another")
    if _INVOCATION in file.metadata:
        faults.append(
            f"{_INVOCATION} is there, wanted an adapter of all tokens: this one works from such "
            "tokens on only"
        )
    return faults


def _bases(file: gguf.GGUFFile, faults: list[str]) -> list[str]:
    """Names of base tensors with both A and B. A tensor without its partner is a fault, as in
    llama.cpp, which passes over norm vectors."""
    bases = []
    norms = [name for name in file.tensors if name.endswith(_NORM)]
    if norms:
        named = first_names([name[:60] for name in norms])
        warnings.warn(
            f"{file.path}: holds {named}: norms are passed over, as in llama.cpp",
            RuntimeWarning,
            stacklevel=2,
        )
    for name in file.tensors:
        base, suffix = name[:-7], name[-7:]
        if name.endswith(_NORM):
            continue
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
    shapes = spec.update(b.shape[-1])
    if shapes is None:
        return f"{base[:60]} is no linear module, so an update of it would have no effect"
    if base == f"{parts.output_name}.weight" and spec.table:
        return f"{base}: {TIED}"
    if (a.shape, b.shape) != shapes:
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
