"""GGUF files: `open` maps one, `write` makes one.

    magic "GGUF"   version u32   n_tensors u64   n_kv u64
    n_kv × (key, type u32, value)
    n_tensors × (name, n_dims u32, n_dims × u64 innermost first, type u32, offset u64)
    zeros up to the alignment, then the tensors, each at a multiple of the alignment

All numbers are little-endian. Keys, names and string values are a length u64, then their bytes.
"""

from pyggml.gguf.fields import Field, StringArray, ValueType
from pyggml.gguf.parse import TensorInfo
from pyggml.gguf.reader import GGUFFile, open
from pyggml.gguf.split import KEYS as SPLIT_KEYS
from pyggml.gguf.writer import TensorSource, reserve, write

__all__ = [
    "SPLIT_KEYS", "Field", "GGUFFile", "StringArray", "TensorInfo", "TensorSource", "ValueType",
    "open", "reserve", "write",
]  # fmt: skip
