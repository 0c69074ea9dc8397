"""Scratch whose arrays lie apart, with bytes around each that nobody may write."""

import numpy as np

from pyggml.jit.scratch import LINE, Layout

_AROUND, _UNTOUCHED = 4096, 0x55  # bytes on either side, and what they hold


class Rooms:
    """Cuts scratch so from now on, as long as the `monkeypatch` of a test lasts."""

    def __init__(self, monkeypatch) -> None:
        self._sides = []
        monkeypatch.setattr(Layout, "cut", lambda layout, scratch: self._cut(layout))

    def _cut(self, layout):
        arrays = {}
        for name, a in layout.arrays.items():
            room = np.full(a.n_bytes + 2 * _AROUND + LINE, _UNTOUCHED, np.uint8)
            start = _AROUND + (-room.ctypes.data - _AROUND) % LINE
            arrays[name] = a.over(room, start)
            arrays[name].view(np.uint8)[...] = 255  # NaN: nothing may rely on what was there
            self._sides.append((name, room[:start], room[start + a.n_bytes :]))
        return arrays

    def written_past(self) -> list[str]:
        """The arrays whose sides have changed; at least one was made."""
        assert self._sides, "no scratch was cut"
        return [n for n, *sides in self._sides if any((s != _UNTOUCHED).any() for s in sides)]
