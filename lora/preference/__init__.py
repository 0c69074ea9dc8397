"""Training on preferences: answers that are wanted against answers that are not.

    corpus = read_preferences(["pairs.jsonl"], model.tokenizer, DataConfig(ctx=512), "dpo")
    objective = Preference(PreferenceConfig(objective="dpo", beta=0.1), reference=model)
    Trainer(adapter.model, adapter.parameters, corpus, TrainConfig(), objective).run(print)

files       files → rows → what is trained on and what is held out
data        rows → answers → windows of whole answers
batch       windows → what the leaves of a batch hold
losses      the formulas of DPO, ORPO and KTO, as graphs
scorer      log-probabilities of a window's answers, nothing trained
objective   the loss of a step, the rewards, and the reference's numbers
"""

from pyggml.lora.preference.data import Answer, Preferences, preference_corpus
from pyggml.lora.preference.files import read_preferences
from pyggml.lora.preference.objective import Preference

__all__ = ["Answer", "Preference", "Preferences", "preference_corpus", "read_preferences"]
