"""The order in which several passes of a graph whose parts lie on several devices are started.

    device 0   F₀ F₁ B₀ F₂ B₁ F₃ B₂    B₃        parts of two devices, two passes under way:
    device 1      ─F₀B₀─ ─F₁B₁─ ─F₂B₂─ ─F₃B₃─    the last one goes there and back at once

A device does what it is asked for one after the other, and passes are numbered in the order of
their gradients' sum. So each part of a pass comes after the same part of the pass before: the sums
are those of passes that run one after the other. A device that computes one part of a pass has
memory for one: it begins the next pass when what it made was asked for.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence


def in_turns(
    parts: Sequence[tuple[Hashable, float]], n_passes: int, n_slots: int
) -> Iterator[tuple[int, int]]:
    """(Pass, part), each once: so that no device waits that could compute.

    parts: of a pass, in order: the device, and the time that it takes in any unit
    n_slots: passes that are under way at once, at most
    """
    done = [0] * n_passes  # parts of each pass that are started
    ready = [0.0] * n_passes  # when those have ended
    free: dict[Hashable, float] = defaultdict(float)  # when a device has done what it was asked for
    n_parts = Counter(device for device, _ in parts)
    ahead = [  # parts of the pass before that are started before a part is
        min(i + 1 + (n_parts[device] == 1), len(parts)) for i, (device, _) in enumerate(parts)
    ]

    def start(k: int) -> tuple[float, int]:
        """When the next part of pass k can begin; of several the one that is furthest comes first,
        since it ends a pass."""
        return max(ready[k], free[parts[done[k]][0]]), -done[k]

    for _ in range(n_passes * len(parts)):
        first = next(k for k in range(n_passes) if done[k] < len(parts))
        among = range(first, min(first + n_slots, n_passes))
        k = min((k for k in among if k == first or done[k - 1] >= ahead[done[k]]), key=start)
        device, seconds = parts[done[k]]
        ready[k] = free[device] = start(k)[0] + seconds
        yield k, done[k]
        done[k] += 1
        if done[k] == len(parts) and k + n_slots < n_passes:
            ready[k + n_slots] = ready[k]
