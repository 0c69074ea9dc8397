"""What objectives with a teacher share: their loss, their leaves, and what feeds them.

loss = α·CE + (1 − α)·τ²·KL(q ‖ p)          the mean over the step's learned tokens

CE is the cross entropy of the tokens that stand there. q and p are the teacher's and the student's
softmax(logits / τ) over k + 1 cases: the teacher's k likeliest tokens, and all others together. τ²
keeps the gradient of the KL as large as it is at τ = 1 (Hinton, Vinyals, Dean 2015,
arXiv:1503.02531).

At τ = 1 both terms are one cross entropy, of the probabilities α·onehot + (1 − α)·q.

With β above 0, and α 0, the divergence of `pyggml.ops.loss.soft` takes the place of the KL.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pyggml import gguf, load
from pyggml.errors import ConfigError
from pyggml.gguf.identity import identity
from pyggml.graph import Graph
from pyggml.graph.tensor import Tensor
from pyggml.lora.data import Dataset, WindowBatch
from pyggml.lora.objectives.objective import Leaves, LossNet, Objective, Outputs, Task, Windows
from pyggml.lora.ranks import Ranks
from pyggml.lora.teacher import Distributions, Teacher, TeacherFile, TeacherModel
from pyggml.lora.teacher.file import TYPE
from pyggml.ops import add, scale
from pyggml.runtime import Program
from pyggml.settings import of_optimiser
from pyggml.tokenizer.same_tokens import check_same_tokens


@dataclass(frozen=True, slots=True)
class TaughtLeaves(Leaves):
    """The leaves of a batch of T tokens; `TaughtBatch` explains each."""

    targets: Tensor  # (T,) int32
    of_answers: Tensor  # (T,)
    weights: Tensor  # (T,)
    ids: Tensor  # (T, k) int32
    shares: Tensor  # (T, k + 1)
    entropy: Tensor  # ()

    @classmethod
    def empty(cls, n_tokens: int, k: int) -> "TaughtLeaves":
        of_tokens = dict.fromkeys(("targets", "of_answers", "weights"), (n_tokens,))
        teachers = {"ids": (n_tokens, k), "shares": (n_tokens, k + 1), "entropy": ()}
        return cls.of_shapes({"targets", "ids"}, **of_tokens, **teachers)


@dataclass(frozen=True, slots=True, eq=False)
class TaughtBatch(WindowBatch):
    """T tokens as in `WindowBatch`, and what the teacher says of them.

    of_answers   (T,) float32, the weight of each target's own cross entropy, if that is a loss of
                 its own
    ids          (T, k) int32, tokens of each distribution
    shares       (T, k + 1) float32, what is wanted as the probability of each, and of all others
    entropy      () float32, Σ weight · (1 − α) · τ² · Σ q · log q, which makes the KL of the loss
    """

    of_answers: np.ndarray
    ids: np.ndarray
    shares: np.ndarray
    entropy: np.ndarray


@dataclass(frozen=True, kw_only=True)
class TaughtObjective(Objective):
    """An objective that learns a teacher's probabilities; its leaves are `TaughtLeaves`.

    `report` may read "n_right" (): how many learned tokens have the highest probability.

    takes_files   the teacher may be what `pyggml teach` wrote: the answers are not the student's
    """

    takes_files: ClassVar[bool] = True

    teacher: str = of_optimiser(
        "",
        "the teacher: a GGUF model with the student's vocabulary, which reads the text as training "
        "goes, or what `pyggml teach` wrote",
    )
    teacher_top_k: int = of_optimiser(
        64,
        "the likeliest tokens of which a model's probabilities are learned, all others count as "
        "one; a file has its own number",
        "1 to 65536",
    )
    teacher_temperature: float = of_optimiser(
        1.0, "τ, which divides the logits of teacher and student", "0.1 to 100"
    )

    @property
    def alpha(self) -> float:
        """α."""
        return 0.0

    @property
    def teacher_beta(self) -> float:
        """β."""
        return 0.0

    @property
    def is_mixed(self) -> bool:
        """Whether both terms are one cross entropy."""
        return self.teacher_temperature == 1

    def shared_by_runs(self) -> Mapping[str, Any]:
        """With what the teacher is in the place of where it lies."""
        about = dict(super().shared_by_runs())
        if self.teacher:
            about["teacher"] = str(identity(gguf.open(self.teacher)))
        return about

    def loss(self, net: LossNet, batch: TaughtLeaves) -> Outputs:
        h = net.hidden()
        of_teacher = batch.ids, batch.shares, batch.weights
        soft = net.soft_loss(h, of_teacher, self.teacher_temperature, self.teacher_beta)
        if self.teacher_beta:
            return {"loss": scale(soft, self.teacher_temperature**2), "n_right": soft.saved[0]}
        loss = add(soft, batch.entropy)
        if self.alpha and not self.is_mixed:
            loss = add(loss, net.token_loss(batch.targets, batch.of_answers, h))
        return {"loss": loss, "n_right": soft.saved[0]}

    def feed(self, task: Task) -> "TaughtFeed":
        if not self.teacher:
            file = ", or what `pyggml teach` wrote" if self.takes_files else ""
            raise ConfigError([("teacher", f"is not given, wanted a GGUF model{file}")])
        return TaughtFeed(self, task.config.batch, self._teacher(self.teacher, task))

    def _teacher(self, path: str, task: Task) -> Teacher:
        file, model, corpus = gguf.open(path), task.model, task.corpus
        if file.word("general.type") == TYPE:
            if not self.takes_files:
                fault = f"is {path}, which holds answers of others, wanted a model: {self.name} "
                raise ConfigError([("teacher", fault + "writes its own")])
            answers = TeacherFile(file)
            answers.check(model, corpus, self.teacher_temperature)
            return answers
        teacher = load(path, compute=model.compute, backends=model.devices.beside_host)
        check_same_tokens(teacher.file, model.file)
        if corpus.train.ctx > teacher.config.n_ctx:
            fault = f"is {corpus.train.ctx}, wanted at most the teacher's {teacher.config.n_ctx}"
            raise ConfigError([("ctx", fault)])
        model.devices.hold(*teacher.parts.weights.values())
        model.group(teacher.parts.weights)
        how = model.config.n_vocab, self.teacher_top_k, self.teacher_temperature
        return TeacherModel(teacher, corpus.lengths, *how)


@dataclass(frozen=True, slots=True)
class TaughtFeed:
    """Windows of tokens, with what a teacher says of them."""

    objective: TaughtObjective
    size: int
    teacher: Teacher

    @property
    def graphs(self) -> Sequence[Graph]:
        return self.teacher.graphs

    def leaves(self, n_tokens: int) -> TaughtLeaves:
        return TaughtLeaves.empty(n_tokens, self.teacher.k)

    def batches(
        self, programs: Sequence[Program], data: Dataset, windows: Windows, ranks: Ranks
    ) -> Iterator[WindowBatch]:
        """Those of other ranks come without what the teacher says."""
        of_batches = data.batch_windows(windows, self.size)
        mine = ranks.share(len(of_batches))
        batches = data.batches(windows, self.size)
        for i, (windows_of_batch, batch) in enumerate(zip(of_batches, batches, strict=True)):
            if i not in mine:
                yield batch
                continue
            each = [self.teacher.distributions(programs, data, int(w)) for w in windows_of_batch]
            yield self._with_distributions(batch, data.part(windows_of_batch).targets(), each)

    def _with_distributions(
        self, batch: WindowBatch, targets: np.ndarray, each: Sequence[Distributions]
    ) -> TaughtBatch:
        """targets (windows, ctx) bool, where `each` window has distributions."""
        k, n_tokens = self.teacher.k, len(batch.tokens)
        ctx = n_tokens // self.size
        alpha, factor = self.objective.alpha, self.objective.teacher_temperature**2
        factor = 1.0 if self.objective.teacher_beta else factor
        ids = np.tile(np.arange(k, dtype=np.int32), (n_tokens, 1))
        shares = np.zeros((n_tokens, k + 1), np.float32)
        entropy = np.zeros((), np.float64)
        for i, (is_target, d) in enumerate(zip(targets, each, strict=True)):
            at, q = i * ctx + np.flatnonzero(is_target), d.shares()
            ids[at], shares[at] = d.ids, (1 - alpha) * factor * q
            logs = np.log(np.where(q > 0, q, 1))
            entropy += (1 - alpha) * factor * (batch.weights[at] @ (q * logs).sum(axis=1))
            if self.objective.is_mixed:
                shares[at, 0] += alpha
        own = {"of_answers": np.float32(alpha) * batch.weights, "ids": ids, "shares": shares}
        return batch.to_batch_of(TaughtBatch, **own, entropy=entropy.astype(np.float32))
