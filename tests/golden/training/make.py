"""Train tests/golden/models/qwen3 with PyTorch, PEFT and TRL; write the data and every loss.

One file of arrays for each objective, `sft`, `distill`, `gkd`, `dpo`, `orpo`, `kto`, `simpo`,
`ipo`, `grpo`, `dr_grpo` and `gspo`:

settings   JSON: those of `pyggml.lora.TrainConfig`, and the objective's own
ids, lengths, prompts        documents, one after the other; tokens of each, and of its prompt
windows                      number of documents in each window, in the order of training
order                        the documents of the windows
losses                       of every step, before its update
chosen, rejected, margins    rewards of every step, of preferences
rewards                      of every document, where they are answers to be rewarded; each window
                             has those to one prompt

Documents with even numbers are wanted answers, those with odd ones are not.

Everything is float32 on the CPU. A and B start as in qwen3-lora.gguf, whose alpha is not its rank
and whose B is not zero; the reference is the model without them. The learning rate follows
`pyggml.lora.schedule`: its warm-up starts at lr / n, where transformers' starts at 0.

    python make.py [OBJECTIVE ...]     in an environment with torch, transformers, peft, trl, gguf
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from itertools import chain
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import get_peft_model
from reference import EOS, N_VOCAB, base_model, lora_config, start
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import PreTrainedTokenizerFast, Trainer
from transformers import TrainingArguments as Arguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

HERE = Path(__file__).parent
REWARDS = ("chosen", "rejected", "margins")
COMMON = {"ctx": 48, "weight_decay": 0.1, "clip": 0.5, "lr_min": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"max_steps": 100, "batch": 2, "grad_accum": 2, "lr": 2e-3, "warmup_steps": 10},
    "distill": {"max_steps": 100, "batch": 2, "grad_accum": 2, "lr": 2e-3, "warmup_steps": 10}
    | {"teacher_top_k": 16, "teacher_temperature": 2.0, "hard_weight": 0.3},
    "gkd": {"max_steps": 100, "batch": 2, "grad_accum": 2, "lr": 2e-3, "warmup_steps": 10}
    | {"teacher_top_k": N_VOCAB, "teacher_beta": 0.3, "answer_tokens": 12},
    "dpo": {"max_steps": 100, "batch": 2, "grad_accum": 2, "lr": 5e-4, "warmup_steps": 10}
    | {"beta": 0.3},
    "orpo": {"max_steps": 20, "batch": 2, "grad_accum": 1, "lr": 2e-3, "warmup_steps": 5}
    | {"beta": 0.25},
    "kto": {"max_steps": 20, "batch": 2, "grad_accum": 1, "lr": 1e-3, "warmup_steps": 5}
    | {"beta": 0.2, "desirable_weight": 1.2, "undesirable_weight": 0.9},
    "simpo": {"max_steps": 20, "batch": 2, "grad_accum": 1, "lr": 1e-3, "warmup_steps": 5}
    | {"beta": 2.0, "gamma": 1.2},
    "ipo": {"max_steps": 20, "batch": 2, "grad_accum": 2, "lr": 1e-3, "warmup_steps": 5}
    | {"beta": 0.3},
}
SAMPLED = {
    "batch": 2,
    "grad_accum": 1,
    "lr": 2e-3,
    "warmup_steps": 5,
    "iterations": 2,
    "answers": 4,
}
SAMPLED |= {"answer_tokens": 12, "clip_low": 0.1, "clip_high": 0.15, "kl_weight": 0.04}
SAMPLED |= {"max_steps": 100}
SETTINGS |= {
    "grpo": SAMPLED | {"temperature": 0.7},
    "dr_grpo": SAMPLED | {"temperature": 1.3, "clip_low": 0.03, "clip_high": 0.04},
    "gspo": SAMPLED | {"temperature": 0.8, "clip_low": 0.02, "clip_high": 0.03},
}
# What TRL's settings beside its defaults are called.
OF_TRL: dict[str, dict[str, Any]] = {
    "simpo": {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": SETTINGS["simpo"]["gamma"]},
    "ipo": {"loss_type": "ipo"},
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}


# -- data ---------------------------------------------------------------------------------------


class Data:
    """Documents with prompts, and windows of them in the order of training."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.documents: list[list[int]] = []
        self.prompts: list[int] = []
        self.windows: list[list[int]] = []

    def prompt(self, low: int, high: int) -> list[int]:
        return [int(t) for t in self.rng.integers(3, N_VOCAB, self.rng.integers(low, high))]

    def add(self, prompt: list[int], low: int, high: int, rising: bool) -> int:
        """A document whose completion rises by one from token to token, or is random."""
        n = int(self.rng.integers(low, high))
        rise = [(prompt[-1] + i - 3) % (N_VOCAB - 3) + 3 for i in range(1, n)]
        completion = rise if rising else self.prompt(n - 1, n)
        self.documents.append([*prompt, *completion, EOS])
        self.prompts.append(len(prompt))
        return len(self.documents) - 1

    def arrays(self) -> dict[str, np.ndarray]:
        return {
            "ids": np.concatenate(self.documents).astype(np.int16),
            "lengths": np.array([len(d) for d in self.documents], np.int16),
            "prompts": np.array(self.prompts, np.int16),
            "windows": np.array([len(w) for w in self.windows], np.int8),
            "order": np.concatenate(self.windows).astype(np.int16),
        }


def sft_data(n_windows: int) -> Data:
    """Windows of as many documents as fit, so that none has as many targets as another."""
    data = Data(np.random.default_rng(1))
    for i in range(40):
        data.add(data.prompt(2, 9), 3, 14, rising=i % 4 > 0)
    for _ in range(n_windows):
        window, room = list[int](), COMMON["ctx"] + 1
        for i in data.rng.permutation(40):
            if len(data.documents[i]) > room:
                break
            window.append(int(i))
            room -= len(data.documents[i])
        data.windows.append(window)
    return data


def pair_data(n_windows: int) -> Data:
    """Two pairs in a window; documents 2i and 2i + 1 are chosen and rejected of pair i."""
    data = Data(np.random.default_rng(2))
    for _ in range(40):
        prompt = data.prompt(2, 7)
        for rising in (True, False):
            data.add(prompt, 3, 7, rising)
    for _ in range(n_windows):
        pairs = data.rng.choice(40, 2, replace=False)
        data.windows.append([int(2 * i + side) for i in pairs for side in (0, 1)])
    return data


def label_data(n_windows: int) -> Data:
    """Two documents in a window; those with even numbers are good."""
    data = Data(np.random.default_rng(3))
    for i in range(40):
        data.add(data.prompt(2, 7), 3, 7, rising=i % 2 == 0)
    for _ in range(n_windows):
        data.windows.append([int(i) for i in data.rng.choice(40, 2, replace=False)])
    return data


def sampled_data(n_windows: int, answers: int) -> Data:
    """The answers to one prompt in a window."""
    data = Data(np.random.default_rng(4))
    for _ in range(n_windows):
        prompt = data.prompt(2, 7)
        data.windows.append([data.add(prompt, 3, 12, rising=i % 2 == 0) for i in range(answers)])
    return data


def reward(document: list[int], n_prompt: int) -> float:
    """The share of a completion's tokens that are a multiple of 5, and its length."""
    completion = document[n_prompt:]
    return sum(i % 5 == 0 for i in completion) / len(completion) + len(completion) / 50


# -- training -----------------------------------------------------------------------------------


class Recorded:
    """Of a trainer: rows in their order, pyggml's learning rate, losses and rewards of batches."""

    losses: list[float]
    rewards: list[list[float]]

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(dataset or self.train_dataset)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        optimizer = optimizer or self.optimizer
        n_warmup = int(self.args.warmup_steps)

        def rate(step: int) -> float:
            if step < n_warmup:
                return (step + 1) / n_warmup
            return (1 + cos(pi * (step - n_warmup) / (num_training_steps - n_warmup))) / 2

        self.lr_scheduler = LambdaLR(optimizer, rate)
        return self.lr_scheduler

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(float(loss))
        logged = getattr(self, "_metrics", None) or getattr(self, "_stored_metrics", None)
        if logged is not None:  # of each batch, until they are told
            self.rewards.append([logged["train"][f"rewards/{name}"][-1] for name in REWARDS])
        return loss


class Sft(Recorded, Trainer):
    """transformers' trainer, which weighs by tokens over all batches of a step."""


class Distilled(Sft):
    """The teacher is the model without A and B. TRL has no loss over a teacher's likeliest tokens
    and all others together; that of GKD is its own."""

    def __init__(self, how: dict[str, Any], **given: Any) -> None:
        super().__init__(**given)
        self.teacher, self.how = base_model().eval(), how

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        labels = inputs.pop("labels")[:, 1:]
        learned = labels != -100
        z = model(**inputs).logits[:, :-1][learned]
        with torch.no_grad():
            t = self.teacher(**inputs).logits[:, :-1][learned]
        n = len(z) if num_items_in_batch is None else num_items_in_batch
        if beta := self.how.get("teacher_beta"):
            return GKDTrainer.generalized_jsd_loss(z, t, beta=beta, num_items_in_batch=n)
        return distillation(z, t, labels[learned], self.how) / n


def distillation(z: Any, t: Any, targets: Any, how: dict[str, Any]) -> torch.Tensor:
    """The sum over rows of logits: the student's z, the teacher's t."""
    tau, alpha = how["teacher_temperature"], how["hard_weight"]
    log_q, log_p = ((x / tau).log_softmax(-1) for x in (t, z))
    likeliest = log_q.topk(how["teacher_top_k"], dim=-1).indices
    absent = ~(likeliest == targets[:, None]).any(-1)
    likeliest[absent, -1] = targets[absent]

    def binned(log_x: torch.Tensor) -> torch.Tensor:
        others = log_x.scatter(-1, likeliest, float("-inf")).logsumexp(-1, keepdim=True)
        return torch.cat([log_x.gather(-1, likeliest), others], dim=-1)

    q, p = binned(log_q), binned(log_p)
    kl = (q.exp() * (q - p)).sum()
    ce = torch.nn.functional.cross_entropy(z, targets, reduction="sum")
    return alpha * ce + (1 - alpha) * tau**2 * kl


class Dpo(Recorded, DPOTrainer): ...


class Orpo(Recorded, ORPOTrainer): ...


class Kto(Recorded, KTOTrainer): ...


class Cpo(Recorded, CPOTrainer): ...


class Grpo(Recorded, GRPOTrainer):
    """With TRL's own order of prompts, each of which is repeated; and its own metrics."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return GRPOTrainer._get_train_sampler(self, dataset)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = GRPOTrainer.training_step(self, *args, **kwargs)
        self.losses.append(float(loss))
        return loss


PAIRS = {
    "dpo": (Dpo, DPOConfig),
    "ipo": (Dpo, DPOConfig),
    "orpo": (Orpo, ORPOConfig),
    "simpo": (Cpo, CPOConfig),
}


def arguments(kind: type, settings: dict[str, Any], folder: str, per_batch: int) -> Any:
    own = {
        name: settings[name]
        for name in ("beta", "desirable_weight", "undesirable_weight")
        if name in settings
    } | settings.get("of_trl", {})
    return kind(
        folder,
        **own,
        **({} if kind in (Arguments, GRPOConfig) else {"max_length": 512}),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=per_batch,
        gradient_accumulation_steps=settings["grad_accum"],
        max_steps=settings["max_steps"],
        learning_rate=settings["lr"],
        warmup_steps=settings["warmup_steps"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["clip"],
        lr_scheduler_type="cosine",
        optim="adamw_torch",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )


def train_sft(data: Data, settings: dict[str, Any], folder: str) -> Recorded:
    """One item of the dataset is one micro-batch: the documents of `batch` windows."""
    model, size = get_peft_model(base_model(), lora_config()), settings["batch"]
    starts = range(0, len(data.windows), size)
    batches = [list(chain(*data.windows[s : s + size])) for s in starts]

    def collate(items: list[list[int]]) -> dict[str, torch.Tensor]:
        (numbers,) = items
        width = max(len(data.documents[i]) for i in numbers)
        ids = torch.full((len(numbers), width), EOS)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for row, i in enumerate(numbers):
            document, first = torch.tensor(data.documents[i]), data.prompts[i]
            ids[row, : len(document)] = document
            mask[row, : len(document)] = 1
            labels[row, first : len(document)] = document[first:]
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    start(model)
    kind = partial(Distilled, settings) if "teacher_top_k" in settings else Sft
    return kind(
        model=model,
        args=arguments(Arguments, settings, folder, 1),
        train_dataset=batches,
        data_collator=collate,
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Words "w3", "w4", … and </s>, by number."""
    words = {"</s>" if i == EOS else f"w{i}": i for i in range(N_VOCAB)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="</s>")


def text(ids: list[int]) -> str:
    return " ".join("</s>" if i == EOS else f"w{i}" for i in ids)


def train_pairs(kind: type, config: type, data: Data, settings: Any, folder: str) -> Recorded:
    rows = []
    for number in (i for window in data.windows for i in window if i % 2 == 0):
        n, (chosen, rejected) = data.prompts[number], data.documents[number : number + 2]
        answers = {"chosen": " " + text(chosen[n:]), "rejected": " " + text(rejected[n:])}
        rows.append({"prompt": text(chosen[:n]), **answers})
    return trainer(kind, config, rows, settings, folder)


def train_labels(data: Data, settings: Any, folder: str) -> Recorded:
    rows = []
    for i in (i for window in data.windows for i in window):
        document, n = data.documents[i], data.prompts[i]
        row = {"prompt": text(document[:n]), "completion": " " + text(document[n:])}
        rows.append(row | {"label": i % 2 == 0})
    return trainer(Kto, KTOConfig, rows, settings, folder)


def trainer(kind: type, config: type, rows: list[Any], settings: Any, folder: str) -> Recorded:
    found = kind(
        model=base_model(),
        args=arguments(config, settings, folder, 2 * settings["batch"]),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=lora_config(),
    )
    start(found.model)
    return found


def train_sampled(data: Data, settings: Any, folder: str) -> Recorded:
    """A row is a window; its answers are given as those that were sampled."""
    rows = [{"prompt": str(number)} for number in range(len(data.windows))]

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        given = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for i, number in enumerate(map(int, prompts)):
            document = data.windows[number][i % settings["answers"]]
            ids, n = data.documents[document], data.prompts[document]
            given["prompt_ids"].append(ids[:n])
            given["completion_ids"].append(ids[n:])
            given["logprobs"].append([0.0] * len(ids[n:]))
        return given

    def rewards(completion_ids: list[list[int]], **others: Any) -> list[float]:
        return [reward(ids, 0) for ids in completion_ids]

    size = settings["answers"] * settings["batch"]
    own = {"beta": settings["kl_weight"], "epsilon": settings["clip_low"]}
    own |= {"epsilon_high": settings["clip_high"], "num_iterations": settings["iterations"]}
    own |= {"num_generations": settings["answers"], "shuffle_dataset": False}
    own |= {"max_completion_length": settings["answer_tokens"]}
    own |= {"temperature": settings["temperature"]}
    args = arguments(GRPOConfig, settings | {"of_trl": own | settings["of_trl"]}, folder, size)
    found = Grpo(
        model=base_model(),
        reward_funcs=[rewards],
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=lora_config(),
        rollout_func=rollout,
    )
    start(found.model)
    return found


def made(objective: str) -> dict[str, np.ndarray]:
    """The arrays of one objective."""
    settings = COMMON | SETTINGS[objective]
    of_trl = {"of_trl": OF_TRL.get(objective, {})}
    n_windows = settings["max_steps"] * settings["batch"] * settings["grad_accum"]
    with tempfile.TemporaryDirectory() as folder:
        if objective in ("sft", "distill", "gkd"):
            data = sampled_data(n_windows, 1) if objective == "gkd" else sft_data(n_windows)
            trained = train_sft(data, settings, folder)
        elif "answers" in settings:
            data = sampled_data(n_windows // settings["iterations"], settings["answers"])
            trained = train_sampled(data, settings | of_trl, folder)
        elif objective == "kto":
            data = label_data(n_windows)
            trained = train_labels(data, settings, folder)
        else:
            data = pair_data(n_windows)
            kinds = PAIRS[objective]
            trained = train_pairs(*kinds, data, settings | of_trl, folder)
        trained.losses, trained.rewards = [], []
        trained.train()
    steps = np.reshape(trained.losses, (settings["max_steps"], -1))
    rewards = np.reshape(trained.rewards, (*steps.shape, -1)).mean(axis=1)
    earned = {}
    if "answers" in settings:
        pairs = zip(data.documents, data.prompts, strict=True)
        earned["rewards"] = np.array([reward(*pair) for pair in pairs], np.float32)
    return {
        "settings": np.array(json.dumps(settings)),
        **data.arrays(),
        **earned,
        "losses": steps.sum(axis=1),
        **dict(zip(REWARDS, rewards.T, strict=False)),
    }


def main() -> None:
    torch.set_num_threads(1)  # so small, threads only wait for each other
    for objective in sys.argv[1:] or SETTINGS:
        arrays = made(objective)
        np.savez_compressed(HERE / f"{objective}.npz", **arrays)
        losses = arrays["losses"]
        print(objective, losses[:3], "…", losses[-3:])


if __name__ == "__main__":
    main()
