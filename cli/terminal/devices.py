"""Options of where a model is computed: --device, --gpu-layers, --split, --stream-weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from pyggml.cli.terminal.help import GroupedOption
from pyggml.cli.terminal.places import WordType
from pyggml.cli.terminal.show import say_progress

if TYPE_CHECKING:
    from pyggml.model import Model

DEVICE_HELP = "cpu, cuda, cuda:N, webgpu or auto"
_OF_BLOCKS = "of several, as cuda:0,cuda:1, each computes some blocks"


class LayerCount(WordType):
    """A number of blocks, all or auto."""

    name = "layers"

    def read(self, value: Any) -> int | str:
        text = str(value)
        if text in ("all", "auto"):
            return text
        if not text.isascii() or not text.isdecimal():
            fault = f"is {text!r}, wanted a number of blocks from 0 on, all or auto"
            raise click.BadParameter(fault)
        return int(text)


class Shares(WordType):
    """Numbers of which each is a share of all: 3,1."""

    name, of = "shares", tuple

    def read(self, value: Any) -> tuple[float, ...]:
        try:
            return tuple(map(float, value if isinstance(value, list) else str(value).split(",")))
        except (TypeError, ValueError):
            fault = f"is {value!r}, wanted a share for each device, such as 3,1"
            raise click.BadParameter(fault) from None


DEVICES: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "device": (
        ["--device"],
        {
            "metavar": "WORD",
            "help": f"{DEVICE_HELP}; {_OF_BLOCKS}  [default: cpu]",
            "brief": DEVICE_HELP,
            "common": True,
        },
    ),
    "gpu_layers": (
        ["-ngl", "--gpu-layers"],
        {
            "type": LayerCount(),
            "metavar": "N",
            "aliases": ["n-gpu-layers"],
            "help": "so many of the last blocks are the device's, the others the CPU's: a number, "
            "all, or auto, as many as the device has memory for; one more than there are takes the "
            "output too  [default: all]",
        },
    ),
    "split": (
        ["--split"],
        {
            "type": Shares(),
            "metavar": "A,B",
            "aliases": ["tensor-split"],
            "help": "the share of these blocks that each of several devices has, such as 3,1; "
            "1,1,1,1 of two gives them blocks in turns  [default: as much as each has free]",
        },
    ),
    "stream_weights": (
        ["--stream-weights"],
        {
            "type": click.Choice(["auto", "on", "off"]),
            "metavar": "WORD",
            "help": "on: weights of blocks stay in the file, from which each pass copies them to "
            "the card beside its products; auto: as few as its memory requires, or blocks go to "
            "the CPU if that is faster; off  "
            "[default: auto]",
        },
    ),
}
WHERE = (*DEVICES,)  # what `load` takes of these


def device_options(of_several: str = _OF_BLOCKS) -> list[GroupedOption]:
    """These options, None where they are not given. of_several: what --device
    says of several devices."""
    options = [GroupedOption([*n], group="memory", **about) for n, about in DEVICES.values()]
    options[0].help = (options[0].help or "").replace(_OF_BLOCKS, of_several)
    return options


def say_placement(model: Model) -> None:
    """Print which device computes which of a model's blocks, if several do, and what streams."""
    if model.placement is not None:
        say_progress(f"layers: {model.placement}")
    if model.streaming is not None:
        say_progress(f"streamed: {model.streaming}")
