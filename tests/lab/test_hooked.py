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


def measured(twin, torch, ids, hooks=()):
    """The metric as TransformerLens computes it."""
    with torch.no_grad():
        logits = twin.run_with_hooks(torch.tensor(ids[None]), fwd_hooks=list(hooks))
    return (logits[0, -1, 7] - logits[0, -1, 5]).item()


def replacing(name, value, head=None, tokens=None):
    """A hook that puts value (1, T, …) in the place of an activation, of one head or at tokens."""
    where = (slice(None), slice(None) if tokens is None else tokens)
    where += () if head is None else (head,)

    def hook(x, hook):
        x = x.clone()
        x[where] = value[where]
        return x

    return name, hook


def test_activation_patching(twins, clean, corrupt, difference):
    """Its own sweeps: the residual stream by token, and heads' results, over all layers."""
    model, twin, torch = twins
    from transformer_lens import patching

    _, cache = cached(twin, torch, clean)
    tokens = torch.tensor(corrupt[None])
    with torch.no_grad():
        sweeps = [
            sweep(twin, tokens, cache, lambda z: z[0, -1, 7] - z[0, -1, 5]).numpy()
            for sweep in (
                patching.get_act_patch_resid_mid,
                patching.get_act_patch_mlp_out,
                patching.get_act_patch_attn_head_out_all_pos,
                patching.get_act_patch_attn_head_pattern_all_pos,
            )
        ]
    found = [
        lab.activation_patching(model, clean, corrupt, difference, what).values
        for what in ("mid", "ffn_out")
    ]
    found += [
        lab.activation_patching(model, clean, corrupt, difference, what, ("layer", "head")).values
        for what in ("attention", "attn_pattern")
    ]
    for mine, theirs in zip(found, sweeps, strict=True):
        np.testing.assert_allclose(mine, theirs, **CLOSE)
    assert np.ptp(found[2]) > 0.05


def test_head_ablation(twins, clean, corrupt, difference):
    model, twin, torch = twins
    caches = [cached(twin, torch, ids)[1] for ids in (clean, corrupt)]
    for kind, reference in (("zero", ()), ("mean", [corrupt]), ("resample", [corrupt])):
        found = lab.head_ablation(model, clean, difference, kind, reference).values
        for layer, h in np.ndindex(2, twin.cfg.n_heads):
            name = f"blocks.{layer}.attn.hook_z"
            z = caches[1][name]
            z = {"zero": 0 * z, "mean": z.mean(1, keepdim=True).expand_as(z), "resample": z}[kind]
            value = measured(twin, torch, clean, [replacing(name, z, h)])
            assert found[layer, h] == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("through_ffn", [True, False])
@pytest.mark.parametrize("receiver", ["blk.1.q", "blk.1.v", "blk.1.ffn_norm", "output_norm"])
def test_path_patching(twins, clean, corrupt, difference, receiver, through_ffn):
    """Two passes with hooks, as the code of the paper's authors has them."""
    model, twin, torch = twins
    here, there = (cached(twin, torch, ids)[1] for ids in (clean, corrupt))
    theirs, head = {
        "blk.1.q": ("blocks.1.attn.hook_q", 3),
        "blk.1.v": ("blocks.1.attn.hook_v", 1),
        "blk.1.ffn_norm": ("blocks.1.ln2.hook_normalized", None),
        "output_norm": ("ln_final.hook_normalized", None),
    }[receiver]
    found = lab.path_patching(
        model, clean, corrupt, difference, receiver, None if head is None else [head],
        through_ffn=through_ffn,
    ).values  # fmt: skip
    for layer, h in np.ndindex(found.shape):
        hold = [] if through_ffn else [f"blocks.{i}.hook_mlp_out" for i in range(2)]
        hooks = [replacing(name, here[name]) for name in hold]
        for i in range(2):
            z = here[f"blocks.{i}.attn.hook_z"].clone()
            z[:, :, h] = there[f"blocks.{i}.attn.hook_z"][:, :, h] if i == layer else z[:, :, h]
            hooks.append(replacing(f"blocks.{i}.attn.hook_z", z))
        heard = {}

        def keep(x, hook, heard=heard):
            heard["x"] = x.clone()

        measured(twin, torch, clean, [*hooks, (theirs, keep)])
        value = measured(twin, torch, clean, [replacing(theirs, heard["x"], head)])
        assert found[layer, h] == pytest.approx(value, abs=1e-4)


def test_edge_attribution(twins, clean, corrupt, difference):
    """Gradients at the inputs of queries, keys, values and MLPs, which TransformerLens keeps apart
    for each head (use_split_qkv_input)."""
    model, twin, torch = twins
    found = lab.edge_attribution(model, clean, corrupt, difference)
    here, there = (cached(twin, torch, ids)[1] for ids in (clean, corrupt))
    grads = {}
    ends = ("hook_q_input", "hook_k_input", "hook_v_input", "hook_mlp_in", "1.hook_resid_post")
    twin.reset_hooks()
    for name in [n for n in twin.hook_dict if n.endswith(ends)]:
        twin.add_hook(name, lambda g, hook: grads.__setitem__(hook.name, g.clone()), dir="bwd")
    logits = twin(torch.tensor(clean[None]))
    (logits[0, -1, 7] - logits[0, -1, 5]).backward()
    twin.reset_hooks()

    def added(sender):
        names = {"token_embd": "hook_embed"}
        names |= {f"blk.{i}.ffn_out": f"blocks.{i}.hook_mlp_out" for i in range(2)}
        if sender in names:
            return (there[names[sender]] - here[names[sender]])[0]
        _, layer, _, head = sender.split(".")
        name = f"blocks.{layer}.attn.hook_result"
        return (there[name] - here[name])[0, :, int(head)]

    def gradient(receiver):
        if receiver == "logits":
            return grads["blocks.1.hook_resid_post"][0]
        layer, part = receiver.split(".")[1:]
        if part == "ffn":
            return grads[f"blocks.{layer}.hook_mlp_in"][0]
        return grads[f"blocks.{layer}.hook_{part[0]}_input"][0, :, int(part[2:-1])]

    for (s, r), score in np.ndenumerate(found.scores):
        if not np.isnan(score):
            theirs = (added(found.senders[s]) * gradient(found.receivers[r])).sum().item()
            assert score == pytest.approx(theirs, abs=1e-4), (found.senders[s], found.receivers[r])
    assert np.nanmax(np.abs(found.scores)) > 0.05
