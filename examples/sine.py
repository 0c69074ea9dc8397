"""A graph learns a curve: tensors, a loss, an optimiser that is part of the graph, epochs.

usage: python examples/sine.py
"""

import numpy as np

from pyggml import fit, ops
from pyggml.eager.fit import Epoch
from pyggml.eager.optim import AdamW
from pyggml.graph.tensor import Tensor, leaf, zeros

BATCH, WIDTH, N_EPOCHS = 32, 24, 500


def layer(n_in: int, n_out: int, rng: np.random.Generator) -> list[Tensor]:
    """A matrix (n_out, n_in) and a bias (n_out,)."""
    w = rng.uniform(-1, 1, (n_out, n_in)) / np.sqrt(n_in)
    return [leaf(w.astype(np.float32), "w"), zeros((n_out,), name="b")]


def curve(x: Tensor, parameters: list[Tensor]) -> Tensor:
    """(BATCH, 1): a line through tanh of lines through x."""
    w1, b1, w2, b2 = parameters
    hidden = ops.tanh(ops.add(ops.mul_mat(w1, x), b1))
    return ops.add(ops.mul_mat(w2, hidden), b2)


def train(parameters: list[Tensor], x: Tensor, points: np.ndarray) -> list[Epoch]:
    """Lower the mean square of what is missing to sin(3x), a quarter of the points held out."""
    y = zeros(x.shape, name="y")
    loss = ops.mean(ops.reshape(ops.sqr(ops.sub(curve(x, parameters), y)), (1, BATCH)))
    optimiser = AdamW(parameters, lr=0.02, weight_decay=0.0, loss=loss)
    data = {x: points, y: np.sin(3 * points)}
    return fit(optimiser, data, N_EPOCHS, held_out=0.25)


def main() -> None:
    rng = np.random.default_rng(7)
    x = zeros((BATCH, 1), name="x")
    parameters = [*layer(1, WIDTH, rng), *layer(WIDTH, 1, rng)]
    for epoch in train(parameters, x, rng.uniform(-2, 2, (512, 1)).astype(np.float32))[99::100]:
        print(epoch)


if __name__ == "__main__":
    main()
