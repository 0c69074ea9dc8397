"""Which device each of several ranks takes."""

from pyggml.errors import DeviceError
from pyggml.lora.ranks.alone import Ranks

EVERY_CARD = "cuda:all"


def devices_of_ranks(device: str) -> list[str]:
    """The devices that a word names one for each rank: all cards, or those of a list; of any other
    word itself.

    Raises ConfigError for a list that names a device twice, or the CPU; DeviceError without a card.
    """
    if device == EVERY_CARD:
        return _cards()
    if "," not in device:
        return [device]
    from pyggml.runtime.choice import several

    return several(device)


def device_of_rank(device: str, ranks: Ranks) -> str:
    """This rank's device, by its number on its host: a card for "cuda", "cuda:all", and for "auto"
    where there are cards; of a list one. Any other device is itself.

    Raises DeviceError if there is no card, for "cuda", and if there are more ranks than cards.
    """
    if device not in ("cuda", "auto", EVERY_CARD) and "," not in device:
        return device
    if ranks.size == 1 and device in ("cuda", "auto"):
        return device
    try:
        devices = _cards() if device in ("cuda", "auto") else devices_of_ranks(device)
    except DeviceError:
        if device == "auto":
            return "cpu"
        raise
    if ranks.on_host >= len(devices):
        here = "the list" if "," in device else "which"
        raise DeviceError(
            f"rank {ranks.rank} is number {ranks.on_host + 1} of its host, {here} has "
            f"{', '.join(devices)}: wanted a card for each rank, or --device {devices[0]} for all "
            "of them"
        )
    return devices[ranks.on_host]


def _cards() -> list[str]:
    from pyggml.backends.cuda import cards  # what the CPU need not wait for

    return [f"cuda:{card.index}" for card in cards()]
