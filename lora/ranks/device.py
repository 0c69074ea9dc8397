"""Which card each of several ranks takes."""

from pyggml.lora.ranks.alone import Ranks


def device_of_rank(device: str, ranks: Ranks) -> str:
    """The card of this rank's number on its host for "cuda", counted anew where there are more
    ranks than cards; any other device is itself.

    Raises DeviceError if there is no card.
    """
    if device != "cuda" or ranks.size == 1:
        return device
    from pyggml.backends.cuda import cards  # what the CPU need not wait for

    numbers = [card.index for card in cards()]
    return f"cuda:{numbers[ranks.on_host % len(numbers)]}"
