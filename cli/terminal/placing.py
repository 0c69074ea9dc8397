"""What is done about a model that is larger than its card: other cards, the CPU, or streaming,
whichever takes the least time by an estimate."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pyggml.cli.terminal.show import span
from pyggml.errors import DeviceError
from pyggml.look.limits import multiply_limit, read_limit
from pyggml.model import Model
from pyggml.runtime import Devices
from pyggml.runtime.choice import KINDS


def load_placed(load: Callable[..., Model], n_rows: int, **where: Any) -> Model:
    """A model; if it is larger than its card, and nothing says what to do about that, the fastest
    is done. n_rows: tokens of most passes; where: what `load` gets."""
    model = load(**where)
    if model.streaming is None or where.get("stream_weights") == "on":
        return model
    several = _over_cards(load, **where) if where.get("device") == "auto" else None
    if several is None:
        choose(model, n_rows, model.lack_in_use)
    return several or model


def _over_cards(load: Callable[..., Model], **where: Any) -> Model | None:
    """The model over all cards of this machine; None if there is one, or if they are too small."""
    try:
        words = [word for kind in KINDS.values() if kind.automatic for word, _ in kind.machine()]
        if len(words) > 1:
            model = load(**where | {"device": ",".join(words), "gpu_layers": "all"})
            if not model.lack_in_use() and model.placement is not None:
                model.placement = replace(model.placement, why="one of them is too small")
                return model
    except DeviceError:
        pass  # one that cannot be used: the others may be enough
    return None


def choose(model: Model, n_rows: int, lack: Callable[[], str | None], n_ways: int = 1) -> None:
    """Leave the blocks of a model that stream to the CPU instead, if passes are faster so. The
    line about it says what both take.

    n_rows: tokens of a pass; lack: what a device lacks for the model as it is placed when it is
    called; n_ways: 2 where passes go there and back
    """
    streaming = model.streaming
    assert streaming is not None
    seconds = n_ways * streaming.n_bytes / streaming.rate
    on_host = _host_seconds(model, n_rows, n_ways)
    if on_host is None:
        return
    one = "a token" if n_rows == 1 else f"a pass of {n_rows:,} tokens"
    texts = f"{span(seconds)} where they stream", f"{span(on_host)} on the CPU"
    why = f"{one} is estimated to take {texts[0]}, {texts[1]}"
    if seconds <= on_host:
        model.streaming = replace(streaming, why=f"{streaming.why}; {why}")
        return
    model.stream(0)
    placement = model.place_what_fits(lack)
    model.placement = replace(placement, why=f"{placement.why}; with them {why}")


def _host_seconds(model: Model, n_rows: int, n_ways: int) -> float | None:
    """What the CPU takes for the blocks that stream, as it is measured; None if it cannot be. Two
    blocks less: as many are in the card's memory while they stream."""
    streaming, host = model.streaming, Devices([model.backend])
    assert streaming is not None
    weights = [w for w in model.parts.weights.values() if len(w.shape) > 1]
    largest = max(weights, key=lambda w: w.n_bytes)
    rate, bandwidth = multiply_limit(host, largest.dtype), read_limit(host)
    if rate is None or bandwidth is None:
        return None
    n_bytes = streaming.n_bytes * max(streaming.n_blocks - 2, 1) / streaming.n_blocks
    per_byte = sum(w.n_elements for w in weights) / sum(w.n_bytes for w in weights)
    return n_ways * n_bytes * max(1 / bandwidth, 2 * n_rows * per_byte / rate)
