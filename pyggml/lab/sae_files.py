"""Sparse coders in SAELens' files: a folder with cfg.json and sae_weights.safetensors.

architecture                     here                           tensors
standard, transcoder             Relu                           W_enc b_enc W_dec b_dec
topk, topk_transcoder            TopK, cfg.json has k           the same
jumprelu, jumprelu_transcoder    JumpRelu                       and threshold

Names of activations are TransformerLens' there: blk.3.out is blocks.3.hook_resid_post. SAELens has
no topk_transcoder, and refuses it by that name.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from pyggml.errors import ModelError, cause_of
from pyggml.files import new_folder, read_bytes
from pyggml.files.json_text import DECODER, reason_of
from pyggml.files.safe_tensors import FLOATS, StoredTensor, stored_tensors
from pyggml.gguf.fields import brief
from pyggml.lab.sparse import Activate, JumpRelu, Relu, SparseCoder, TopK

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
_VERSION = "6.0.0"  # whose files these are; in those of earlier ones there are no metadata
_MOST_SETTINGS = 1 << 20  # bytes
_MOST_SIDE, _MOST_NUMBERS = 1 << 24, 1 << 31
_KINDS = {"standard": "relu", "topk": "topk", "jumprelu": "jumprelu"}
_AUTOENCODERS = {kind: name for name, kind in _KINDS.items()}
_TRANSCODERS = {"relu": "transcoder", "topk": "topk_transcoder", "jumprelu": "jumprelu_transcoder"}
_KINDS |= {name: kind for kind, name in _TRANSCODERS.items()}
_HOOKS = {
    "out": "hook_resid_post",
    "mid": "hook_resid_mid",
    "attn_out": "hook_attn_out",
    "attention": "attn.hook_z",
    "ffn_norm": "mlp.hook_in",
    "ffn_neurons": "mlp.hook_post",
    "ffn_out": "hook_mlp_out",
}
_OURS = re.compile(r"blk\.([0-9]{1,6})\.(.+)")
_BLOCK = re.compile(r"blocks\.([0-9]{1,6})\.(.+)")


def write_coder(coder: SparseCoder, path: str | os.PathLike[str]) -> None:
    """Write a new folder that SAELens loads: `SAE.load_from_disk(path)`. PyggmlError if it is there
    already, or the disk refuses."""
    from safetensors.numpy import save

    kind, n_out = coder.activate.name, len(coder.b_dec)
    transcodes = coder.reads != coder.writes or len(coder.w_enc) != n_out
    settings: dict[str, Any] = {
        "architecture": (_TRANSCODERS if transcodes else _AUTOENCODERS)[kind],
        "d_in": len(coder.w_enc),
        "d_sae": coder.n_features,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": coder.centred,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {"sae_lens_version": _VERSION, "hook_name": hook_of(coder.reads)},
    }
    if transcodes:
        settings["d_out"] = n_out
        settings["metadata"]["hook_name_out"] = hook_of(coder.writes)
    arrays = {"W_enc": coder.w_enc, "b_enc": coder.b_enc, "W_dec": coder.w_dec}
    arrays["b_dec"] = coder.b_dec
    if isinstance(coder.activate, TopK):
        settings["k"] = coder.activate.k
    elif isinstance(coder.activate, JumpRelu):
        arrays["threshold"] = coder.activate.threshold
    contiguous = {name: np.ascontiguousarray(a, np.float32) for name, a in arrays.items()}
    with new_folder(path) as folder:
        (folder / CONFIG).write_text(json.dumps(settings, indent=2), encoding="utf-8")
        (folder / WEIGHTS).write_bytes(save(contiguous))


def read_coder(path: str | os.PathLike[str]) -> SparseCoder:
    """The coder in a folder of SAELens. ModelError, naming the faults, for what cannot be read, for
    architectures and settings that are not known here, and for tensors that do not fit."""
    folder = Path(path)
    settings = _settings(folder / CONFIG)
    kind = _KINDS[settings["architecture"]]
    transcodes = settings["architecture"].endswith("transcoder")
    shapes = _shapes(settings, kind, transcodes)
    t = _tensors(folder / WEIGHTS, shapes)
    if settings.get("rescale_acts_by_decoder_norm"):  # the same with directions of length 1
        lengths = np.maximum(np.linalg.norm(t["W_dec"], axis=1), 1e-12)
        t["W_enc"], t["b_enc"] = t["W_enc"] * lengths, t["b_enc"] * lengths
        t["W_dec"] = t["W_dec"] / lengths[:, None]
    activate: Activate = Relu()
    if kind == "topk":
        activate = TopK(settings["k"])
    elif kind == "jumprelu":
        activate = JumpRelu(t["threshold"])
    about = settings | settings.get("metadata", {})
    reads = activation_of(about.get("hook_name", about.get("hook_point")))
    writes = activation_of(about.get("hook_name_out")) if transcodes else reads
    centred = settings.get("apply_b_dec_to_input", not transcodes)
    return SparseCoder(
        reads, writes, activate, t["W_enc"], t["b_enc"], t["W_dec"], t["b_dec"], centred
    )


def hook_of(name: str) -> str:
    """TransformerLens' name of an activation; others stay as they are."""
    match = _OURS.fullmatch(name)
    if match and match[2] in _HOOKS:
        return f"blocks.{match[1]}.{_HOOKS[match[2]]}"
    return "hook_embed" if name == "token_embd" else name


def activation_of(hook: object) -> str:
    """The activation of this name in TransformerLens; others stay as they are, and "" for none."""
    if not isinstance(hook, str):
        return ""
    match = _BLOCK.fullmatch(hook)
    parts = {theirs: ours for ours, theirs in _HOOKS.items()} | {"hook_mlp_in": "ffn_norm"}
    if match and match[2] in parts:
        return f"blk.{int(match[1])}.{parts[match[2]]}"
    if match and match[2] == "hook_resid_pre" and int(match[1]):
        return f"blk.{int(match[1]) - 1}.out"
    return "token_embd" if hook in ("hook_embed", "blocks.0.hook_resid_pre") else hook


# -- what a file says, checked ---------------------------------------------------------------------


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = DECODER.decode(read_bytes(path, _MOST_SETTINGS).decode("utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {cause_of(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is no JSON: {reason_of(error)}") from None
    if not isinstance(settings, dict):
        raise ModelError(f"{path}: holds no object")
    faults = [*_faults(settings)]
    if faults:
        raise ModelError(faults, f"{path}: ")
    return settings


def _faults(settings: dict[str, Any]) -> list[str]:
    """What is wrong with the settings."""
    faults, architecture = [], settings.setdefault("architecture", "standard")
    function = settings.get("activation_fn", settings.get("activation_fn_str", "relu"))
    if architecture == "standard" and function != "relu":
        faults.append(f"activation_fn is {function!r:.60}, wanted 'relu'")
    if not isinstance(architecture, str) or architecture not in _KINDS:
        faults.append(f"architecture is {architecture!r:.60}, known are {', '.join(_KINDS)}")
    sides = ["d_in", "d_sae", *(["d_out"] if "transcoder" in str(architecture) else [])]
    if architecture in ("topk", "topk_transcoder"):
        sides.append("k")
    for name in sides:
        n = settings.get(name)
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= _MOST_SIDE:
            faults.append(f"{name} is {n!r:.60}, wanted 1 to {_MOST_SIDE:,}")
    if not faults and settings.get("k", 1) > settings["d_sae"]:
        faults.append(f"k is {settings['k']}, wanted at most the {settings['d_sae']} of d_sae")
    norm = settings.get("normalize_activations", "none")
    if norm not in ("none", None, False):
        faults.append(f"normalize_activations is {norm!r:.60}: fold it into the weights first")
    faults += [
        f"{name} is {settings[name]!r:.60}, wanted true or false"
        for name in ("apply_b_dec_to_input", "rescale_acts_by_decoder_norm")
        if not isinstance(settings.get(name, False), bool)
    ]
    if "transcoder" in str(architecture) and settings.get("apply_b_dec_to_input"):
        faults.append("a transcoder has apply_b_dec_to_input, whose bias is of its output")
    if not isinstance(settings.get("metadata", {}), dict):
        faults.append("metadata is no object")
    return faults


def _shapes(settings: dict[str, Any], kind: str, transcodes: bool) -> dict[str, tuple[int, ...]]:
    n_in, n = settings["d_in"], settings["d_sae"]
    n_out = settings["d_out"] if transcodes else n_in
    shapes = {"W_enc": (n_in, n), "b_enc": (n,), "W_dec": (n, n_out), "b_dec": (n_out,)}
    return shapes | ({"threshold": (n,)} if kind == "jumprelu" else {})


def _tensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    n_numbers = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())
    if n_numbers > _MOST_NUMBERS:
        raise ModelError(f"{path}: {n_numbers:,} numbers, wanted at most {_MOST_NUMBERS:,}")
    try:
        stored = stored_tensors(path, 4 * n_numbers + (1 << 16))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {cause_of(error)}") from None
    except ValueError as error:
        raise ModelError(f"{path}: is no safetensors file: {error}") from None
    faults = [f"tensor {brief(name)} is not known" for name in stored if name not in shapes]
    for name, shape in shapes.items():
        if fault := _tensor_fault(stored.get(name), shape):
            faults.append(f"{name} {fault}")
    if faults:
        raise ModelError(faults[:10], f"{path}: ")
    return {name: stored[name].floats() for name in shapes}


def _tensor_fault(stored: StoredTensor | None, shape: tuple[int, ...]) -> str:
    if stored is None:
        return "is not there"
    if stored.dtype not in FLOATS or stored.shape != shape:
        return f"is {stored.dtype} {stored.shape}, wanted one of {', '.join(FLOATS)}, {shape}"
    return "" if np.isfinite(stored.floats()).all() else "is not finite"
