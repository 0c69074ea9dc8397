"""Files of safetensors: tensors by name, of a file that is not larger than it may be."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from pyggml.files.reading import read_bytes

FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # types that `floats` reads, as they lie there


class StoredTensor(NamedTuple):
    """A tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    raw: bytes

    def floats(self) -> np.ndarray:
        """Its numbers, float32. KeyError for a type that is none of FLOATS."""
        numbers = np.frombuffer(self.raw, FLOATS[self.dtype])
        if self.dtype == "BF16":
            numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
        return numbers.astype(np.float32).reshape(self.shape)


def stored_tensors(path: Path, most_bytes: int) -> dict[str, StoredTensor]:
    """The tensors of a file by name. OSError, in words, for what is no file or has more bytes;
    ValueError for what is no file of safetensors."""
    from safetensors import SafetensorError, deserialize

    try:
        # The package has no types for it.
        stored = deserialize(read_bytes(path, most_bytes))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    return {n: StoredTensor(i["dtype"], tuple(i["shape"]), bytes(i["data"])) for n, i in stored}
