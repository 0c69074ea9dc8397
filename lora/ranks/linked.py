"""Ways from card to card, where each rank has one."""

import json
import platform
import warnings
from collections import Counter
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

from pyggml.backends import Backend, Links
from pyggml.errors import DeviceError
from pyggml.lora.ranks.alone import RankLostError, Ranks
from pyggml.runtime import Devices

_LOOK = 0.1  # seconds between two looks at the other ranks
_SEVERAL = "its blocks are on several devices"


def links_to_ranks(devices: Devices, ranks: Ranks) -> tuple[Backend, Links] | None:
    """This rank's device, and the ways from it to those of all other ranks. None where there are
    none, which a warning of the first rank explains if there are devices. All ranks call this.
    """
    cards = devices.beside_host
    links, word, fault = None, "", _SEVERAL if devices.homes else ""
    try:
        links = cards[0].links() if cards and not fault else None
        word = links.word() if links is not None and ranks.is_first else ""
    except DeviceError as error:
        fault = str(error)
    place = links.place if links is not None else ""
    mine = json.dumps([platform.node(), place, fault, word])
    told = [json.loads(text) for text in ranks.texts(mine)]
    why = _why_not([(host, place, fault) for host, place, fault, _ in told])
    if why and ranks.is_first:
        warnings.warn(f"gradients go through the host: {why}", RuntimeWarning, stacklevel=2)
    if why or links is None:
        return None
    _join(links, told[0][-1], ranks)
    return cards[0], links


def _join(links: Links, word: str, ranks: Ranks) -> None:
    """Join the links, which ends when all ranks have: in a thread, to look after these meanwhile.

    Raises RankLostError if one has ended or does not come, and what the links raise.
    """
    ended = SimpleQueue[Exception | None]()

    def join() -> None:
        try:
            links.join(word, ranks.rank, ranks.size)
        except Exception as error:
            ended.put(error)
        else:
            ended.put(None)

    Thread(target=join, daemon=True).start()
    waited = 0.0  # a process that was stopped for long counts one look
    while waited < ranks.limit:
        with suppress(Empty):
            if (error := ended.get(timeout=_LOOK)) is not None:
                raise error
            return
        waited += _LOOK
        ranks.look()
    why = f"of {ranks.limit:g} s has passed and not all cards are joined: a rank hangs"
    raise RankLostError([("rank_timeout", why)])


def _why_not(told: list[tuple[str, str, str]]) -> str:
    """Why the devices of ranks, each a host, a place and a fault, are not linked; "" if they are,
    or if there are none."""
    for rank, (_, place, fault) in enumerate(told):
        if fault or (not place and any(p for _, p, _ in told)):
            return f"rank {rank}: {fault or 'it has no card'}"
    if len({host for host, _, _ in told}) > 1:
        return "the ranks are on several hosts" if told[0][1] else ""
    place, n = Counter(place for _, place, _ in told).most_common(1)[0]
    return f"{n} ranks share a card" if place and n > 1 else ""
