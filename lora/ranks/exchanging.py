"""What ranks agree on, for any way by which arrays go from one to the others.

Each exchange begins with a flag of every rank, whether it has failed: so an error of one is the
error of all, and none waits for what another will never send. Only numbers and UTF-8 text go.
"""

import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from pyggml.errors import PyggmlError
from pyggml.lora.ranks.alone import RankLostError, Ranks, share


class ExchangingRanks(Ranks):
    """Several ranks. A subclass says how their arrays reach each other."""

    @abstractmethod
    def _gather(
        self, mine: np.ndarray, target: np.ndarray, counts: Sequence[int], pauses: bool = True
    ) -> None:
        """target: counts[r] numbers of each rank r, one rank after the other.

        pauses: whether a rank may be waited for that still computes; else all ranks are here.
        """

    @abstractmethod
    def _deal(
        self, sent: Sequence[Sequence[np.ndarray]], target: np.ndarray, counts: Sequence[int]
    ) -> None:
        """Send the arrays sent[r] to each rank r; all ranks are here. target: counts[r] numbers of
        each rank r, one rank after the other."""

    def any(self, flag: bool) -> bool:
        return any(self._agree(flag=flag))

    def texts(self, text: str) -> list[str]:
        self._agree()
        return self._texts(text)

    def join(self, rows: np.ndarray, n: int) -> np.ndarray:
        self._agree()
        width = int(np.prod(rows.shape[1:]))
        counts = [len(share) * width for share in self._shares(n)]
        all_rows = np.empty((n, *rows.shape[1:]), rows.dtype)
        self._gather(np.ascontiguousarray(rows), all_rows, counts)
        return all_rows

    def add(self, gradients: Sequence[np.ndarray], n: int, size: int) -> np.ndarray:
        """Each rank adds one part of all gradients; then the parts are joined."""
        self._agree()
        ends = [size * i // self.size for i in range(self.size + 1)]
        sizes = np.diff(ends).tolist()
        here = sizes[self.rank]
        sent = [[g[first:end] for g in gradients] for first, end in pairwise(ends)]
        received = np.empty((n, here), np.float32)
        self._deal(sent, received, [len(share) * here for share in self._shares(n)])
        total = np.empty(size, np.float32)
        self._gather(super().add([*received], n, here), total, sizes, pauses=False)
        return total

    @contextmanager
    def telling(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            of_all = _JointError, RankLostError
            if isinstance(error, of_all) or isinstance(error.__cause__, of_all):
                raise
            self._agree(error)

    @contextmanager
    def together(self) -> Iterator[None]:
        with self.telling():
            yield
        self._agree()

    # -- exchanges ------------------------------------------------------------------------------

    def _agree(self, fault: Exception | None = None, flag: bool = False) -> list[bool]:
        """Begin an exchange: the flags of all ranks. All raise if one of them has a fault."""
        told = self._gather_all(np.array([fault is not None, flag], np.int64)).reshape(-1, 2)
        if not told[:, 0].any():
            return told[:, 1].astype(bool).tolist()
        texts = self._texts(_to_json(fault))
        if fault is not None and not isinstance(fault, PyggmlError):
            raise fault  # of the program, with its traceback
        raise _joint(texts) from fault

    def _texts(self, text: str) -> list[str]:
        mine = np.frombuffer(text.encode(), np.uint8)
        counts = self._gather_all(np.array([len(mine)], np.int64)).tolist()
        data = np.empty(sum(counts), np.uint8)
        self._gather(mine, data, counts)
        ends = zip(counts, np.cumsum(counts), strict=True)
        return [data[end - n : end].tobytes().decode() for n, end in ends]

    def _shares(self, n: int) -> list[range]:
        return [share(n, rank, self.size) for rank in range(self.size)]

    def _gather_all(self, values: np.ndarray) -> np.ndarray:
        """As many numbers of each rank, one rank after the other."""
        numbers = np.empty(self.size * len(values), values.dtype)
        self._gather(values, numbers, [len(values)] * self.size)
        return numbers


def _to_json(error: Exception | None) -> str:
    """An error as JSON: its faults, and the text before them."""
    if error is None:
        return json.dumps([])
    if isinstance(error, PyggmlError):
        return json.dumps([error.about, *error.faults])
    return json.dumps(["", f"{type(error).__name__}: {error}"])


class _JointError(PyggmlError):
    """An error of which all ranks know."""


def _joint(told: Sequence[str]) -> _JointError:
    """The error of all ranks, or those of some, each with the first rank that has it."""
    errors: dict[str, tuple[int, _JointError]] = {}
    for rank, text in enumerate(told):
        about, *faults = json.loads(text) or [""]
        pairs = (f if isinstance(f, str) else (f[0], f[1]) for f in faults)
        if faults:
            errors.setdefault(text, (rank, _JointError(pairs, about)))
    if len(set(told)) == 1:
        return errors[told[0]][1]
    return _JointError(f"rank {rank}: {error}" for rank, error in errors.values())
