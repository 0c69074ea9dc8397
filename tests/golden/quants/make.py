"""Make ggml.npz and mix.json with llama.cpp, through llama-cpp-python.

ggml.npz   `x` float32 (rows, 512) and, for each type that needs no importance, its bytes by
           `ggml_quantize_chunk` (Q8_1: by `quantize_row_q8_1_ref`)
weighted.npz   `x` float32 (rows, 512), `importance` (512,) and the bytes with it, for types that
           weight their fits
mix.json   `choices`: weight types, in the order of `file_types`. Per model: what the rules ask
           about it, and per tensor its shape and the numbers of the choices that
           `llama_model_quantize` makes without an importance matrix and with one

    python make.py FOLDER      the folder holds the *-F16.gguf files whose tensors are listed; of
                               gemma4 a small model of zeros (pyggml.models.small)
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

TYPES = {
    **{"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q8_1": 9, "Q2_K": 10},
    **{"Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30},
    **{"TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39, "NVFP4": 40, "Q1_0": 41, "Q2_0": 42},
    **{"IQ3_S": 21, "IQ3_XXS": 18, "IQ2_S": 22, "IQ1_M": 29},
}
BY_IMPORTANCE = {"IQ2_XXS": 16, "IQ2_XS": 17, "IQ1_S": 19}
WEIGHTED = [
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
    *("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
]
FILE_TYPES = {
    **{"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10},
    **{"Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16},
    **{"Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32, "TQ1_0": 36},
    **{"TQ2_0": 37, "MXFP4_MOE": 38, "Q2_0": 41, "Q2_K_S": 21, "IQ3_M": 27, "IQ3_S": 26},
    **{"IQ3_XS": 22, "IQ3_XXS": 23, "IQ2_M": 29, "IQ2_S": 28, "IQ2_XS": 20},
    **{"IQ2_XXS": 19, "IQ1_M": 31, "IQ1_S": 24},
}
# architecture, layers, heads, KV heads, length of a row, experts, whether output.weight is there
SYNTHETIC = {
    "70b": ("llama", 80, 8, 1, 256, 0, True),
    "65b": ("llama", 80, 8, 8, 256, 0, True),
    "qwen2-72b": ("qwen2", 80, 8, 1, 256, 0, True),
    "31-layers": ("llama", 31, 8, 2, 256, 0, True),
    "33-layers-8-experts": ("llama", 33, 4, 2, 512, 8, True),
    "12-layers-4-experts": ("llama", 12, 4, 2, 256, 4, True),
    "rows-of-96": ("llama", 10, 4, 2, 96, 0, True),
    "rows-of-48": ("llama", 10, 4, 2, 48, 0, True),
    "tied-rows-of-288": ("qwen2", 28, 4, 2, 288, 0, False),
    "falcon": ("falcon", 32, 4, 4, 256, 0, True),
    "tied-falcon": ("falcon", 60, 8, 2, 256, 0, False),
}
HERE = Path(__file__).parent


def samples() -> np.ndarray:
    """Rows of every sort that quantisation meets: (n, 512) float32."""
    rng = np.random.default_rng(7)
    normal = rng.standard_normal((6, 512))
    parts = [
        normal,
        rng.standard_t(2, (6, 512)),
        abs(normal[:2]),
        -abs(normal[:2]),
        normal[:2] * (rng.random((2, 512)) < 0.05),
        normal[:2] * 10.0 ** rng.integers(-12, 4, (2, 512)),
        rng.integers(-3, 4, (2, 512)),
        np.full((1, 512), 0.37),
        np.zeros((1, 512)),
        *(normal[:1] * scale for scale in (1e4, 1e-5, 1e-7, 2e-37, 1e-40)),
    ]
    return np.concatenate(parts).astype(np.float32)


def packed(x: np.ndarray, number: int, importance: np.ndarray | None = None) -> np.ndarray:
    """x as ggml packs it."""
    library = next((Path(llama_cpp.__file__).parent / "lib").glob("*ggml-base.*"))
    ggml = ctypes.CDLL(str(library))
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    out = np.zeros((len(x), x.shape[1] * 2), np.uint8)  # room for the longest, F16
    if number == TYPES["Q8_1"]:
        ggml.quantize_row_q8_1_ref(pointer(x.ctypes.data), pointer(out.ctypes.data), long(x.size))
        return out.reshape(-1)[: x.size // 32 * 36].reshape(len(x), -1).copy()
    chunk = ggml.ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [ctypes.c_int, pointer, pointer, long, long, long, pointer]
    weights = None if importance is None else importance.ctypes.data
    n = chunk(number, x.ctypes.data, out.ctypes.data, 0, len(x), x.shape[1], weights)
    return out.reshape(-1)[:n].reshape(len(x), -1).copy()


def write_synthetic(path: Path, spec: tuple[Any, ...]) -> None:
    """A model of zeros, with just the tensors that the rules tell apart."""
    architecture, n_layer, n_head, n_head_kv, n_in, n_expert, untied = spec
    w = gguf.GGUFWriter(path, architecture)
    w.add_block_count(n_layer)
    w.add_context_length(64)
    w.add_embedding_length(n_in)
    w.add_feed_forward_length(64)
    w.add_head_count(n_head)
    w.add_head_count_kv(n_head_kv)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_layer_norm_eps(1e-5)
    w.add_vocab_size(8)
    if n_expert:
        w.add_expert_count(n_expert)
        w.add_expert_used_count(2)
    shape = (4, n_in)
    for name in ("token_embd.weight", *(("output.weight",) if untied else ())):
        w.add_tensor(name, np.zeros(shape, np.float16))
    for i in range(n_layer):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            w.add_tensor(f"blk.{i}.{name}.weight", np.zeros(shape, np.float16))
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            if n_expert:
                experts = np.zeros((n_expert, *shape), np.float16)
                w.add_tensor(f"blk.{i}.{name}_exps.weight", experts)
            ending = "_shexp.weight" if n_expert else ".weight"
            w.add_tensor(f"blk.{i}.{name}{ending}", np.zeros(shape, np.float16))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def quantised_types(path: Path, file_type: int, importance: bool) -> dict[str, str]:
    """The type that `llama_model_quantize` would give each tensor."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.dry_run = file_type, True
    entry = llama_cpp.llama_model_imatrix_data
    one = (ctypes.c_float * 1)(1)
    if importance:  # of no tensor: the rules ask only whether there is one
        params.imatrix = (entry * 2)(entry(b"none", one, 1), entry(None, None, 0))
    said: list[str] = []
    log = llama_cpp.llama_log_callback(lambda _level, text, _data: said.append(text.decode()))
    llama_cpp.llama_log_set(log, None)
    if llama_cpp.llama_model_quantize(str(path).encode(), b"", params):
        raise RuntimeError(f"llama.cpp cannot quantise {path} as file type {file_type}")
    lines = re.findall(r"\] (\S+) +- \[.*?type = +(\w+), .*?MiB(?:.*\((\w+)\))?\n", "".join(said))
    return {name: (new or old).upper() for name, old, new in lines}


def record(path: Path, choices: dict[str, int]) -> dict[str, Any]:
    """One model's entry in mix.json; new choices get numbers."""
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()

    def number(key: str) -> int:
        field = reader.fields.get(f"{architecture}.{key}")
        value = field.contents() if field else 0
        return int(value[0] if isinstance(value, list) else value)

    types = [[quantised_types(path, n, known) for n in FILE_TYPES.values()] for known in (0, 1)]

    def chosen(name: str) -> list[int]:
        lines = (" ".join(found[name] for found in each) for each in types)
        return [choices.setdefault(line, len(choices)) for line in lines]

    return {
        "model": {
            "architecture": architecture,
            "n_layer": number("block_count") * max(number("num_loops"), 1),
            "n_head": number("attention.head_count"),
            "n_head_kv": number("attention.head_count_kv"),
            "n_expert": number("expert_count"),
        },
        "tensors": {
            t.name: [[int(n) for n in t.shape[::-1]], *chosen(t.name)] for t in reader.tensors
        },
    }


def weighted() -> None:
    """Columns of importance 0, equal and of every size; rows of every sort, none too large."""
    rng = np.random.default_rng(8)
    x = samples()[[0, 1, 6, 7, 8, 12, 14, 15, 16, 17, 20, 21, 22]]
    x[6:8] *= np.float32(1e-3)
    importance = rng.chisquare(1, 512).astype(np.float32)
    importance[[3, 40, 300]] = 0, 0, 50
    importance[64:128] = 0.5
    numbers = TYPES | BY_IMPORTANCE
    arrays = {name: packed(x, numbers[name], importance) for name in WEIGHTED}
    np.savez_compressed(HERE / "weighted.npz", x=x, importance=importance, **arrays)


def main(folder: Path) -> None:
    x = samples()
    arrays = {name: packed(x, number) for name, number in TYPES.items()}
    np.savez_compressed(HERE / "ggml.npz", x=x, **arrays)
    weighted()

    choices: dict[str, int] = {}
    models = {
        p.stem.removesuffix("-F16"): record(p, choices) for p in sorted(folder.glob("*-F16.gguf"))
    }
    with tempfile.TemporaryDirectory() as temporary:
        for name, spec in SYNTHETIC.items():
            path = Path(temporary) / f"{name}.gguf"
            write_synthetic(path, spec)
            models[name] = record(path, choices)
    found = {"file_types": list(FILE_TYPES), "choices": list(choices), "models": models}
    text = json.dumps(found, separators=(",", ":"))
    text = text.replace('"blk.', '\n"blk.')  # lines, for diffs
    (HERE / "mix.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
