"""Adapters of small models of transformers' classes, in PEFT itself and here: the same logits.

Each class of tests/support/hf_sizes.py that has a layout: an adapter of every module that PEFT can
have, written by `to_peft`, loaded by PEFT and saved by it again; and one that PEFT made.
"""

import warnings

import numpy as np
import pytest
from hf_models import as_deviations, convert, torch_model
from hf_sizes import MODELS, N_TOKENS, N_VOCAB, PICTURES

import pyggml
from pyggml import gguf
from pyggml.lora import LoraConfig, attach
from pyggml.lora.peft import from_peft, to_peft
from pyggml.lora.peft.twins import Twins

from measures import nmse
from peers.trial import wide_modules

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore:llama.cpp passes over"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    # PEFT says so of the patterns of parameters, whose ranks it took from them.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys"),
]
RANK = 4
TOKENS = np.random.default_rng(7).integers(0, N_VOCAB, N_TOKENS).astype(np.int32)
# Falcon H1's modules are no tensors of its file. For files of Ling 2 and Sarvam the authors' are
# written, and those of transformers' Sarvam are read as well. What stands for DeepSeek V1, Ling and
# Qwen 1 has other modules than the authors' classes.
WITHOUT_LAYOUT = (
    *("FalconH1ForCausalLM", "SarvamMoEForCausalLM", "DeepseekForCausalLM"),
    *("BailingMoeForCausalLM", "QWenLMHeadModel"),
)
CLASSES = [name for name in MODELS if name not in WITHOUT_LAYOUT]
# Modules of the file whose updates PEFT does not apply as they are; to_peft warns of them.
WARNED = {
    "JambaForCausalLM": ("ssm_dt", "dt_proj"),
    **dict.fromkeys(("NemotronHForCausalLM", "NemotronHDenseForCausalLM"), ("ssm_out", "out_proj")),
}
# PEFT cannot wrap the routers that it takes for linear modules: they give two tensors.
NO_ALL_LINEAR = ("Llama4ForCausalLM", "PhimoeForCausalLM")
MOST = {"Gemma3nForCausalLM": 1e-7}  # as without an adapter


@pytest.fixture
def of_class(tmp_path, monkeypatch):
    """of_class(name) -> transformers' model, and pyggml's of llama.cpp's conversion."""
    for module in ("torch", "transformers", "peft", "conversion"):
        pytest.importorskip(module)

    def make(name):
        as_deviations(monkeypatch, name)
        theirs = torch_model(name)
        return theirs, pyggml.load(convert(theirs, name, tmp_path / "weights"), compute="f32")

    return make


def logits_of(theirs):
    import torch

    with torch.no_grad():
        ids = torch.from_numpy(TOKENS)[None].long()
        return theirs(input_ids=ids, use_cache=False).logits[0].numpy()


def logits_with(model, adapter):
    return pyggml.load(model.file.path, adapter, compute="f32").logits(TOKENS)


def ours(model, path, without=()):
    """A file of an adapter of every module of the class but these; all numbers are drawn."""
    placed = {p.tensor for module in Twins(model).modules.values() for p in module.parts}
    modules = [
        m
        for m in wide_modules(model, RANK, applied=False)
        if m not in without
        and {n for n in model.parts.weights if n.endswith(f".{m}.weight")} <= placed
    ]
    made = attach(model, LoraConfig(rank=RANK, alpha=2.0 * RANK, modules=tuple(modules)))
    rng = np.random.default_rng(3)
    for name, pair in made.pairs.items():
        for half in (pair.a, pair.b):
            half.data[:] = 0.1 * rng.standard_normal(half.shape)
        if name.endswith("attn_k_b.weight"):  # one matrix of all heads in the class
            pair.b.data[:] = pair.b.data[0]
        if name.endswith("attn_v_b.weight"):
            pair.a.data[:] = pair.a.data[0]
    made.save(path)
    return path


@pytest.mark.parametrize("name", CLASSES)
def test_peft_applies_what_we_write_and_we_what_it_saves(name, of_class, tmp_path):
    from peft import PeftModel

    theirs, model = of_class(name)
    plain = logits_of(theirs)
    without = WARNED.get(name, ())
    adapter = ours(model, tmp_path / "adapter.gguf", without)
    to_peft(model, adapter, tmp_path / "peft")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*(missing|unexpected).*keys")
        loaded = PeftModel.from_pretrained(theirs, tmp_path / "peft")
    wanted = logits_of(loaded)
    assert nmse(wanted, plain) > 0.01, "it changes much"
    most = MOST.get(name, 1e-11)
    assert nmse(logits_with(model, adapter), wanted) < most
    loaded.save_pretrained(tmp_path / "again")
    from_peft(model, tmp_path / "again", tmp_path / "again.gguf")
    assert nmse(logits_with(model, tmp_path / "again.gguf"), wanted) < most


@pytest.mark.parametrize(
    "name", [n for n in (*CLASSES, "SarvamMoEForCausalLM") if n not in NO_ALL_LINEAR]
)
def test_an_adapter_that_peft_made(name, of_class, tmp_path):
    """Of all linear modules, as PEFT finds them: their names are those of the built class."""
    import torch
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    theirs, model = of_class(name)
    excluded = (
        WARNED[name][1] if name in WARNED else "vision|visual|projector"
    )  # another half of the class
    how = {"exclude_modules": f".*({excluded}).*"} if name in (*WARNED, *PICTURES) else {}
    if name == "SarvamMoEForCausalLM":
        how["target_parameters"] = [f"mlp.experts.{x}_proj" for x in ("gate_up", "down")]
        how["alpha_pattern"] = {"k_proj": 3}
    config = PeftConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", **how)
    torch.manual_seed(5)
    made = get_peft_model(theirs, config)
    with torch.no_grad():
        for key, values in made.named_parameters():
            if "lora_B" in key:
                values.normal_(std=0.05)
    wanted = logits_of(made)
    made.save_pretrained(tmp_path / "made")
    from_peft(model, tmp_path / "made", tmp_path / "made.gguf")
    with gguf.open(tmp_path / "made.gguf") as file:
        assert len(file.tensors) > 8
    assert nmse(logits_with(model, tmp_path / "made.gguf"), wanted) < MOST.get(name, 1e-11)


@pytest.mark.parametrize("name", WARNED)
def test_what_peft_does_not_apply_is_said(name, of_class, tmp_path):
    _, model = of_class(name)
    adapter = ours(model, tmp_path / "adapter.gguf")
    with pytest.warns(RuntimeWarning, match=f"{WARNED[name][1]}.*: (the class|PEFT refuses)"):
        to_peft(model, adapter, tmp_path / "peft")


def test_an_update_that_the_class_passes_over_counts_once_it_is_merged(of_class, tmp_path):
    from peft import PeftModel

    theirs, model = of_class("JambaForCausalLM")
    adapter = ours(model, tmp_path / "adapter.gguf")
    with pytest.warns(RuntimeWarning, match="dt_proj"):
        to_peft(model, adapter, tmp_path / "peft")
    loaded, wanted = (
        PeftModel.from_pretrained(theirs, tmp_path / "peft"),
        logits_with(model, adapter),
    )
    assert nmse(wanted, logits_of(loaded)) > 1e-3
    assert nmse(wanted, logits_of(loaded.merge_and_unload())) < 1e-11
