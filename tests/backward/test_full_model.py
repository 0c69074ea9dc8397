"""Every weight of a small model with everything on it is trained: its gradient is the slope of the
loss in float64 (norms, embedding, biases and output matrix included)."""

import numpy as np
import pytest

from pyggml.backward import build_backward
from pyggml.graph.tensor import leaf
from pyggml.look.check import check_gradient, evaluate, in_float64
from pyggml.models import (
    ARCHITECTURES,
    Inputs,
    LoraPair,
    Parts,
    build_loss,
    compose,
    small_metadata,
)
from pyggml.runtime import results

SIZES = {
    "embedding_length": 16,
    "feed_forward_length": 24,
    "attention.key_length": 6,
    "attention.value_length": 6,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 4,
    "rope.freq_base": 100.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 2.0,
    "rope.scaling.attn_factor": 1.1,
    "rope.scaling.original_context_length": 32,
}
N_VOCAB = 13
METADATA = small_metadata(ARCHITECTURES["qwen3"], SIZES)
DECODER = compose(METADATA.get, {"token_embd.weight": (N_VOCAB, 16)}, "test")
FACTORS = "norm.weight", ".scale", "_scale.weight"
N_TOKENS = 19  # more than any tile has rows; the second sequence starts at 12


def weight_arrays(rng, tied, biases, decoder=DECODER):
    """Arrays for every tensor that the decoder knows, by name."""
    tensors = decoder.tensors()
    left_out = {"rope_freqs.weight"} | ({"output.weight"} if tied else set())
    left_out |= set() if biases else {n for n in tensors if n.endswith(".bias")}
    return {
        name: rng.uniform(0.5, 1.5, s.shape) if name.endswith(FACTORS)
        else rng.standard_normal(s.shape) * (0.3 if len(s.shape) == 1 else s.shape[-1] ** -0.5)
        for name, s in tensors.items()
        if name not in left_out
    }  # fmt: skip


def batch(rng):
    """Two sequences in one row of tokens; the rotation factors are an input, not a parameter."""
    inputs = Inputs.empty(N_TOKENS)
    first = np.where(np.arange(N_TOKENS) < 12, 0, 12)
    inputs.tokens.data[:] = rng.integers(0, N_VOCAB, N_TOKENS)
    inputs.positions.data[:] = np.arange(N_TOKENS) - first
    inputs.span.data[:] = np.stack([first, np.arange(N_TOKENS) + 1], axis=1)
    targets = leaf(rng.integers(0, N_VOCAB, N_TOKENS).astype(np.int32), "targets")
    share = rng.uniform(0.5, 1, N_TOKENS) * (np.arange(N_TOKENS) % 4 != 1)
    return inputs, targets, leaf((share / N_TOKENS).astype(np.float32), "share")


def with_freqs(weights):
    factors = np.array([1.0, 3.0], np.float32)
    return Parts(DECODER, weights | {"rope_freqs.weight": leaf(factors)})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_every_weight_can_be_trained(tied, biases, rng):
    arrays = weight_arrays(rng, tied, biases)
    inputs, targets, share = batch(rng)

    def build(*leaves):
        weights = {n: t.named(n) for n, t in zip(arrays, leaves, strict=True)}
        return build_loss(with_freqs(weights), inputs, targets, share, trained=weights)["loss"]

    slopes = check_gradient(build, list(arrays.values()), rng)
    assert len(slopes) == len(arrays)
    errors = {name: s.error for name, s in zip(arrays, slopes, strict=True)}
    assert max(errors.values()) < 1e-5, errors
    assert all(s.scale > 1e-4 for s in slopes), "every weight matters"


def test_the_fused_loss_gives_the_gradients_of_its_twin(rng):
    arrays = weight_arrays(rng, tied=True, biases=False)
    weights = {n: leaf(a.astype(np.float32), n) for n, a in arrays.items()}
    inputs, targets, share = batch(rng)
    trained = [t for n, t in weights.items() if n != "token_embd.weight"]
    found = []
    for fused in (True, False):
        graph = build_loss(
            with_freqs(weights), inputs, targets, share, trained=() if fused else weights
        )
        assert (graph["loss"].op.name == "linear_cross_entropy") is fused
        found.append(results(build_backward(graph, trained)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a != "qwen3"])
def test_every_weight_of_an_architecture_can_be_trained(architecture, rng):
    """Small models of the other architectures, with every tensor that they may have."""
    sizes = {"embedding_length": 16, "feed_forward_length": 24, "attention.sliding_window": 5}
    metadata = small_metadata(ARCHITECTURES[architecture], sizes)
    decoder = compose(metadata.get, {"token_embd.weight": (N_VOCAB, 16)}, "test")
    arrays = weight_arrays(rng, False, True, decoder)
    inputs, targets, share = batch(rng)

    weights = {n: leaf(a.astype(np.float32), n) for n, a in arrays.items()}
    graph = build_loss(Parts(decoder, weights), inputs, targets, share, trained=weights)
    used = [t for t in graph.leaves if t.name in weights]
    idle = weights.keys() - {t.name for t in used}
    assert all(decoder.tensors()[name].optional for name in idle), "what must be there is used"
    used = [t for t in used if "exp_probs_b" not in t.name]  # which only chooses
    along, wanted = {}, 0.0  # every gradient has the same share in the slope, however small it is
    for t, g in zip(used, results(build_backward(graph, used))[1:], strict=True):
        size = np.linalg.norm(g)
        last = f"blk.{decoder.config.n_layer - 1}.layer_output_scale.weight"
        if t.name == last and architecture != "talkie":  # whose scale is of an addend
            assert size < 1e-4, "the last norm undoes it"
            continue
        if size < 1e-6:  # softmax does not see what all keys have in common, unless they turn
            assert t.name.endswith("attn_k.bias"), f"{t.name} matters"
            continue
        along[t] = rng.standard_normal(t.shape) / size
        wanted += float(np.sum(g * along[t]))
    ends = []
    for h in (1e-6, -1e-6):
        values = {t: in_float64(t) + h * v for t, v in along.items()}
        ends.append(float(evaluate(graph["loss"], values)))
    slope = (ends[0] - ends[1]) / 2e-6
    # Gemma 4's errors have the sign in common: over ten seeds 0.03 to 6 times the others' limit.
    limit = 6e-5 if architecture == "gemma4" else 1e-5
    assert abs(wanted - slope) < limit * len(used) ** 0.5


@pytest.mark.parametrize("name", ["blk.1.attn_q.weight", "blk.0.ffn_down.weight", "output.weight"])
def test_an_update_of_low_rank_is_trained(name, rng):
    """y += scale · B(A x); on the output matrix the loss is built from logits."""
    arrays = weight_arrays(rng, tied=False, biases=True)
    weights = {n: leaf(a.astype(np.float32), n) for n, a in arrays.items()}
    inputs, targets, share = batch(rng)
    n_out, n_in = weights[name].shape

    def build(a, b):
        pairs = {name: LoraPair(a, b, 1.5)}
        return build_loss(with_freqs(weights), inputs, targets, share, [pairs])["loss"]

    low_rank = [rng.standard_normal(s) * 0.3 for s in ((3, n_in), (n_out, 3))]
    assert max(s.error for s in check_gradient(build, low_rank, rng)) < 1e-5
