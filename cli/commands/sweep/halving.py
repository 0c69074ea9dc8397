"""Which runs are hopeless: successive halving, as Optuna has it, over all processes of a folder.

At its validations 1, N, N², … a run goes on only if its loss is among the best 1/N of those that
came as far (asynchronously: Li et al. 2018, "Massively Parallel Hyperparameter Tuning").
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyggml.cli.commands.sweep.lists import SweepRun
from pyggml.errors import ConfigError
from pyggml.extras import how_to_install
from pyggml.lora import Trainer, ValidationReport

_FILE = "halving.log"
_RUN = "run"  # the attribute of a trial that names its run


class Halving:
    """The study of a folder. Raises ConfigError without Optuna."""

    def __init__(self, folder: Path, runs: Sequence[SweepRun], factor: int, every: int) -> None:
        """every: steps between two validations."""
        try:
            import optuna
        except ImportError:
            fault = f"needs the package optuna: {how_to_install('sweep')}"
            raise ConfigError([("halving", fault)]) from None
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna: Any = optuna
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=every, reduction_factor=factor)
        storage = JournalStorage(JournalFileBackend(str(folder / _FILE)))
        self._study: Any = optuna.create_study(
            storage=storage, pruner=pruner, study_name="sweep", load_if_exists=True
        )
        varied = {name: [run.varied[name] for run in runs] for name in runs[0].varied}
        self._choices = {
            name: optuna.distributions.CategoricalDistribution([*dict.fromkeys(values)])
            for name, values in varied.items()
        }

    def judge(self, run: SweepRun, trainer: Trainer) -> "Judge":
        """Of a run, which an earlier process may have begun. Raises ConfigError for one that does
        not validate on its way."""
        c = trainer.config
        if trainer.validation is None or not 0 < c.val_every < trainer.n_steps:
            fault = f"wants validations on the way: val_every is {c.val_every} of {trainer.n_steps}"
            raise ConfigError([("halving", f"{fault} steps")])
        running = self._optuna.trial.TrialState.RUNNING
        begun = self._find(run)
        if begun is None:
            trial = self._optuna.trial.create_trial(
                state=running,
                params=dict(run.varied),
                distributions=self._choices,
                user_attrs={_RUN: run.name},
            )
            self._study.add_trial(trial)
            begun = self._find(run)
        return Judge(self._study, self._optuna.trial.Trial(self._study, begun._trial_id), begun)

    def _find(self, run: SweepRun) -> Any:
        running = (self._optuna.trial.TrialState.RUNNING,)
        trials = self._study.get_trials(deepcopy=False, states=running)
        return next((t for t in trials if t.user_attrs.get(_RUN) == run.name), None)


class Judge:
    """Hears the validations of a run; says when it is hopeless."""

    def __init__(self, study: Any, trial: Any, before: Any) -> None:
        self._study, self._trial = study, trial
        self._steps = {*before.intermediate_values}

    def is_hopeless(self, report: ValidationReport) -> bool:
        """After one more validation."""
        if report.step and report.step not in self._steps:
            self._steps.add(report.step)
            self._trial.report(report.loss, report.step)
        return bool(report.step) and bool(self._trial.should_prune())

    def end(self, loss: float | None, hopeless: bool) -> None:
        """The run has ended, with this loss; None: it failed."""
        import optuna

        states = optuna.trial.TrialState
        if hopeless:
            self._study.tell(self._trial, state=states.PRUNED)
        elif loss is None:
            self._study.tell(self._trial, state=states.FAIL)
        else:
            self._study.tell(self._trial, loss)
