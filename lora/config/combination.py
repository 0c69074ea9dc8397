"""How several adapters become one."""

from dataclasses import dataclass

from pyggml.errors import Fault
from pyggml.settings import Settings, of_output, one_of

METHODS = ("sum", "ties", "dare", "dare-ties", "prune")
DRAWN, ELECTED = ("dare", "dare-ties"), ("ties", "dare-ties")


@dataclass(frozen=True, kw_only=True)
class Combination(Settings):
    """How `pyggml.lora.combine` makes one update of several."""

    method: str = of_output(
        METHODS[0],
        "sum: of the updates times their weights; ties: of each its largest numbers, where their "
        "signs agree; prune: their sum; dare: of each some numbers at random, divided by their "
        "share; dare-ties: those, where their signs agree",
        *one_of(METHODS),
    )
    rank: int | None = of_output(
        None,
        "rank of the result, which leaves out the smallest singular values (default: all of a "
        "sum, else the largest rank of an adapter)",
        "1 or more",
    )
    error: float | None = of_output(
        None,
        "in place of a rank: the share of each update, by its root mean square, that may be left "
        "out; the rank is the lowest that does, tensor by tensor",
        "0 to below 1",
        like=0.1,
    )
    density: float = of_output(
        0.5, "share of numbers of each adapter that all methods but sum keep", "above 0, at most 1"
    )
    majority: str = of_output(
        "total",
        "whose sign counts to ties and dare-ties: total, of the sum; frequency, of most adapters",
        *one_of(("total", "frequency")),
    )
    seed: int = of_output(0, "seed of what dare and dare-ties keep", "0 or more")

    def _faults(self) -> list[Fault]:
        faults, m = super()._faults(), self.method
        users = {"density": METHODS[1:], "majority": ELECTED, "seed": DRAWN}
        for name, methods in users.items():
            if (
                m in METHODS
                and m not in methods
                and getattr(self, name) != getattr(Combination, name)
            ):
                faults.append((name, f"is for {', '.join(methods)}, and {m} has no use for it"))
        if self.error is not None and self.rank is not None:
            faults.append(("error", "is given beside a rank, wanted one of both"))
        return faults
