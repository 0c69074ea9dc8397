"""Which card each of several ranks takes."""

from pyggml.errors import DeviceError
from pyggml.lora.ranks.alone import Ranks


def device_of_rank(device: str, ranks: Ranks) -> str:
    """The card of this rank's number on its host for "cuda", and for "auto" where there are cards;
    any other device is itself.

    Raises DeviceError if there is no card, for "cuda", and if there are more ranks than cards.
    """
    if device not in ("cuda", "auto") or ranks.size == 1:
        return device
    from pyggml.backends.cuda import cards  # what the CPU need not wait for

    try:
        numbers = [card.index for card in cards()]
    except DeviceError:
        if device == "auto":
            return "cpu"
        raise
    if ranks.on_host >= len(numbers):
        here = ", ".join(f"cuda:{number}" for number in numbers)
        raise DeviceError(
            f"rank {ranks.rank} is number {ranks.on_host + 1} of its host, which has {here}: "
            f"wanted a card for each rank, or --device cuda:{numbers[0]} for all of them"
        )
    return f"cuda:{numbers[ranks.on_host]}"
