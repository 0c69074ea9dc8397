"""A laboratory of interpretability: which part of a model does what, on GGUF files.

direct_attribution      what each head and neuron adds to a logit
qk_circuit, ov_circuit  the matrices of a head; promoted_tokens, copying_score: what they say
linear_probes           what can be read from activations by a linear function; fit_probe
top_examples            where in a text neurons or features are strongest
windows_of              a text of any length as windows; activations_of, activation_rows
"""

from pyggml.lab.attribution import Attribution, direct_attribution
from pyggml.lab.examples import TopExamples, top_examples
from pyggml.lab.heads import Factored, copying_score, ov_circuit, promoted_tokens, qk_circuit
from pyggml.lab.passages import activation_rows, activations_of, windows_of
from pyggml.lab.probes import Probe, ProbeTable, fit_probe, linear_probes

__all__ = [
    "Attribution",
    "Factored",
    "Probe",
    "ProbeTable",
    "TopExamples",
    "activation_rows",
    "activations_of",
    "copying_score",
    "direct_attribution",
    "fit_probe",
    "linear_probes",
    "ov_circuit",
    "promoted_tokens",
    "qk_circuit",
    "top_examples",
    "windows_of",
]
