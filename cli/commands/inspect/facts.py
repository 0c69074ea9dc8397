"""What a GGUF file is and says of itself, as plain values: the keys of `pyggml inspect --json`."""

from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np

from pyggml.cli.commands.inspect.fold import fold
from pyggml.gguf import Field, GGUFFile, StringArray
from pyggml.models.weights import is_zero
from pyggml.requantize.imatrix import read_imatrix

Facts = dict[str, Any]

_FIRST = 8  # elements of a long array that are kept
_WHOLE = 16  # elements up to which an array is kept whole
_SPECIAL = ("bos", "eos", "eot", "unknown", "padding", "separator", "mask")
# What a template writes around messages, which names its family.
_FAMILIES = {
    "<|im_start|>": "ChatML",
    "<|start_header_id|>": "Llama 3",
    "<|header_start|>": "Llama 4",
    "<start_of_turn>": "Gemma",
    "<|turn>": "Gemma 4",
    "<|START_OF_TURN_TOKEN|>": "Command R",
    "<|start_of_role|>": "Granite",
    "<｜User｜>": "DeepSeek",
    "<|channel|>": "Harmony (gpt-oss)",
    "[|assistant|]": "EXAONE",
    "[gMASK]": "GLM",
    "[INST]": "Mistral",
    "<|user|>": "Phi-3 or Zephyr",
    "### Response": "Alpaca",
}


def facts(file: GGUFFile) -> Facts:
    """What can be said of any file, also of one whose architecture is unknown."""
    kind = kind_of(file)
    metadata = {key: {"type": field.kind, **_value(field)} for key, field in file.metadata.items()}
    values: Facts = {"file": _file(file, kind), "metadata": metadata}
    if kind == "model":
        values["model"] = _model(file)
    if kind == "adapter":
        values["adapter"] = _adapter(file)
    if kind == "imatrix":
        values["imatrix"] = _imatrix(file)
    values["tensors"] = {"n": len(file.tensors), "types": types(file), "groups": fold(file.tensors)}
    values["tensors"]["zeros"] = [
        name for name, t in file.tensors.items() if len(t.shape) > 1 and is_zero(file.data(name))
    ]
    if "tokenizer.ggml.model" in file.metadata:
        values["tokenizer"] = _tokenizer(file)
    template = _template(file)
    return values | ({"chat_template": template} if template else {})


def dat_facts(path: Path) -> Facts:
    """The same of an importance matrix in llama.cpp's older format, which is no GGUF file. Raises
    GGUFError if it is none either."""
    matrix = read_imatrix(path)
    about = {"path": str(path), "paths": [str(path)], "kind": "imatrix", "version": None}
    return {
        "file": {**about, "n_bytes": path.stat().st_size, "alignment": None},
        "metadata": {},
        "imatrix": {
            "datasets": list(matrix.datasets)[:_WHOLE],
            "chunk_count": matrix.n_chunks,
            "chunk_size": matrix.n_ctx,
            "n_matrices": len(matrix.sums),
        },
        "tensors": {"n": 0, "types": [], "groups": [], "zeros": []},
    }


def kind_of(file: GGUFFile) -> str:
    """ "model", "adapter", "imatrix", "controlvector", "vocabulary", its own word, or "other"."""
    said = file.get("general.type")
    if isinstance(said, str) and said != "model":
        return said[:40]
    if "token_embd.weight" in file.tensors:
        return "model"
    if file.word("general.architecture") == "controlvector":
        return "controlvector"
    has_tokens = "tokenizer.ggml.model" in file.metadata
    return "vocabulary" if has_tokens and not file.tensors else "other"


def types(file: GGUFFile) -> list[Facts]:
    """The types of its tensors by share of the bytes, largest first."""
    totals: dict[str, list[int]] = {}
    for t in file.tensors.values():
        sums = totals.setdefault(t.dtype.name, [0, 0, 0])
        for i, n in enumerate((1, prod(t.shape), t.n_bytes)):
            sums[i] += n
    whole = max(sum(n_bytes for *_, n_bytes in totals.values()), 1)
    names = ("n", "n_parameters", "n_bytes")
    rows = [
        {"type": name, **dict(zip(names, sums, strict=True)), "share": sums[2] / whole}
        for name, sums in totals.items()
    ]
    return sorted(rows, key=lambda row: -row["n_bytes"])


def _file(file: GGUFFile, kind: str) -> Facts:
    return {
        "path": str(file.path),
        "paths": [str(p) for p in file.paths],
        "kind": kind,
        "version": file.version,
        "n_bytes": file.n_bytes,
        "alignment": file.alignment,
    }


def _value(field: Field) -> Facts:
    """A value as JSON has it; of a long array, its length and first elements."""
    value = field.value
    if not isinstance(value, StringArray | np.ndarray):
        return {"value": _plain(value)}
    n = len(value)
    items = [_plain(x) for x in value[: n if n <= _WHOLE else _FIRST]]
    return {"value": items} if n <= _WHOLE else {"n": n, "first": items}


def _plain(x: Any) -> Any:
    x = x.item() if isinstance(x, np.generic) else x
    return str(x) if isinstance(x, float) and not isfinite(x) else x


# -- models -------------------------------------------------------------------------------------


def _model(file: GGUFFile) -> Facts:
    architecture = file.get("general.architecture")
    prefix = f"{architecture}."
    own = {k.removeprefix(prefix): f for k, f in file.metadata.items() if k.startswith(prefix)}
    return {
        "name": _text(file, "general.name"),
        "architecture": architecture if isinstance(architecture, str) else None,
        "n_parameters": sum(prod(t.shape) for t in file.tensors.values()),
        "n_vocab": file.tensors["token_embd.weight"].shape[0],
        "tied": "output.weight" not in file.tensors,
        "hyperparameters": {key: _short(field) for key, field in own.items()},
    }


def _short(field: Field) -> Any:
    """A value of a hyperparameter; an array whole, as it has one number a layer."""
    value = field.value
    if isinstance(value, StringArray | np.ndarray):
        return [_plain(x) for x in value[:1024]]
    return _plain(value)


def _text(file: GGUFFile, key: str) -> str | None:
    value = file.get(key)
    return value if isinstance(value, str) else None


# -- vocabularies and templates -------------------------------------------------------------------


def _tokenizer(file: GGUFFile) -> Facts:
    tokens = file.get("tokenizer.ggml.tokens")
    texts = tokens if isinstance(tokens, StringArray) else None
    values: Facts = {
        "model": _text(file, "tokenizer.ggml.model"),
        "pre": _text(file, "tokenizer.ggml.pre"),
        "n_tokens": None if texts is None else len(texts),
        "special": {},
    }
    for name in _SPECIAL:
        id = file.get(f"tokenizer.ggml.{name}_token_id")
        if type(id) is int:
            is_listed = texts is not None and 0 <= id < len(texts)
            values["special"][name] = {"id": id, "text": texts[id] if is_listed and texts else None}
    for flag in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        value = file.get(f"tokenizer.ggml.{flag}")
        if isinstance(value, bool):
            values[flag] = value
    return values


def _template(file: GGUFFile) -> Facts | None:
    text = _text(file, "tokenizer.chat_template")
    if text is None:
        return None
    prefix = "tokenizer.chat_template."
    templates = [key.removeprefix(prefix) for key in file.metadata if key.startswith(prefix)]
    return {"family": family(text), "n_characters": len(text), "others": templates, "text": text}


def family(template: str) -> str | None:
    """The name of a template's family, by what it writes around messages; None if not known."""
    return next((name for mark, name in _FAMILIES.items() if mark in template), None)


# -- adapters and importance matrices -------------------------------------------------------------


def _adapter(file: GGUFFile) -> Facts:
    ranks: dict[str, list[int]] = {}
    for name, t in file.tensors.items():
        base, suffix = name[:-7], name[-7:]
        if suffix == ".lora_b" and base + ".lora_a" in file.tensors:
            module = base.removesuffix(".weight").split(".", 2)[-1]
            ranks.setdefault(module, []).append(t.shape[-1])
    alpha = file.get("adapter.lora.alpha")
    return {
        "type": _text(file, "adapter.type"),
        "name": _text(file, "general.name"),
        "architecture": _text(file, "general.architecture"),
        "alpha": _plain(alpha) if isinstance(alpha, float) else None,
        "n_parameters": sum(prod(t.shape) for t in file.tensors.values()),
        "n_tensors_adapted": sum(map(len, ranks.values())),
        "modules": {module: sorted(set(each)) for module, each in ranks.items()},
    }


def _imatrix(file: GGUFFile) -> Facts:
    datasets = file.get("imatrix.datasets")
    counts = {k: file.get(f"imatrix.{k}") for k in ("chunk_count", "chunk_size")}
    return {
        "datasets": list(datasets)[:_WHOLE] if isinstance(datasets, StringArray) else [],
        **{k: v if type(v) is int else None for k, v in counts.items()},
        "n_matrices": sum(name.endswith(".in_sum2") for name in file.tensors),
    }
