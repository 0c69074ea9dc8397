"""GKD, on-policy distillation (Agarwal et al. 2023, arXiv:2306.13649): the student writes answers
to prompts, and learns a teacher's probabilities of each of their tokens.

loss = τ²·D(q, p), the mean over the tokens of a step's answers (`pyggml.lora.objectives.taught`)

D is the generalised Jensen-Shannon divergence of `pyggml.ops.loss.soft`, by β. With a share of own
answers λ below 1 the other prompts are learned with the answers of their rows. The student sees its
own mistakes, and what the teacher would go on with after them. There is no gradient through what is
sampled. β and λ are those of TRL's GKDTrainer (1.16), whose D is always at τ = 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pyggml.errors import ConfigError
from pyggml.lora.data.prompts import Prompts
from pyggml.lora.data.records.names import ANSWER
from pyggml.lora.data.records.rows import PromptRow
from pyggml.lora.objectives.objective import Task
from pyggml.lora.objectives.sampled import Group, SampledObjective, check_prompts
from pyggml.lora.objectives.tally import WrittenAnswers
from pyggml.lora.objectives.taught import TaughtFeed, TaughtObjective
from pyggml.lora.rollouts.sampling import SampledAnswer
from pyggml.lora.rollouts.windows import WeighedAnswer
from pyggml.model import Model
from pyggml.settings import of_optimiser, of_sampling
from pyggml.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class GKD(TaughtObjective, SampledObjective):
    """Learns what a teacher says of the student's own answers."""

    name: ClassVar[str] = "gkd"
    purpose: ClassVar[str] = "learns a teacher's probabilities of the tokens of its own answers"
    defaults: ClassVar[dict[str, Any]] = {"lr": 2e-4, "epochs": 1, "warmup_steps": 10}
    tally: ClassVar[type[WrittenAnswers]] = WrittenAnswers
    takes_files: ClassVar[bool] = False

    answers: int = of_sampling(
        1, "answers that are sampled to each prompt", "1 to 1024", aliases=("num-generations",)
    )
    teacher_beta: float = of_optimiser(
        0.5,
        "β: 0 takes the KL divergence from student to teacher, 1 that from teacher to student, a "
        "number between the generalised Jensen-Shannon divergence",
        "0 to 1",
    )
    own_answers: float = of_sampling(
        1.0,
        "λ, the share of prompts whose answers the student writes; the others are learned with the "
        'answer of their row ("completion")',
        "0 to 1",
        aliases=("lmbda",),
    )

    def answer_of_row(
        self, data: Prompts, window: int, draw: float, model: Model
    ) -> SampledAnswer | None:
        if draw < self.own_answers:
            return None
        row, prompt = data.rows[window], data.prompt(window).tolist()
        ids = _answer_ids(row, prompt, model.tokenizer)
        n = min(len(ids), self.answer_tokens)
        return SampledAnswer(np.array(ids[:n], np.int32), np.zeros(n, np.float32), n < len(ids))

    def examples(self, data: Prompts, groups: Sequence[Group]) -> list[WeighedAnswer]:
        return [
            WeighedAnswer(data.prompt(group.window), answer, 1.0, 1.0)
            for group in groups
            for answer in group.answers
        ]

    def count(self, groups: Sequence[Group]) -> WrittenAnswers:
        answers = [answer for group in groups for answer in group.answers]
        n_cut = sum(answer.is_cut for answer in answers)
        return WrittenAnswers(len(answers), sum(map(len, answers)), n_cut)

    def report(self, batch: Any, outputs: Mapping[str, np.ndarray]) -> WrittenAnswers:
        """Nothing: all is counted as answers are written."""
        return WrittenAnswers()

    def cost(self, tally: WrittenAnswers) -> None:
        """Nobody judges them."""

    def feed(self, task: Task) -> TaughtFeed:
        check_prompts(task.corpus, self)
        if self.own_answers < 1:
            self._check_answers(task.corpus.train)
        return super().feed(task)

    def _check_answers(self, data: Any) -> None:
        """ConfigError for a row without an answer."""
        for row in data.rows:
            if not _answer(row):
                fault = (
                    f"is {self.own_answers:g}, but {row.place.file}, {row.place} has no answer, "
                    f'wanted a text as "{ANSWER[0]}" of each row'
                )
                raise ConfigError([("own_answers", fault)])


def _answer(row: PromptRow) -> str:
    """The answer that a row has, "" for none."""
    texts = (row.columns.get(name) for name in ANSWER)
    return next((text for text in texts if isinstance(text, str) and text), "")


def _answer_ids(row: PromptRow, prompt: list[int], tokenizer: Tokenizer) -> list[int]:
    """The tokens that go on after a prompt with its row's answer, and end it."""
    text, ids = _answer(row), list[int]()
    if isinstance(row.prompt, str):
        ids = tokenizer.encode_prompt(row.prompt + text)
    is_whole = ids[: len(prompt)] == prompt  # the prompt is plain text
    ids = ids[len(prompt) :] if is_whole else tokenizer.encode(text, add_special=False)
    ends = tokenizer.eos_id, tokenizer.eot_id  # of texts, of turns
    end = next((i for i in (ends if is_whole else ends[::-1]) if i is not None), None)
    return ids if end is None else [*ids, end]
