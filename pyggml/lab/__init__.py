"""A laboratory of interpretability: which part of a model does what, on GGUF files.

direct_attribution      what each head and neuron adds to a logit
qk_circuit, ov_circuit  the matrices of a head; promoted_tokens, copying_score: what they say
activation_patching     a metric with activations of another text, by layer, token and head
head_ablation           a metric without each head
path_patching           a metric when one place alone hears a head as in another text
edge_attribution        all edges between parts with their scores; circuit_faithfulness
linear_probes           what can be read from activations by a linear function; fit_probe
top_examples            where in a text neurons or features are strongest
train_tuned_lens        what each block would predict; TunedLens, lens_table
train_coder             sparse autoencoders and transcoders: SparseCoder, CoderConfig, Relu, TopK,
                        JumpRelu; assess_coder, read_coder, write_coder
windows_of              a text of any length as windows; activations_of, activation_rows
without_heads           changes of a model as an adapter; without_neurons, steering, rome
compare_runs            what a change changed; compare_heads, compare_answers, weight_errors

Attribution, patching, ablation, paths, edges and faithfulness take lists of texts too.
"""

from pyggml.lab.ablation import head_ablation
from pyggml.lab.as_adapter import Steering, steering, without_heads, without_neurons
from pyggml.lab.attribution import Attribution, direct_attribution
from pyggml.lab.circuit import Circuit
from pyggml.lab.comparison import (
    AnswerDifference,
    HeadDifference,
    RunDifference,
    UpdateSize,
    WeightError,
    compare_answers,
    compare_heads,
    compare_runs,
    update_sizes,
    weight_errors,
)
from pyggml.lab.edges import circuit_faithfulness, edge_attribution
from pyggml.lab.effects import Effects
from pyggml.lab.examples import TopExamples, top_examples
from pyggml.lab.heads import Factored, copying_score, ov_circuit, promoted_tokens, qk_circuit
from pyggml.lab.lens_table import LensTable, lens_table
from pyggml.lab.passages import activation_rows, activations_of, windows_of
from pyggml.lab.patching import activation_patching
from pyggml.lab.paths import path_patching
from pyggml.lab.probes import Probe, ProbeTable, fit_probe, linear_probes
from pyggml.lab.rank_one import RankOneEdit, key_covariance, rome
from pyggml.lab.sae_files import read_coder, write_coder
from pyggml.lab.sparse import JumpRelu, Relu, SparseCoder, TopK
from pyggml.lab.sparse_report import CoderReport, assess_coder
from pyggml.lab.sparse_training import CoderConfig, CoderTraining, train_coder
from pyggml.lab.tuned_lens import LensTraining, TunedLens, train_tuned_lens

__all__ = [
    "AnswerDifference", "Attribution", "Circuit", "CoderConfig", "CoderReport", "CoderTraining",
    "Effects", "Factored", "HeadDifference", "JumpRelu", "LensTable", "LensTraining", "Probe",
    "ProbeTable", "RankOneEdit", "Relu", "RunDifference", "SparseCoder", "Steering", "TopExamples",
    "TopK", "TunedLens", "UpdateSize", "WeightError", "activation_patching", "activation_rows",
    "activations_of", "assess_coder", "circuit_faithfulness", "compare_answers", "compare_heads",
    "compare_runs", "copying_score", "direct_attribution", "edge_attribution", "fit_probe",
    "head_ablation", "key_covariance", "lens_table", "linear_probes", "ov_circuit", "path_patching",
    "promoted_tokens", "qk_circuit", "read_coder", "rome", "steering", "top_examples",
    "train_coder", "train_tuned_lens", "update_sizes", "weight_errors", "windows_of",
    "without_heads", "without_neurons", "write_coder",
]  # fmt: skip
