"""A small network learns to tell two moons apart: values, gradients and a training loop.

usage: python examples/two_moons.py
"""

import numpy as np

from pyggml.eager import Value, tensor
from pyggml.eager.functions import relu
from pyggml.eager.optim import SGD

N_STEPS = 100


def moons(n: int, noise: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Points (n, 2) of two half circles that reach into each other, and their labels 1 and -1."""
    angle = rng.uniform(0, np.pi, n)
    label = np.where(np.arange(n) % 2, 1, -1)
    above = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    points = np.where(label[:, None] > 0, above, [1.0, 0.5] - above)
    return points + noise * rng.standard_normal((n, 2)), label


def layer(n_in: int, n_out: int, rng: np.random.Generator) -> list[Value]:
    """A matrix and a bias."""
    w = rng.uniform(-1, 1, (n_in, n_out)) / np.sqrt(n_in)
    return [tensor(w, requires_grad=True), tensor(np.zeros(n_out), requires_grad=True)]


def scores(x: np.ndarray, parameters: list[Value]) -> Value:
    """The network's output for each point, (n, 1): above 0 it says 1, below 0 it says -1."""
    w1, b1, w2, b2, w3, b3 = parameters
    return relu(relu(x @ w1 + b1) @ w2 + b2) @ w3 + b3


def loss_of(x: np.ndarray, y: np.ndarray, parameters: list[Value]) -> Value:
    """The mean margin loss max(1 - y · score, 0), and a little of every weight's square."""
    margin = relu(1 - y[:, None] * scores(x, parameters)).mean()
    return margin + 1e-4 * sum((p * p).sum() for p in parameters)


def train(x: np.ndarray, y: np.ndarray, parameters: list[Value]) -> list[float]:
    """The loss before each step."""
    optimiser, losses = SGD(parameters, lr=1.0), []
    for step in range(N_STEPS):
        loss = loss_of(x, y, parameters)
        optimiser.zero_grad()
        loss.backward()
        optimiser.lr = 1 - 0.9 * step / N_STEPS
        optimiser.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    rng = np.random.default_rng(1337)
    x, y = moons(100, 0.1, rng)
    parameters = [p for sizes in ((2, 16), (16, 16), (16, 1)) for p in layer(*sizes, rng)]
    losses = train(x, y, parameters)
    for step in (*range(0, N_STEPS, 10), N_STEPS - 1):
        print(f"step {step:3}: loss {losses[step]:.4f}")
    right = (scores(x, parameters).numpy()[:, 0] > 0) == (y > 0)
    print(f"{right.sum()} of {len(y)} points are told right")


if __name__ == "__main__":
    main()
