"""The golden files of a peer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from peers.peer import Arrays, Peer

# Endings of tensors with several axes that are no matrices of products.
IN_F32 = (
    "norm.weight",
    "position_embd.weight",
    "conv1d.weight",
    "shortconv.conv.weight",
    "ssm_a",
    "ssm_d",
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    "exps.bias",
)
GOLDEN = Path(__file__).parents[2] / "golden/peers"


def save(folder: Path, peer: Peer, found: tuple[Arrays, Arrays]) -> Path:
    """NAME.gguf with matrices in F16, and NAME.npz; returns the path of the first."""
    arrays, values = found
    path = folder / f"{peer.name}.gguf"
    halves = {n: a.astype(np.float16) if in_halves(n, a) else a for n, a in arrays.items()}
    write(path, peer.metadata(), halves)
    np.savez_compressed(folder / f"{peer.name}.npz", **values)
    return path


def in_halves(name: str, array: np.ndarray) -> bool:
    """Whether the converter writes a tensor as F16: matrices, but not those in IN_F32."""
    return array.ndim > 1 and not name.endswith(IN_F32)


def write(path: Path, metadata: Mapping[str, Any], arrays: Arrays) -> None:
    """A file by gguf's own writer, which owes nothing to pyggml's."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in metadata.items():
        if key != "general.architecture":
            getattr(writer, f"add_{kinds[type(value)]}")(key, value)
    for name, array in arrays.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
