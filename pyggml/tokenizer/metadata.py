"""Typed access to metadata: key → plain Python value, as from `GGUFFile.get`."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pyggml.errors import TokenizerError
from pyggml.gguf import GGUFFile, StringArray
from pyggml.gguf.fields import brief

TEMPLATE, INPUTS = "tokenizer.chat_template", "pyggml.chat.inputs"
TOOL_USE = "tool_use"  # the template of a file for chats with tools, where it has one


class Metadata:
    """Each method returns the value of a key, or None (or the default) if the key is missing.

    TokenizerError names the key if its value has another type.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def digest(self) -> str:
        """SHA-256 of all that is said of the tokenizer, its chat template apart."""
        digest = hashlib.sha256()
        for key in sorted(self._values):
            if key.startswith("tokenizer.") and not key.startswith(TEMPLATE):
                value = self._values[key]
                if isinstance(value, StringArray):
                    raw = value.raw_list()
                    parts = [str([len(text) for text in raw]).encode(), *raw]
                elif isinstance(value, np.ndarray):
                    parts = [str((value.dtype.str, value.shape)).encode(), value.tobytes()]
                else:
                    parts = [repr(value).encode()]
                digest.update(b"".join([repr(key).encode(), *parts]))
        return digest.hexdigest()

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise _wrong(key, value, "a string")

    def variants(self, key: str) -> dict[str, str]:
        """The strings of `key` and `key.NAME`, by NAME; "" is that of the key itself."""
        names = (name for name in self._values if name == key or name.startswith(f"{key}."))
        return {name[len(key) + 1 :]: self.text(name) or "" for name in sorted(names)}

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if isinstance(value, bool):
            return value
        raise _wrong(key, value, "true or false")

    def index(self, key: str) -> int | None:
        value = self._values.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise _wrong(key, value, "an integer")

    def texts(self, key: str) -> list[str] | None:
        value = self.strings(key)
        return _decode(key, value.raw_list()) if isinstance(value, StringArray) else value

    def strings(self, key: str) -> StringArray | list[str] | None:
        """As `texts`, those of a file where they lie there, decoded on access."""
        value = self._values.get(key)
        if value is None or isinstance(value, StringArray):
            return value
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return list(value)
        raise _wrong(key, value, "an array of strings")

    def raw(self, key: str) -> bytes | None:
        """An array of bytes, signed or not."""
        value = self._values.get(key)
        if value is None:
            return None
        if (
            isinstance(value, np.ndarray)
            and value.ndim == 1
            and value.dtype.str[1:] in ("i1", "u1")
        ):
            return value.tobytes()
        raise _wrong(key, value, "an array of int8 or uint8")

    def numbers(self, key: str, *dtypes: type[np.generic], n: int) -> np.ndarray | None:
        """Exactly n numbers of one of the types."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype not in dtypes:
            names = " or ".join(np.dtype(dtype).name for dtype in dtypes)
            raise _wrong(key, value, f"an array of {names}")
        if len(value) != n:
            raise TokenizerError(f"{key} has {len(value)} values for {n} tokens")
        return value


def _wrong(key: str, value: object, demand: str) -> TokenizerError:
    stored = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else brief(value)
    return TokenizerError(f"{key} is {stored}, wanted {demand}")


def _decode(key: str, raws: Sequence[bytes]) -> list[str]:
    try:
        return [raw.decode() for raw in raws]
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{key} holds {brief(error.object)}, which is not UTF-8") from None


def template_in(file: GGUFFile) -> dict[str, str | None]:
    """The keys of the chat template that a file carries, None for those that it lacks; none at all
    if it carries no template."""
    if TEMPLATE not in file.metadata:
        return {}
    keys = (TEMPLATE, f"{TEMPLATE}.{TOOL_USE}", INPUTS)
    return {key: Metadata({key: file.get(key)}).text(key) for key in keys}
