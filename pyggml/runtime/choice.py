"""The devices that a word names: cpu, cuda, cuda:1, webgpu, auto; or several: cuda:0,cuda:1."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pyggml.backends.base import Backend
from pyggml.errors import ConfigError, DeviceError


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device beside the CPU.

    open       (number or None for the preferred one, whether products are exact) -> a device;
               DeviceError, which names what is missing
    machine    -> a line for each that this machine has: its word, what it is; or DeviceError
    numbered   whether a word may name one of several: cuda:1
    automatic  whether `auto` takes it
    """

    open: Callable[[int | None, bool], Backend]
    machine: Callable[[], Iterator[tuple[str, str]]]
    numbered: bool = False
    automatic: bool = False


# Packages of devices are imported when their word is given: most runs need none.


def _open_cuda(number: int | None, exact: bool) -> Backend:
    from pyggml.backends.cuda import open_cuda

    return open_cuda(number, "f32" if exact else "bf16")


def _list_cards() -> Iterator[tuple[str, str]]:
    from pyggml.backends.cuda import cards
    from pyggml.backends.cuda.runtime.capability import ENVIRONMENT, most

    for card in cards():
        capability = ".".join(map(str, card.capability))
        about = f"{card.n_bytes / 1e9:.1f} GB, compute capability {capability}"
        if (cap := most()) is not None and cap < card.capability:
            about += f", kernels for {'.'.join(map(str, cap))}, which {ENVIRONMENT} asks for"
        yield f"cuda:{card.index}", f"{card.name}, {about}"


def _open_webgpu(number: int | None, exact: bool) -> Backend:
    from pyggml.backends.webgpu import open_webgpu

    return open_webgpu("f32" if exact else "f16")


def _list_adapter() -> Iterator[tuple[str, str]]:
    from pyggml.backends.webgpu import adapter_name

    yield "webgpu", adapter_name()


KINDS = {
    "cuda": DeviceKind(_open_cuda, _list_cards, numbered=True, automatic=True),
    "webgpu": DeviceKind(_open_webgpu, _list_adapter),
}
WORDS = ["cpu", *(w for n, k in KINDS.items() for w in (n, f"{n}:N")[: 1 + k.numbered]), "auto"]
WANTED = f"wanted {', '.join(WORDS[:-1])} or {WORDS[-1]}"


def backends_of(device: str, compute: str = "auto") -> list[Backend]:
    """The devices, in order of preference, that compute beside the CPU; it runs what they lack.

    cpu     none
    cuda    the NVIDIA card of this number, the first one without a number
    webgpu  the GPU that the system prefers, through Vulkan, Metal or Direct3D 12
    auto    the first card that can be used, if there is one

    Several words, with commas between them, are several devices that share a model's blocks.

    compute: as for pyggml.load; unless it is "f32", a card multiplies by weights in bfloat16, and
    webgpu rounds weights to float16, but computes in float32.
    Raises ConfigError for another word, and DeviceError, which names what is missing, for a device
    that cannot be used.
    """
    if "," in device:
        return _opened(several(device), compute)
    exact = compute == "f32"
    name, colon, number = device.partition(":")
    if device == "auto":
        return _first_automatic(exact)
    if device == "cpu":
        return []
    kind = KINDS.get(name)
    if kind is None or (colon and not (kind.numbered and number.isdecimal())):
        raise ConfigError([("device", f"is {device!r}, {WANTED}")])
    return [kind.open(int(number) if number else None, exact)]


def several(device: str) -> list[str]:
    """The words of a list. ConfigError for one that is not named once, or no device."""
    words = device.split(",")
    for i, word in enumerate(words):
        if word in ("cpu", "auto", ""):
            choice = "wanted devices beside the CPU, such as cuda:0,cuda:1"
            raise ConfigError([("device", f"is {device!r}, {choice}")])
        if word in words[:i]:
            raise ConfigError([("device", f"names {word} twice, wanted another one")])
    return words


def _opened(words: Sequence[str], compute: str) -> list[Backend]:
    """A device for each word. ConfigError if two words are one."""
    devices = [device for word in words for device in backends_of(word, compute)]
    names = [device.name for device in devices]
    for i, name in enumerate(names):
        if name in names[:i]:
            about = f"{words[names.index(name)]} and {words[i]} are both {name}"
            raise ConfigError([("device", f"names a device twice: {about}")])
    return devices


def _first_automatic(exact: bool) -> list[Backend]:
    for kind in KINDS.values():
        try:
            if kind.automatic:
                return [kind.open(None, exact)]
        except DeviceError:
            continue
    return []
