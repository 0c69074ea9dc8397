"""Train tests/golden/models/qwen3 with PyTorch and PEFT to classify and to embed texts; write the
data and every loss, as make.py does for what is written.

    python make_texts.py [classify] [embed]     in an environment as make.py's

Of a document to classify the last token is its label's; of one to embed it is a mark: 0 of what
asks, 1 of its answer, 2 of a hard negative, which follow one another. No pass reads it.
"""

from __future__ import annotations

import json
import sys
from math import cos, pi
from typing import Any

import numpy as np
import torch
from make import COMMON, HERE, Data
from peft import get_peft_model
from reference import N_VOCAB, base_model, lora_config, start
from torch.nn.functional import cross_entropy, normalize

LABELS = (7, 11, 13)
SETTINGS: dict[str, dict[str, Any]] = {
    "classify": {"max_steps": 100, "batch": 2, "grad_accum": 2, "lr": 2e-3, "warmup_steps": 10}
    | {"class_weights": (1.0, 2.0, 0.5)},
    "embed": {"max_steps": 100, "batch": 2, "grad_accum": 2, "lr": 1e-3, "warmup_steps": 10}
    | {"temperature": 0.1, "pooling": "mean"},
}


def class_data(n_windows: int) -> Data:
    """Windows of 3 to 5 texts of three classes, told by their first token, unevenly many."""
    data = Data(np.random.default_rng(4))
    for _ in range(60):
        text = data.prompt(3, 9)
        data.documents.append([*text, LABELS[min(text[0] % 4, 2)]])
        data.prompts.append(len(text))
    for _ in range(n_windows):
        n = int(data.rng.integers(3, 6))
        data.windows.append([int(i) for i in data.rng.choice(60, n, replace=False)])
    return data


def group_data(n_windows: int) -> Data:
    """Two groups in a window: a text, the one that follows, and at times a nearer one."""
    data = Data(np.random.default_rng(5))
    groups = []
    for i in range(40):
        text = data.prompt(4, 8)
        other = [(t - 2) % (N_VOCAB - 3) + 3 for t in text]
        members = [(text, 0), (other, 1)] + [([*text[1:], 5], 2)] * (i % 3 == 0)
        groups.append(range(len(data.documents), len(data.documents) + len(members)))
        data.documents += [[*tokens, mark] for tokens, mark in members]
        data.prompts += [len(tokens) for tokens, _ in members]
    for _ in range(0, n_windows, 2):  # none twice in a batch of two windows
        four = data.rng.choice(40, 4, replace=False)
        data.windows += [[i for g in two for i in groups[g]] for two in (four[:2], four[2:])]
    return data


def hidden_of(model: Any, texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The last hidden states of texts, padded, (n, width, n_embd), and where there are tokens."""
    width = max(map(len, texts))
    ids, mask = torch.zeros(len(texts), width, dtype=torch.long), torch.zeros(len(texts), width)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
    inner = model.base_model.model.model
    return inner(input_ids=ids, attention_mask=mask).last_hidden_state, mask


def class_loss(model: Any, batch: list[list[int]], settings: Any, step: list[list[int]]) -> Any:
    """A batch's part of the weighted mean over the step's texts."""
    weights = torch.tensor(settings["class_weights"])
    hidden, mask = hidden_of(model, [d[:-1] for d in batch])
    last = hidden[torch.arange(len(batch)), mask.sum(1).long() - 1]
    logits = last @ model.base_model.model.lm_head.weight[list(LABELS)].T
    classes = torch.tensor([LABELS.index(d[-1]) for d in batch])
    whole = sum(settings["class_weights"][LABELS.index(d[-1])] for d in step)
    return cross_entropy(logits, classes, weight=weights, reduction="sum") / whole


def group_loss(model: Any, batch: list[list[int]], settings: Any, step: list[list[int]]) -> Any:
    """A batch's part of InfoNCE's mean over the step's groups; negatives are the batch's."""
    hidden, mask = hidden_of(model, [d[:-1] for d in batch])
    vectors = normalize((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=1)
    marks = torch.tensor([d[-1] for d in batch])
    asks = torch.nonzero(marks == 0)[:, 0]
    others = torch.nonzero(marks > 0)[:, 0]
    scores = vectors[asks] @ vectors[others].T / settings["temperature"]
    right = torch.searchsorted(others, asks + 1)
    whole = sum(d[-1] == 0 for d in step)
    return cross_entropy(scores, right, reduction="sum") / whole


def train(objective: str, data: Data, settings: dict[str, Any]) -> list[float]:
    """Every step's loss, before its update."""
    model = get_peft_model(base_model(), lora_config())
    start(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=0.0, weight_decay=settings["weight_decay"])
    loss_of = {"classify": class_loss, "embed": group_loss}[objective]
    n_steps, n_warmup, size = settings["max_steps"], settings["warmup_steps"], settings["batch"]
    losses, windows = list[float](), iter(data.windows)
    for number in range(n_steps):
        batches = [
            [data.documents[i] for _ in range(size) for i in next(windows)]
            for _ in range(settings["grad_accum"])
        ]
        step = [document for batch in batches for document in batch]
        rate = (number + 1) / n_warmup
        if number >= n_warmup:
            rate = (1 + cos(pi * (number - n_warmup) / (n_steps - n_warmup))) / 2
        optimiser.zero_grad()
        parts = [loss_of(model, batch, settings, step) for batch in batches]
        for part in parts:
            part.backward()
        torch.nn.utils.clip_grad_norm_(trained, settings["clip"])
        for group in optimiser.param_groups:
            group["lr"] = settings["lr"] * rate
        optimiser.step()
        losses.append(sum(part.item() for part in parts))
    return losses


def main() -> None:
    torch.set_num_threads(1)
    for objective in sys.argv[1:] or SETTINGS:
        settings = COMMON | SETTINGS[objective]
        n_windows = settings["max_steps"] * settings["batch"] * settings["grad_accum"]
        data = {"classify": class_data, "embed": group_data}[objective](n_windows)
        losses = train(objective, data, settings)
        arrays = {"settings": np.array(json.dumps(settings)), **data.arrays()}
        np.savez_compressed(HERE / f"{objective}.npz", **arrays, losses=np.array(losses))
        print(objective, losses[:3], "…", losses[-3:])


if __name__ == "__main__":
    main()
