"""Architectures with recurrent parts: every weight is trained, sequences in one row stay apart."""

import numpy as np
import pytest

import pyggml
from pyggml.errors import ModelError
from pyggml.generation import Session
from pyggml.graph.tensor import leaf
from pyggml.look.check import check_gradient
from pyggml.models import (
    ARCHITECTURES,
    Inputs,
    Parts,
    build,
    build_loss,
    compose,
    small_metadata,
)
from pyggml.runtime import run

SSM = {"ssm.inner_size": 12, "ssm.state_size": 3, "ssm.conv_kernel": 4}
SIZES = {
    "lfm2": {},
    "mamba": SSM | {"ssm.time_step_rank": 2, "ssm.dt_b_c_rms": True},
    "qwen35": {
        "attention.key_length": 8,
        "attention.value_length": 8,
        "ssm.inner_size": 24,
        "ssm.state_size": 4,
        "ssm.time_step_rank": 6,
    },
    "rwkv7": {},
    "mamba2": SSM | {"ssm.time_step_rank": 6, "ssm.group_count": 2},
}
N_VOCAB, N_EMBD = 13, 16
STARTS = [0, 9, 10]  # three sequences in a row of 17 tokens, one of them a single token
N_TOKENS = 17


def decoder(architecture):
    sizes = {"embedding_length": N_EMBD, "feed_forward_length": 24} | SIZES[architecture]
    metadata = small_metadata(ARCHITECTURES[architecture], sizes)
    return compose(metadata.get, {"token_embd.weight": (N_VOCAB, N_EMBD)}, "test")


def weight_arrays(rng, tensors):
    """An array for every tensor that must be there, by name."""
    arrays = {}
    for name, spec in tensors.items():
        if spec.optional:
            continue
        array = rng.standard_normal(spec.shape) * (0.3 if len(spec.shape) == 1 else 0.25)
        if name.endswith("norm.weight"):
            array = rng.uniform(0.5, 1.5, spec.shape)
        elif name.endswith("ssm_a"):
            array = -rng.uniform(0.2, 1.5, spec.shape)
        arrays[name] = array
    return arrays


def one_row(rng):
    """Inputs of three sequences, one after the other in a row of tokens."""
    inputs = Inputs.empty(N_TOKENS)
    first = np.array([max(s for s in STARTS if s <= t) for t in range(N_TOKENS)])
    inputs.tokens.data[:] = rng.integers(0, N_VOCAB, N_TOKENS)
    inputs.positions.data[:] = np.arange(N_TOKENS) - first
    inputs.span.data[:] = np.stack([first, np.arange(N_TOKENS) + 1], axis=1)
    return inputs


@pytest.mark.parametrize("architecture", list(SIZES))
def test_every_weight_is_trained(architecture, rng):
    whole = decoder(architecture)
    arrays, inputs = weight_arrays(rng, whole.tensors()), one_row(rng)
    targets = leaf(rng.integers(0, N_VOCAB, N_TOKENS).astype(np.int32), "targets")
    share = leaf(rng.uniform(0, 2 / N_TOKENS, N_TOKENS).astype(np.float32), "share")

    def loss(*leaves):
        weights = {n: t.named(n) for n, t in zip(arrays, leaves, strict=True)}
        return build_loss(Parts(whole, weights), inputs, targets, share, trained=weights)["loss"]

    slopes = check_gradient(loss, list(arrays.values()), rng)
    errors = {name: s.error for name, s in zip(arrays, slopes, strict=True)}
    assert max(errors.values()) < 2e-5, errors
    idle = [name for name, s in zip(arrays, slopes, strict=True) if s.scale < 1e-5]
    assert not idle, "every weight matters"


@pytest.mark.parametrize("architecture", list(SIZES))
def test_sequences_in_one_row_do_not_see_each_other(architecture, rng):
    whole = decoder(architecture)
    arrays, together = weight_arrays(rng, whole.tensors()), one_row(rng)
    weights = {n: leaf(a.astype(np.float32), n) for n, a in arrays.items()}
    (found,) = run(build(Parts(whole, weights), together))
    for first, end in zip(STARTS, [*STARTS[1:], N_TOKENS], strict=True):
        alone = Inputs.empty(end - first)
        alone.tokens.data[:] = together.tokens.data[first:end]
        alone.positions.data[:] = np.arange(end - first)
        alone.span.data[:, 1] = np.arange(end - first) + 1
        (wanted,) = run(build(Parts(whole, weights), alone))
        np.testing.assert_allclose(found[first:end], wanted, rtol=1e-5, atol=1e-5)


def test_a_session_that_starts_again_forgets(tiny):
    model = pyggml.load(tiny("mamba2"), compute="f32")
    session = Session(model, 8)
    first = session.feed([1, 2, 3])
    session.truncate(0)
    np.testing.assert_array_equal(session.feed([1, 2, 3]), first)


def test_blocks_that_predict_further_tokens_are_not_read(tiny):
    plain = pyggml.load(tiny("qwen35")).logits([1, 2, 3])
    keys = {
        "qwen35.block_count": 3,
        "qwen35.nextn_predict_layers": 1,
        "qwen35.attention.recurrent_layers": np.array([True, False, False]),
    }
    more = {"blk.2.attn_norm.weight": (16,), "blk.2.nextn.eh_proj.weight": (16, 32)}
    model = pyggml.load(tiny("qwen35", keys, more))
    assert model.config.n_layer == 2
    np.testing.assert_array_equal(model.logits([1, 2, 3]), plain)
    with pytest.raises(ModelError, match=r"blk.3.attn_norm.weight is not used"):
        pyggml.load(tiny("qwen35", keys, more | {"blk.3.attn_norm.weight": (16,)}))
