"""Values: graphs that compute as they are built, for learning and for looking.

tensor, apply      numbers → Value; any op of `pyggml.ops` on values
Value              operators, `backward`, `grad`, `numpy`, and the engine's graph behind them
functions          exp, softmax, cross_entropy, concatenate, …
optim              SGD and AdamW
"""

from pyggml.eager.value import Value, apply, tensor

__all__ = ["Value", "apply", "tensor"]
