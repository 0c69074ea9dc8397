"""What a validation reads: all that is held out, or a sample spread over it, and how sure it is.

All is read where it is LITTLE, or all validations of a run together cost less than a tenth of it.
Else the sample has as many tokens as that, at least those of LEAST windows; where these would cost
more than half of a short run, as many as half of it, at least those of FEWEST. It is counted in
rows and their tokens, not in windows, so that it is of the same rows however these are packed; of
plain text, in windows.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from pyggml.lora.config import TrainConfig
from pyggml.lora.data import Corpus, Dataset, Documents, pack
from pyggml.lora.data.windows.units import Units

SHARE = 0.1  # of the run, that all validations may take
LEAST = 32  # windows' worth of tokens that a sample has
FEWEST = 4  # the same, of a run so short that LEAST would take longer than half of it
LITTLE = 1024  # tokens that are all read, however short the run is
_FORWARD = 0.5  # what a token costs that is not trained, of one that is
# Student's t for 95 %, by degrees of freedom from 1 on; the normal distribution's for more.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
_Z = 1.96


@dataclass(frozen=True, slots=True, eq=False)
class ValidationSample:
    """The windows that each validation of a run reads.

    n_read, n_held_out   rows, or windows of plain text and of answers: those read, and all
    n_times              about how often a run validates
    share                about what all of that costs, of the run
    """

    dataset: Dataset
    windows: np.ndarray | range
    n_read: int
    n_held_out: int
    n_times: int
    share: float

    @property
    def is_all(self) -> bool:
        return self.n_read == self.n_held_out

    @classmethod
    def of(cls, corpus: Corpus, config: TrainConfig) -> "ValidationSample | None":
        """For a run with these settings; None if nothing is held out."""
        held_out = corpus.validation
        if held_out is None:
            return None
        run, n_times = cost_of_run(corpus.train, config)
        units = _units(held_out)
        n, whole = len(units), float(units.lengths.sum())
        most = float(config.val_windows * (held_out.ctx + 1))
        if not config.val_windows:
            of_run, window = run / (_FORWARD * n_times), held_out.ctx + 1
            least = min(LEAST * window, max(of_run / 2, FEWEST * window))
            most = max(SHARE * of_run, least, LITTLE if whole <= LITTLE else 0)
        k = n if whole <= most else max(round(n * most / whole), 1)
        share = _FORWARD * n_times * whole * k / n / run
        data, windows = _windows(held_out, units, units.spread(k))
        return cls(data, windows, k, n, n_times, share)


def cost_of_run(train: Dataset, config: TrainConfig) -> tuple[float, int]:
    """The tokens that a run trains, and how often it validates; both as of full windows, so that
    they do not depend on the packing."""
    repeats = np.ones(len(train)) if train.repeats is None else train.repeats
    counts = [np.count_nonzero(b.documents >= 0, axis=1) for b in train.blocks()]
    step = config.windows_per_step * train.ctx
    run = max(config.shortest(float(np.concatenate(counts) @ repeats), step), 1.0)
    return run, 2 + (int(run / step / config.val_every) if config.val_every else 0)


def _units(data: Dataset) -> Units:
    """The rows of a dataset; of answers, whole windows: pairs belong together, and so do exchanged
    answers."""
    if type(data) is Dataset:
        return Units.of(data)
    n = np.count_nonzero(data.documents >= 0, axis=1)
    return Units(np.arange(len(data)) * (data.ctx + 1), n)


def _windows(data: Dataset, units: Units, which: np.ndarray) -> tuple[Dataset, np.ndarray | range]:
    """Windows of some units: those of the data where each has its own, else packed anew."""
    if len(which) == len(units):
        return data, range(len(data))
    windows = units.starts // (data.ctx + 1)
    if len(np.unique(windows)) == len(windows):
        return data, windows[which]
    trained = None if data.trained is None else data.trained.reshape(-1)
    ranges = units.starts[which], units.lengths[which]
    packed = pack(Documents(data.tokens.reshape(-1), *ranges, trained), data.ctx, whole=True)
    return packed, range(len(packed))


def margin(parts: np.ndarray, read: float) -> float | None:
    """How far the loss of all that is held out may lie from that of a sample, with 95 %.

    parts (n, 2): each batch's part of the loss, and its weight; read: the share of all that was
    read. None if it is not known: of one batch, or where all was read.

    The ratio estimator's error: √(n / (n − 1) · Σ (part − loss · weight)²), times √(1 − read),
    since what was read is known.
    """
    n = len(parts)
    if n < 2 or read >= 1:
        return None
    losses, weights = parts[:, 0], parts[:, 1] / parts[:, 1].sum()
    errors = losses - losses.sum() * weights
    error = sqrt(n / (n - 1) * float(errors @ errors) * (1 - read))
    return (_T[n - 2] if n - 2 < len(_T) else _Z) * error
