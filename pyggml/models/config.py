"""Hyperparameters, read from GGUF metadata and checked before any kernel uses them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pyggml.gguf import StringArray
from pyggml.graph.tensor import Shape

POOLINGS = ("none", "mean", "cls", "last", "rank")  # by llama.cpp's numbers of them
_UNSPECIFIED = 2**32 - 1
LONG_FACTORS = "rope_factors_long.weight"  # rotary factors of long sequences

# Upper bounds: far above any model, far below the overflow of a shape.
_LIMITS = {
    "context_length": 1 << 24,
    "embedding_length": 1 << 16,
    "block_count": 1024,
    "feed_forward_length": 1 << 20,
    "attention.head_count": 1 << 12,
    "attention.head_count_kv": 1 << 12,
    "attention.key_length": 1 << 12,
    "attention.value_length": 1 << 12,
    "attention.sliding_window": 1 << 24,
    "attention.sliding_window_pattern": 1024,
    "rope.dimension_count": 1 << 12,
    "rope.scaling.original_context_length": 1 << 24,
}


def full_key(architecture: str, key: str) -> str:
    """A hyperparameter's key in the file; before those of xIELU there is no architecture's name."""
    return key if key.startswith("xielu.") else f"{architecture}.{key}"


class Reader:
    """Reads `{architecture}.{key}`, checks its bounds and collects every fault.

    A value out of bounds is replaced by one within them, so that reading can go on. `shapes` maps
    the names of the file's tensors to their shapes: files of one architecture may hold different
    tensors.
    """

    def __init__(
        self, architecture: str, get: Callable[[str], object], shapes: Mapping[str, Shape]
    ) -> None:
        self.architecture, self._get, self.shapes = architecture, get, shapes
        self.faults: list[str] = []

    @property
    def has_tensors(self) -> bool:
        """Whether there is a file; metadata alone come with the shape of the embedding."""
        return len(self.shapes) > 1

    def _of_layers(self, value: np.ndarray, n: int) -> np.ndarray:
        """An array's first n; arrays by layer go on with the blocks for further tokens."""
        further = self._value("nextn_predict_layers")
        if not isinstance(further, int):
            return value
        return value[:n] if value.shape == (n + further,) else value

    def _value(self, key: str) -> object:
        return self._get(full_key(self.architecture, key))

    def _refuse(self, key: str, value: object, demand: str) -> None:
        there = "missing" if value is None else short(value)
        self.faults.append(f"{full_key(self.architecture, key)} is {there}, {demand}")

    def count(
        self, key: str, default: int | None = None, *, least: int = 1, most: int | None = None
    ) -> int:
        """A whole number from `least` to `most`. Common keys have a `most` of their own."""
        value, top = self._value(key), _LIMITS[key] if most is None else most
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= top:
            return value
        self._refuse(key, value, f"wanted {least}" + (f" to {top}" if top > least else ""))
        return least

    def pooling(self, key: str) -> str | None:
        """How the file says that a text becomes one vector; None where it does not. llama.cpp's
        number for that is -1, which it writes as an unsigned one."""
        value = self._value(key)
        if isinstance(value, int) and value == _UNSPECIFIED:
            return None
        number = self.count(key, -1, least=-1, most=len(POOLINGS) - 1)
        return POOLINGS[number] if number >= 0 else None

    def original_context(self) -> int:
        """The context before rotary positions were scaled for longer ones."""
        return self.count("rope.scaling.original_context_length", self.count("context_length"))

    def counts(
        self,
        key: str,
        n: int,
        default: tuple[int, ...] | None = None,
        *,
        least: int = 1,
        most: int | None = None,
    ) -> tuple[int, ...]:
        """n whole numbers, one for each layer. The file has an array, or one number for all."""
        value, top = self._value(key), _LIMITS[key] if most is None else most
        if value is None and default is not None:
            return default
        if not isinstance(value, np.ndarray):
            return (self.count(key, least=least, most=most),) * n
        value = self._of_layers(value, n)
        whole = value.dtype.kind in "iu" and value.shape == (n,)
        if whole and least <= value.min() and value.max() <= top:
            return tuple(value.tolist())
        self._refuse(key, value, f"wanted {n} whole numbers, each from {least} to {top}")
        return (least,) * n

    def number(self, key: str, default: float | None, least: float, most: float) -> float:
        """A number from `least` to `most`."""
        value = self._value(key)
        if value is None and default is not None:
            return default
        number = None if isinstance(value, bool) or not isinstance(value, int | float) else value
        if number is not None and least <= number <= most:
            return float(number)
        self._refuse(key, value, f"wanted {least:g} to {most:g}")
        return least

    def numbers(
        self, key: str, n: int, default: float | None, least: float, most: float
    ) -> tuple[float, ...]:
        """n numbers, one for each layer. The file has an array, or one number for all."""
        value = self._value(key)
        if not isinstance(value, np.ndarray):
            return (self.number(key, default, least, most),) * n
        value = self._of_layers(value, n)
        fits = value.dtype.kind in "iuf" and value.shape == (n,)
        if fits and np.all((value >= least) & (value <= most)):
            return tuple(float(v) for v in value)
        self._refuse(key, value, f"wanted {n} numbers, each from {least:g} to {most:g}")
        return (least,) * n

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        self._refuse(key, value, "wanted true or false")
        return default

    def flags(self, key: str, n: int, default: tuple[bool, ...]) -> tuple[bool, ...]:
        """An array of n truth values, or of whole numbers that are 0 or 1; or one for all."""
        value = self._value(key)
        if value is None:
            return default
        if isinstance(value, int) and value in (0, 1):
            return (bool(value),) * n
        flags = np.empty(0)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biu":
            flags = self._of_layers(value, n)
        if flags.shape == (n,) and np.isin(flags, (0, 1)).all():
            return tuple(bool(v) for v in flags)
        self._refuse(key, value, f"wanted {n} truth values")
        return default

    def word(self, key: str, default: str, choices: tuple[str, ...]) -> str:
        """A string, one of `known`."""
        value = self._value(key)
        if value is None:
            return default
        if isinstance(value, str) and value in choices:
            return value
        self._refuse(key, value, f"known are {', '.join(choices)}")
        return default

    def pattern(self, n: int, period: int, dense_first: bool = False) -> tuple[bool, ...]:
        """For each of n layers, whether it has a sliding window.

        The key attention.sliding_window_pattern is an array of n truth values, or a period p
        (`period` where the key is missing). With a period, the last layer of every p has no
        window: layer i has one if i mod p < p − 1. With p = 0, all layers have one. dense_first:
        the first of every p has none.
        """
        key = "attention.sliding_window_pattern"
        value = self._value(key)
        if isinstance(value, np.ndarray):
            value = self._of_layers(value, n)
            if value.shape == (n,) and np.isin(value, (0, 1)).all():
                return tuple(bool(v) for v in value)
            self._refuse(key, value, f"wanted {n} truth values")
            return (False,) * n
        p = self.count(key, period, least=0)
        without = 0 if dense_first else p - 1
        return tuple(p == 0 or i % p != without for i in range(n))


def short(value: object) -> str:
    """A value for an error message, in at most 40 characters."""
    if isinstance(value, np.ndarray | StringArray):
        return f"an array of {len(value)}"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The hyperparameters of every decoder; all others are in its parts."""

    architecture: str
    n_vocab: int  # rows of the token embedding
    n_ctx: int  # longest context the model was trained for, in tokens
    n_embd: int
    n_layer: int
    n_blocks: int  # blocks in the file; those from n_layer on predict further tokens and are unread
    n_ctx_short: int | None  # the longest sequence of the short rotary factors; None: one set
    causal: bool  # whether a token sees those before it alone, so that a next one is predicted
    pooling: str | None  # how a text becomes one vector (pyggml.models.pooling); None: unsaid


def read_config(r: Reader, causal: bool = True) -> ModelConfig:
    """The hyperparameters of every decoder. r.shapes must have a matrix token_embd.weight.

    causal: where the file does not say
    """
    n_blocks = r.count("block_count")
    return ModelConfig(
        architecture=r.architecture,
        n_vocab=r.shapes["token_embd.weight"][0],
        n_ctx=r.count("context_length"),
        n_embd=r.count("embedding_length"),
        n_layer=n_blocks - r.count("nextn_predict_layers", 0, least=0, most=n_blocks - 1),
        n_blocks=n_blocks,
        n_ctx_short=r.original_context() if LONG_FACTORS in r.shapes else None,
        causal=r.flag("attention.causal", causal),
        pooling=r.pooling("pooling_type"),
    )


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one layer: n query heads, n_kv key and value heads, of `size` numbers each;
    values have `value_size`.

    n / n_kv query heads share one key and value head.
    """

    n: int
    n_kv: int
    size: int
    value_size: int


def read_heads(
    r: Reader,
    c: ModelConfig,
    least: int = 1,
    own_values: bool = False,
    windowed: tuple[bool, ...] = (),
) -> tuple[Heads, ...]:
    """The heads of every layer.

    least      0 if layers without attention are allowed
    own_values values may be of another size than keys
    windowed   by layer, whether it has a window and so a size of its own; none: all are alike
    """
    n = r.counts("attention.head_count", c.n_layer, least=least)
    n_kv = r.counts("attention.head_count_kv", c.n_layer, n, least=least)
    size = r.count("attention.key_length", max(c.n_embd // max(*n, 1), 1))
    usual = max(c.n_embd // max(*n, 1), 1) if own_values else size
    value_size = r.count("attention.value_length", usual)
    if value_size != size and not own_values:
        r.faults.append(f"value_length {value_size} and key_length {size} differ")
    least_swa, most_swa = (1, 1 << 12) if windowed else (size, size)
    of_window = r.count("attention.key_length_swa", size, least=least_swa, most=most_swa)
    own_size = value_size if own_values else of_window
    r.count("attention.value_length_swa", own_size, least=own_size, most=own_size)
    for q, kv in zip(n, n_kv, strict=True):
        if kv and q % kv:
            r.faults.append(f"{q} heads cannot share {kv} key heads evenly")
    sizes = [of_window if w else size for w in windowed or (False,) * c.n_layer]
    return tuple(
        Heads(q, kv, own, value_size if own == size else own)
        for q, kv, own in zip(n, n_kv, sizes, strict=True)
    )


def rms_eps(r: Reader) -> float:
    """The epsilon of RMS norms, added to the mean square."""
    return r.number("attention.layer_norm_rms_epsilon", None, 0.0, 1.0)


def layer_norm_eps(r: Reader) -> float:
    """The epsilon of layer norms, added to the variance."""
    return r.number("attention.layer_norm_epsilon", None, 0.0, 1.0)
