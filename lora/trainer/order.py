"""Which windows each step of a run reads: an epoch's, in an order drawn from seed and epoch."""

from math import ceil

import numpy as np

from pyggml.lora.config import TrainConfig
from pyggml.lora.data import Dataset
from pyggml.lora.trainer.checkpoint import Progress


class WindowOrder:
    """The order of a run's windows.

    n_read    windows that an epoch reads
    n_of_epoch, n_steps   steps of an epoch, and of the run, whose validations may end it before
    """

    def __init__(self, train: Dataset, config: TrainConfig, n_alike: int = 1) -> None:
        """n_alike: steps that train on the same windows."""
        self._train, self._seed, self._n_a_step = train, config.seed, config.windows_per_step
        self.n_read = config.n_read(train.n_read)
        self.n_of_epoch = n_alike * ceil(self.n_read / self._n_a_step)
        self.n_steps = int(config.shortest(self.n_of_epoch, 1))
        self._epoch, self._windows = -1, np.empty(0, np.int64)

    @property
    def n_in_last_step(self) -> int:
        """The windows of an epoch's last step: what the others leave of it."""
        whole = self._n_a_step
        return self.n_read % whole or whole if self.n_read > whole else whole

    def after(self, progress: Progress) -> np.ndarray:
        """The windows of the step that follows this position."""
        if self._epoch != progress.epoch:
            self._epoch = progress.epoch
            order = self._train.order(self._seed, self._epoch, self._n_a_step)
            self._windows = order[: self.n_read]
        return self._windows[progress.index :][: self._n_a_step]
