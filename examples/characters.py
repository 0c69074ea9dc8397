"""A model of characters: from the last eight it tells the next, and writes a text of its own.

usage: python examples/characters.py [TEXT.txt]        (default: the text of the demo)

Embeddings of the last characters go through one hidden layer (Bengio et al. 2003).
"""

import sys
from pathlib import Path

import numpy as np

from pyggml.cli.demo import TEXT
from pyggml.eager import Value, tensor
from pyggml.eager.functions import cross_entropy, embedding, softmax, tanh
from pyggml.eager.optim import AdamW

N_CONTEXT, N_EMBD, N_HIDDEN = 8, 16, 128
BATCH, N_STEPS = 64, 1500


def parameters_for(n_vocab: int, rng: np.random.Generator) -> list[Value]:
    """Embeddings, and matrix and bias of two layers."""
    shapes = [(n_vocab, N_EMBD), (N_CONTEXT * N_EMBD, N_HIDDEN), (N_HIDDEN,), (N_HIDDEN, n_vocab)]
    drawn = [rng.standard_normal(s) / np.sqrt(s[0]) for s in shapes]
    drawn[0] *= np.sqrt(n_vocab)
    return [tensor(a, requires_grad=True) for a in (*drawn, np.zeros(n_vocab))]


def logits(ids: np.ndarray, parameters: list[Value]) -> Value:
    """Scores of the next character (batch, n_vocab) after ids (batch, N_CONTEXT)."""
    table, w1, b1, w2, b2 = parameters
    x = embedding(table, ids).reshape(len(ids), -1)
    return tanh(x @ w1 + b1) @ w2 + b2


def train(ids: np.ndarray, parameters: list[Value], n_steps: int, rng: np.random.Generator) -> None:
    optimiser, losses = AdamW(parameters, lr=3e-3), list[float]()
    for step in range(n_steps):
        first = rng.integers(0, len(ids) - N_CONTEXT, (BATCH, 1))
        read = ids[first + np.arange(N_CONTEXT)]
        loss = cross_entropy(logits(read, parameters), ids[first[:, 0] + N_CONTEXT])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if (step + 1) % 250 == 0 or step in (0, n_steps - 1):
            print(f"step {step + 1:4}: loss {np.mean(losses[-100:]):.3f}")


def write(
    start: np.ndarray, n: int, parameters: list[Value], rng: np.random.Generator
) -> list[int]:
    """n characters after the ids `start`."""
    ids = list(start)
    for _ in range(n):
        p = softmax(logits(np.array([ids[-N_CONTEXT:]]), parameters)).numpy()[0]
        ids.append(int(rng.choice(len(p), p=p / p.sum())))
    return ids[len(start) :]


def main(path: str | Path = TEXT, n_steps: int = N_STEPS) -> None:
    text = Path(path).read_text(encoding="utf-8")
    characters = sorted(set(text))
    number = {c: i for i, c in enumerate(characters)}
    ids = np.array([number[c] for c in text], np.int32)
    rng = np.random.default_rng(0)
    parameters = parameters_for(len(characters), rng)
    print(f"{len(ids):,} characters, {len(characters)} different ones")
    train(ids, parameters, n_steps, rng)
    print("".join(characters[i] for i in write(ids[:N_CONTEXT], 200, parameters, rng)))


if __name__ == "__main__":
    main(*sys.argv[1:])
