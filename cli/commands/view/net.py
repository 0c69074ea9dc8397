"""A net that is small enough to be looked at whole: two layers that learn XOR."""

import numpy as np

from pyggml import ops
from pyggml.graph import Graph
from pyggml.graph.tensor import Tensor, leaf

_WIDTH = 3  # of the hidden layer


def small_net() -> tuple[Graph, dict[str, Tensor]]:
    """Its loss over four points, which is the output "loss", and its parameters by name."""
    rng = np.random.default_rng(7)

    def drawn(name: str, *shape: int) -> Tensor:
        return leaf(rng.normal(0, 0.8, shape).astype(np.float32), name)

    x = leaf(np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32), "x")
    target = leaf(np.array([[0], [1], [1], [0]], np.float32), "target")
    w1, b1 = drawn("w1", _WIDTH, 2), drawn("b1", _WIDTH)
    w2, b2 = drawn("w2", 1, _WIDTH), drawn("b2", 1)
    hidden = ops.tanh(ops.add(ops.mul_mat(w1, x).named("w1·x"), b1).named("w1·x + b1"))
    y = ops.add(ops.mul_mat(w2, hidden.named("hidden")).named("w2·hidden"), b2).named("y")
    error = ops.sqr(ops.sub(y, target).named("y − target")).named("error")
    mean = ops.reshape(ops.mean(ops.reshape(error, (1, 4))), ()).named("mean error")
    decay = ops.scale(ops.sum_(ops.sqr(w2).named("w2²")), 0.01).named("decay")  # w2 is read twice
    loss = ops.add(mean, decay).named("loss")
    return Graph.of(loss=loss), {"w1": w1, "b1": b1, "w2": w2, "b2": b2}
