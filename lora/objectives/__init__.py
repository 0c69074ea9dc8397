"""What a run minimises: one file for each objective, and the table of all.

objective    what an objective declares; those of texts
answers      those that compare answers: leaves, batches, rewards, scores of a fixed model
sampled      those that learn from answers which the model writes as it trains
rewarded     of these, those whose answers are rewarded
taught       those that learn a teacher's probabilities
tally        what a batch adds to a report
choice       the settings of all objectives as one, for a command line

docs/adding-an-objective.md shows how to add one, here or in a program of one's own:

    objective = OBJECTIVES["dpo"](beta=0.3)
    corpus = read_corpus("pairs.jsonl", model.tokenizer, DataConfig(ctx=512), rows=objective.rows)
    args = (adapter.model, adapter.parameters, corpus, TrainConfig(), objective)
    Trainer(*args, reference=model).run()
"""

from collections.abc import Mapping

from pyggml.lora.objectives.answers import LabelObjective, PairObjective
from pyggml.lora.objectives.classify import Classify
from pyggml.lora.objectives.distill import Distill
from pyggml.lora.objectives.dpo import DPO
from pyggml.lora.objectives.dr_grpo import DrGRPO
from pyggml.lora.objectives.embed import Embed
from pyggml.lora.objectives.gkd import GKD
from pyggml.lora.objectives.grpo import GRPO
from pyggml.lora.objectives.gspo import GSPO
from pyggml.lora.objectives.ipo import IPO
from pyggml.lora.objectives.kto import KTO
from pyggml.lora.objectives.objective import LossNet, Objective, Outputs, TextObjective
from pyggml.lora.objectives.orpo import ORPO
from pyggml.lora.objectives.sft import SFT
from pyggml.lora.objectives.simpo import SimPO
from pyggml.lora.objectives.tally import ClassCounts, JudgedAnswers, Rewards, Tally, TokensRight

_OF_ANSWERS = (DPO, ORPO, KTO, SimPO, IPO, GRPO, DrGRPO, GSPO, GKD)
OBJECTIVES: Mapping[str, type[Objective]] = {
    kind.name: kind for kind in (SFT, Distill, *_OF_ANSWERS, Classify, Embed)
}
USUAL = SFT  # where none is named

__all__ = [
    "OBJECTIVES", "USUAL", "ClassCounts", "JudgedAnswers", "LabelObjective", "LossNet", "Objective",
    "Outputs", "PairObjective", "Rewards", "Tally", "TextObjective", "TokensRight",
]  # fmt: skip
