"""How a run trains."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from pyggml.errors import Fault
from pyggml.model import COMPUTE_TYPES
from pyggml.settings import SEED, Settings, of_memory, of_optimiser, of_output, one_of

OPTIMISERS = ("adamw", "adamw8bit", "lion", "muon", "sgd")
SCHEDULERS = ("cosine", "linear", "constant", "cosine_restarts", "wsd")

# As float32, in which steps are computed: with a β2 of 1 there, no second moment would ever grow.
_BETA = ("at least 0 and below 1", lambda value: 0 <= value < 1 and float(np.float32(value)) < 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """How a run trains: batch · grad_accum windows make a step, which is one update.

    Epochs, the learning rate and its warm-up have defaults by objective, which are None here until
    `Objective.settle`.
    """

    # -- the loop -------------------------------------------------------------------------------

    epochs: int = of_optimiser(
        None,
        "passes over the data; not limited where only max_steps is given",
        "1 or more",
        aliases=("num-train-epochs", "num-epochs"),
        common=True,
        may_change=True,
        like=1,
    )
    max_steps: int = of_optimiser(
        0,
        "end after this many steps, or after --epochs if that is given and less (0: no limit)",
        "0 or more",
        common=True,
        brief="end after this many steps",
        may_change=True,
    )
    batch: int = of_optimiser(
        1,
        "batch size: windows in one forward and backward pass; more need more memory",
        "1 to 65536",
        aliases=("per-device-train-batch-size", "micro-batch-size"),
        common=True,
        brief="windows in one pass",
    )
    grad_accum: int = of_optimiser(
        1,
        "gradient accumulation: passes in one step",
        "1 to 65536",
        aliases=("gradient-accumulation-steps", "grad-accumulation-steps"),
        common=True,
        brief="passes in one step",
    )
    drop_last: bool = of_optimiser(
        False,
        "leave out what is left at the end of an epoch, fewer windows than a step has: others each "
        "time",
        aliases=("dataloader-drop-last",),
    )
    seed: int = of_optimiser(0, "seed of the order of the windows and of dropout", *SEED)

    # -- the learning rate ----------------------------------------------------------------------

    lr: float = of_optimiser(
        None,
        "peak learning rate",
        "above 0, at most 10",
        aliases=("learning-rate",),
        common=True,
        brief="peak rate",
        like=2e-4,
    )
    lr_scheduler: str = of_optimiser(
        "cosine",
        "schedule of the learning rate from lr to lr_min after the warm-up",
        *one_of(SCHEDULERS),
        aliases=("lr-scheduler-type",),
    )
    lr_cycles: int = of_optimiser(
        2, "cycles of cosine_restarts, each from lr to lr_min", "1 to 65536"
    )
    lr_decay: float = of_optimiser(
        0.2,
        "decay phase of wsd (warm-up, stable, decay), as a share of the steps after the warm-up",
        "above 0, at most 1",
    )
    lr_min: float = of_optimiser(0.0, "learning rate at the end", "0 to 10")
    warmup_steps: int = of_optimiser(
        None,
        "warm-up steps, in which the learning rate rises; at most half of all steps",
        "0 or more",
        like=10,
    )
    warmup_ratio: float = of_optimiser(
        None, "warm-up as a share of all steps, instead of --warmup-steps", "0 to 0.5", like=0.1
    )

    # -- the update -----------------------------------------------------------------------------

    optimiser: str = of_optimiser(
        "adamw",
        "adamw; adamw8bit, whose state is a quarter as large, in 8 bits by blocks; lion, whose "
        "state is half as large and which wants a third to a tenth of the learning rate; muon, for "
        "matrices of blocks, which learns in fewer and longer steps; or sgd, "
        "which has no state and wants a far higher one",
        *one_of(OPTIMISERS),
        aliases=("optimizer", "optim"),
    )
    weight_decay: float = of_optimiser(0.01, "decoupled weight decay", "0 to 1")
    clip: float = of_optimiser(
        1.0,
        "gradient clipping: largest norm of the gradient over all parameters (0: none)",
        "0 to 1e30",
        aliases=("max-grad-norm",),
    )
    beta1: float = of_optimiser(
        0.9,
        "decay of the running mean of the gradient (first moment)",
        *_BETA,
        aliases=("adam-beta1",),
    )
    beta2: float = of_optimiser(
        0.999,
        "decay of the running mean of its square (second moment); of lion, of the momentum",
        *_BETA,
        aliases=("adam-beta2",),
    )
    eps: float = of_optimiser(
        1e-8,
        "AdamW's ε, added to the root of the second moment",
        "1e-37 to 1",  # less is 0 in float32, and 0 / 0 where a gradient is 0
        aliases=("adam-epsilon",),
    )

    neftune_alpha: float = of_optimiser(
        0.0,
        "NEFTune: noise on the embeddings in training, at most this / √(tokens of the document · "
        "size of an embedding) (5 is usual, 0: none)",
        "0 to 1e6",
        aliases=("neftune-noise-alpha",),
    )

    router_aux_loss_coef: float = of_optimiser(
        0.0,
        "of mixtures of experts: times the balance loss of Switch Transformers, by which routers "
        "load their experts alike (0.001 to 0.02 are usual; a GGUF file does not say what its "
        "model was trained with; 0: none)",
        "0 to 1e6",
    )

    # -- memory and speed -----------------------------------------------------------------------

    grad_checkpointing: bool = of_memory(
        False,
        "gradient checkpointing: compute each layer's activations again for its backward pass "
        "instead of keeping them: far less memory, about a quarter more time, the same result bit "
        "for bit (in bfloat16 on a card: from rounded residual sums)",
        aliases=("gradient-checkpointing", "grad-checkpoint"),
        brief="less memory, a quarter more time",
        common=True,
        may_change=True,
    )
    weight_copies: float = of_memory(
        0.05,
        "a card keeps weights in bfloat16 beside what they are packed, in half of the memory that "
        "is left at most, where unpacking them in every step takes this share of its time or more: "
        "about a quarter of 512 tokens, a fiftieth of 8192 (1: none)",
        "0 to 1",
        brief="weights in bfloat16 too where that saves this share of a step; 1: none",
        may_change=True,
    )
    step_in_backward: bool = of_memory(
        False,
        "the optimiser's step of each tensor right after its gradient, which then takes no memory "
        "any more; --clip is then by the gradient's norm of the step before",
        aliases=("optimizer-in-bwd",),
        brief="no memory for gradients",
    )
    threads: int = of_memory(0, "threads to use (0: all)", "0 or more", may_change=True)
    rank_timeout: float = of_memory(
        1800.0,
        "seconds that several ranks wait for one of them before the run ends, with a checkpoint",
        "1 to 1e6",
        may_change=True,
    )
    compute: str = of_memory("auto", "how products are computed", *one_of(COMPUTE_TYPES))
    verify_graphs: bool = of_memory(
        False,
        "verify the graphs of the loss after every pass over them, as tests do: for who changes "
        "an op, a pass or a device",
        brief="verify graphs after every pass",
        may_change=True,
    )

    # -- what is told and kept on the way -------------------------------------------------------

    val_every: int = of_output(
        100,
        "steps between validations (0: first and last only)",
        "0 or more",
        aliases=("eval-steps", "steps-per-eval"),
        may_change=True,
    )
    val_windows: int = of_output(
        0,
        "about how many windows a validation reads, spread over what is held out (0: all, or where "
        "that costs more than a tenth of the run, a sample that does not)",
        "0 or more",
        may_change=True,
    )
    patience: int = of_output(
        0,
        "early stopping: end the run when so many validations in a row were no better than the "
        "best (0: never)",
        "0 or more",
        aliases=("early-stopping-patience",),
        may_change=True,
    )
    keep_best: bool = of_output(
        False,
        "write the adapter of the best validation, not that of the last step",
        aliases=("load-best-model-at-end",),
    )
    checkpoint_dir: str | None = of_output(
        None, "folder for checkpoints (default: none are written)", common=True, may_change=True
    )
    checkpoint_every: int = of_output(
        100,
        "steps between checkpoints (0: last only)",
        "0 or more",
        aliases=("save-steps", "save-every"),
        may_change=True,
    )
    checkpoint_keep: int = of_output(
        2,
        "checkpoints that are kept, the newest",
        "1 or more",
        aliases=("save-total-limit",),
        may_change=True,
    )

    def _faults(self) -> list[Fault]:
        faults = super()._faults()
        both = (self.lr, self.lr_min)
        if all(type(rate) in (int, float) for rate in both) and self.lr_min > self.lr:
            fault = f"is {self.lr_min}, wanted at most the highest rate, which is {self.lr}"
            faults.append(("lr_min", fault))
        if self.step_in_backward and self.grad_accum != 1:
            why = f"is {self.grad_accum}, wanted 1: steps in the backward pass add up no gradients"
            faults.append(("grad_accum", why))
        return faults or list(self._idle_settings())

    def _idle_settings(self) -> Iterator[Fault]:
        """Settings that do nothing beside the others, unless they have their defaults."""
        usual = {f.name: f.default for f in fields(self)}
        whys = {
            "lr_cycles": self.lr_scheduler != "cosine_restarts" and "is for cosine_restarts",
            "lr_decay": self.lr_scheduler != "wsd" and "is for wsd",
            "lr_min": self.lr_scheduler == "constant" and "does nothing, the rate being constant",
            "warmup_steps": self.warmup_ratio and "does nothing beside warmup_ratio",
            "beta1": self.optimiser == "sgd" and "does nothing with sgd, which keeps no mean",
            "beta2": self.optimiser == "sgd" and "does nothing with sgd, which keeps no mean",
            "eps": self.optimiser in ("lion", "sgd") and f"is for adamw, not for {self.optimiser}",
            "patience": not self.val_every and "wants validations on the way: val_every is 0",
        }
        for name, why in whys.items():
            if why and getattr(self, name) != usual[name]:
                yield name, why

    def n_read(self, n: int) -> int:
        """How many of n windows each epoch reads: all, or with drop_last those of whole steps."""
        step = self.windows_per_step
        return n // step * step if self.drop_last and n >= step else n

    @property
    def windows_per_step(self) -> int:
        return self.batch * self.grad_accum

    def shortest(self, of_epoch: float, of_step: float) -> float:
        """The length of the run in a unit of which an epoch has of_epoch, a step of_step. It ends
        at the limit that is reached first, `epochs` or `max_steps`."""
        limits = (of_epoch * (self.epochs or 0), of_step * self.max_steps)
        return min((n for n in limits if n), default=of_epoch)
