"""The lab against TransformerLens, whose HookedTransformer has the same weights (float32)."""

import numpy as np
import pytest
from hooked_twin import hooked

from pyggml import lab
from pyggml.lab.linear import exact

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]
CLOSE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module", params=["llama-Q8_0", "qwen3-F16"])
def twins(request, opened):
    """A model without adapter, TransformerLens' of the same weights, and torch."""
    model = opened(request.param)
    twin = hooked(model)
    return model, twin, pytest.importorskip("torch")


def cached(twin, torch, ids):
    with torch.no_grad():
        logits, cache = twin.run_with_cache(torch.tensor(ids[None]))
    return logits[0].numpy(), cache


def test_logits(twins, clean):
    model, twin, torch = twins
    np.testing.assert_allclose(exact(model).logits(clean), cached(twin, torch, clean)[0], **CLOSE)


def test_direct_attribution(twins, clean):
    model, twin, torch = twins
    found = lab.direct_attribution(model, clean, 7, 5)
    _, cache = cached(twin, torch, clean)
    direction = twin.ln_final.w * (twin.W_U[:, 7] - twin.W_U[:, 5])
    for stack, mine in (
        (cache.stack_head_results(pos_slice=-1), found.heads.ravel()),
        (cache.stack_neuron_results(-1, pos_slice=-1), np.concatenate([*found.neurons.values()])),
    ):
        scaled = cache.apply_ln_to_stack(stack, pos_slice=-1)[:, 0]
        np.testing.assert_allclose(mine, (scaled @ direction).detach().numpy(), **CLOSE)


def test_circuits_of_heads(twins):
    model, twin, torch = twins
    group = twin.cfg.n_heads // twin.cfg.n_key_value_heads
    for layer, h in np.ndindex(2, twin.cfg.n_heads):
        attn, w = twin.blocks[layer].attn, twin.blocks[layer].ln1.w[:, None]
        ov = (w * attn._W_V[h // group]) @ attn.W_O[h]
        mine = lab.ov_circuit(model, layer, h)
        np.testing.assert_allclose(mine.full(), ov.detach().numpy(), **CLOSE)
        qk, wk = w * attn.W_Q[h], w * attn._W_K[h // group]
        if twin.cfg.use_qk_norm:
            qk, wk = qk * attn.q_norm.w, wk * attn.k_norm.w
        qk = (qk @ wk.T / attn.attn_scale).detach().numpy()
        np.testing.assert_allclose(lab.qk_circuit(model, layer, h).full(), qk, **CLOSE)
        values = torch.linalg.eigvals(twin.W_E @ ov @ (twin.ln_final.w[:, None] * twin.W_U))
        score = (values.sum().real / values.abs().sum()).item()
        assert lab.copying_score(model, layer, h) == pytest.approx(score, abs=1e-3)
