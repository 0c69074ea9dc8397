"""Top examples: where in a text neurons or features are strongest, and how strong they are at all.

    found = top_examples(model, Path("book.txt"), "blk.3.ffn_neurons", [117, 42], k=8)
    print(found[117])

The text is read window by window, so that it may be of any size.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from pyggml.errors import ConfigError
from pyggml.lab.passages import Text, activations_of, windows_of
from pyggml.look.draw import tokens
from pyggml.model import Model

SHARES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999)  # of the quantiles
Features = Callable[[np.ndarray], np.ndarray]  # rows (T, n) → (T, n_features)


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """Where an activation is strong.

    value     there
    position  of the token, counted over all windows of the text
    pieces    the tokens around it, as text; `at` is its own
    values    theirs, float32
    """

    value: float
    position: int
    pieces: tuple[str, ...]
    at: int
    values: np.ndarray

    def __str__(self) -> str:
        shown = [tokens.signs(p).replace("\n", "") for p in self.pieces]
        shown[self.at] = f"⟦{shown[self.at]}⟧"
        return f"{self.value:9.3f}  {self.position:9,}  {''.join(shown)}"


@dataclass(frozen=True, slots=True, eq=False)
class TopExamples:
    """The strongest places of one neuron or feature, and the quantiles of its activation.

    places     strongest first
    quantiles  share → what that share of the activations is at most, to 0.8 %
    n_tokens   read; of the first token of each window no activation counts
    positive   the share of activations above 0
    """

    name: str
    neuron: int
    places: tuple[Example, ...]
    quantiles: dict[float, float]
    n_tokens: int
    positive: float

    def __str__(self) -> str:
        shares = "  ".join(f"{100 * s:g} %: {v:.3g}" for s, v in self.quantiles.items())
        first = f"{self.name} {self.neuron}, {self.n_tokens:,} tokens, {self.positive:.1%} above 0"
        head = f"{'value':>9}  {'token':>9}  context"
        return "\n".join([first, shares, head, *map(str, self.places)])

    def draw(self) -> str:
        """HTML: each place with its context, coloured by the activation of every token."""
        most = self.places[0].value if self.places else 0.0
        rows = "".join(
            f"<div>{p.value:.3f}&ensp;{''.join(_spans(p, most))}</div>" for p in self.places
        )
        style = f"<style>{tokens.STYLE}</style>"
        return f'{style}<div class="tokens"><b>{escape(self.name)} {self.neuron}</b>{rows}</div>'

    def _repr_html_(self) -> str:
        return self.draw()


def _spans(place: Example, most: float) -> Iterator[str]:
    for piece, value in zip(place.pieces, place.values, strict=True):
        share = value / most if most > 0 else 0.0
        level = int(np.clip(share, 0, 1) * len(tokens.LEVELS))
        yield f'<span class="t{level}" title="{value:.3f}">{escape(tokens.signs(piece))}</span>'


def top_examples(
    model: Model,
    text: Text,
    name: str,
    neurons: Sequence[int],
    k: int = 10,
    *,
    features: Features | None = None,
    around: tuple[int, int] = (10, 4),
    per_window: int = 1,
    n_window: int = 128,
) -> dict[int, TopExamples]:
    """Of each of these neurons the k strongest places of a text, with their context.

    name: of an activation (T, …), whose other axes are read as one; neurons: numbers along it, or
    along what `features` makes of its rows, as `SparseCoder.encode` does. around: tokens before and
    after. per_window: places of one window at most, so that one passage does not fill the list.
    Equal activations come in the order of the text. The first token of a window does not count.

    Memory is that of one window and of the places. Raises ConfigError for neurons that are not
    there and numbers below 1, and what `windows_of` and `activations_of` do.
    """
    if min(k, per_window) < 1 or not len(neurons) or min(around) < 0:
        raise ConfigError("top examples: wanted k and per_window of 1 or more, and some neurons")
    strongest: dict[int, list[tuple[float, int, Example]]] = {n: [] for n in neurons}
    counts = np.zeros((len(strongest), 1 << 16), np.int64)
    start, columns = 0, [*strongest]
    for ids, arrays in activations_of(model, windows_of(model, text, n_window), name):
        rows = _columns(arrays, features, columns)
        pieces = [*tokens.texts([model.tokenizer.token_bytes(int(i), special=True) for i in ids])]
        for column, n in enumerate(columns):
            values = rows[:, column]
            counts[column] += np.bincount(_keys(values[1:]), minlength=1 << 16)
            for at in 1 + np.argsort(-values[1:], kind="stable")[:per_window]:
                place = _place(values, pieces, int(at), start, around)
                _keep(strongest[n], k, place)
        start += len(ids)
    return {n: _summary(name, n, strongest[n], counts[i], start) for i, n in enumerate(columns)}


def _columns(
    arrays: dict[str, np.ndarray], features: Features | None, neurons: Sequence[int]
) -> np.ndarray:
    """The activations (T, n_neurons) of one window."""
    if len(arrays) != 1:
        raise ConfigError(f"the name fits {len(arrays)} activations, wanted one")
    ((name, a),) = arrays.items()
    rows = a.reshape(len(a), -1)
    rows = rows if features is None else np.asarray(features(rows))
    if wrong := [n for n in neurons if not 0 <= n < rows.shape[1]]:
        raise ConfigError(f"{name}: there is no neuron {wrong[0]} among its {rows.shape[1]}")
    return rows[:, list(neurons)].astype(np.float32)


def _place(
    values: np.ndarray, pieces: Sequence[str], at: int, start: int, around: tuple[int, int]
) -> Example:
    part = slice(max(at - around[0], 0), at + around[1] + 1)
    position = at - part.start
    return Example(
        float(values[at]), start + at, tuple(pieces[part]), position, values[part].copy()
    )


def _keep(heap: list[tuple[float, int, Example]], k: int, place: Example) -> None:
    """Put a place among the k strongest; its weakest is first, of equals the later one."""
    item = place.value, -place.position, place
    if len(heap) < k:
        heapq.heappush(heap, item)
    elif item[:2] > heap[0][:2]:
        heapq.heapreplace(heap, item)


# -- quantiles of a stream: numbers are counted by the upper 16 bits of float32, put in order ------


def _keys(values: np.ndarray) -> np.ndarray:
    """uint16 of each float32: they rise with the numbers, and those of one key are within 0.8 %."""
    bits = values.astype(np.float32).view(np.uint32)
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return np.asarray(ordered >> 16, np.uint16)


def _number(key: int) -> float:
    """The middle of the numbers of a key; 0 for those of 0 itself."""
    ordered = np.uint32(key << 16 | 0x8000)
    bits = ordered & np.uint32(0x7FFFFFFF) if ordered >> 31 else ~ordered
    number = float(np.array(bits, np.uint32).view(np.float32))
    return 0.0 if abs(number) < 1e-37 else number


def _summary(
    name: str,
    neuron: int,
    heap: list[tuple[float, int, Example]],
    counts: np.ndarray,
    n_tokens: int,
) -> TopExamples:
    places = tuple(place for *_, place in sorted(heap, key=lambda i: i[:2], reverse=True))
    below, n = counts.cumsum(), int(counts.sum())
    at = {s: int(np.searchsorted(below, max(s * n, 1))) for s in SHARES} if n else {}
    quantiles = {s: _number(key) for s, key in at.items()}
    zero = int(_keys(np.zeros(1, np.float32))[0])
    positive = float(counts[zero + 1 :].sum() / n) if n else 0.0
    return TopExamples(name, neuron, places, quantiles, n_tokens, positive)
