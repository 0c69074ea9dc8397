"""A laboratory of interpretability: which part of a model does what, on GGUF files.

direct_attribution      what each head and neuron adds to a logit
qk_circuit, ov_circuit  the matrices of a head; promoted_tokens, copying_score: what they say
"""

from pyggml.lab.attribution import Attribution, direct_attribution
from pyggml.lab.heads import Factored, copying_score, ov_circuit, promoted_tokens, qk_circuit

__all__ = [
    "Attribution",
    "Factored",
    "copying_score",
    "direct_attribution",
    "ov_circuit",
    "promoted_tokens",
    "qk_circuit",
]
