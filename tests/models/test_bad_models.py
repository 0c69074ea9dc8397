"""A file that is no model we can run says so in one sentence, with everything that is wrong."""

from contextlib import nullcontext

import numpy as np
import pytest

import pyggml
from pyggml import gguf
from pyggml.errors import ConfigError, DataError, GGUFError, ModelError
from pyggml.generation import Session
from pyggml.graph.dtypes import F16, F32, F64, dtype
from pyggml.models import ARCHITECTURES, ENCODERS, compose, small_metadata, tensors_of
from pyggml.quants import quantize


def refusal(path, error=ModelError):
    with pytest.raises(error) as caught:
        pyggml.load(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    assert len(text) < 4000
    return text


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_the_tiny_model_is_a_model(architecture, tiny):
    model = pyggml.load(tiny(architecture))
    assert model.config.n_vocab == 11
    assert model.config.n_embd == 16
    logits = model.logits([1, 2, 3])
    assert logits.shape == (3, 11)
    assert np.isfinite(logits).all()


# -- what is no model ---------------------------------------------------------------------------


@pytest.mark.parametrize("found", ["gptzilla", None, 7, "x" * 5000, np.arange(9), ["llama"]])
def test_an_unknown_architecture(found, tiny):
    text = refusal(tiny(keys={"general.architecture": found}))
    assert "known are llama, " in text
    assert len(text) < 200 + len(", ".join((*ARCHITECTURES, *ENCODERS)))


def test_a_single_split_is_a_whole_model(tiny):
    pyggml.load(tiny(keys={"split.count": np.uint16(1)}))


def test_an_adapter_is_no_model(tmp_path):
    path = tmp_path / "lora.gguf"
    square = np.ones((2, 2), np.float32)
    pair = [(f"blk.0.attn_q.weight.lora_{x}", F32, square.shape, square) for x in "ab"]
    gguf.write(path, {"general.architecture": "llama", "general.type": "adapter"}, pair)
    assert "general.type is 'adapter', wanted a model" in refusal(path)


def test_what_is_no_file_at_all(tmp_path):
    refusal(tmp_path / "missing.gguf", GGUFError)


def test_an_unknown_way_to_compute(tiny):
    with pytest.raises(ConfigError, match="compute is 'f8', known are auto, int8, bf16, f32"):
        pyggml.load(tiny(), compute="f8")


def test_a_kind_that_is_no_word_is_no_adapter(tiny):
    pyggml.load(tiny(sizes={"embedding_length": 32}, keys={"general.type": np.arange(3)}))


# -- hyperparameters ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count", 0),
        ("attention.head_count", -4),
        ("attention.head_count", 1 << 31),
        ("attention.head_count", 4.0),
        ("attention.head_count", True),
        ("attention.head_count", "four"),
        ("attention.head_count", np.full(3, 4, np.int32)),
        ("attention.head_count", None),
        ("attention.head_count_kv", 0),
        ("embedding_length", 0),
        ("embedding_length", 1 << 40),
        ("embedding_length", None),
        ("block_count", 0),
        ("block_count", 1 << 31),
        ("block_count", None),
        ("context_length", 0),
        ("context_length", None),
        ("feed_forward_length", 1 << 62),
        ("attention.key_length", 1 << 20),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("attention.layer_norm_rms_epsilon", -1.0),
        ("attention.layer_norm_rms_epsilon", None),
        ("rope.freq_base", 0.0),
        ("rope.freq_base", float("inf")),
        ("rope.freq_base", True),
        ("rope.dimension_count", 0),
        ("rope.scaling.factor", -2.0),
        ("rope.scaling.type", "spiral"),
        ("rope.scaling.type", 3),
        ("rope.scaling.original_context_length", 0),
    ],
)
def test_hyperparameters_out_of_range(key, value, tiny):
    text = refusal(tiny(keys={f"llama.{key}": value}))
    assert f"llama.{key} is " in text
    assert "wanted" in text or "known are" in text
    assert text.count(f"llama.{key} is ") == 1, "said once"


@pytest.mark.parametrize(
    ("architecture", "key", "value", "wanted"),
    [
        ("mamba2", "attention.causal", False, "is False, wanted True: recurrent parts"),
        ("gemma3", "attention.causal", False, "is False, wanted True: windows and chunks"),
        ("gemma3", "attention.key_length_swa", 8, "is 8, wanted 4"),
        ("gemma3", "attention.value_length_swa", 8, "is 8, wanted 4"),
        ("gemma3", "rope.dimension_count_swa", 2, "is 2, wanted 4"),
        ("rwkv7", "token_shift_count", 1, "is 1, wanted 2"),
    ],
)
def test_keys_that_would_change_the_graph(architecture, key, value, wanted, tiny):
    """llama.cpp reads these of every file; to leave one out would change the logits unseen."""
    text = refusal(tiny(architecture, keys={f"{architecture}.{key}": value}))
    assert f"{architecture}.{key} {wanted}" in text


def test_groups_that_do_not_divide_the_experts(tiny):
    text = refusal(tiny("bailingmoe2", keys={"bailingmoe2.expert_group_count": 3}))
    assert "8 experts cannot lie in 3 groups evenly" in text


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen3next", "qwen35moe"])
def test_a_length_of_shared_experts_that_is_none(architecture, tiny):
    """0 is the layer's, as in llama.cpp; what is no number is refused."""
    key = f"{architecture}.expert_shared_feed_forward_length"
    n_ff = ARCHITECTURES[architecture].example["expert_shared_feed_forward_length"]
    alike = {f"{architecture}.feed_forward_length": n_ff}
    pyggml.load(tiny(architecture, keys={key: 0} | alike))
    assert f"{key} is 'x', wanted 0 to" in refusal(tiny(architecture, keys={key: "x"}))


HOSTILE = [0, 1, 3, -1, 1 << 40, 0.0, 0.3, 1e30, float("nan"), True, "x", None]
HOSTILE += [np.zeros(2, np.int32), np.array([1 << 62, 2]), np.array([True, False]), ["a", "b"]]


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_every_key_that_is_asked_may_hold_anything(architecture):
    """A decoder comes of it or one sentence, nothing else."""
    metadata, asked = small_metadata(ARCHITECTURES[architecture]), set()
    shapes = {name: spec.shape for name, spec in tensors_of(metadata, 11).items()}

    def composed(changes):
        def get(key):
            asked.add(key)
            return {**metadata, **changes}.get(key)

        return compose(get, shapes, "metadata").tensors()

    composed({})
    for key in sorted(asked):
        for value in HOSTILE:
            try:
                assert composed({key: value})
            except ModelError as error:
                assert "\n" not in str(error)
                assert len(str(error)) < 200 + len(", ".join(ARCHITECTURES))


@pytest.mark.parametrize("value", [3, 6, 66])
def test_rotary_dimensions_that_do_not_fit_a_head(value, tiny):
    text = refusal(tiny(keys={"llama.rope.dimension_count": value}))
    assert f"rope.dimension_count is {value}, wanted even and at most 4" in text


@pytest.mark.parametrize(
    "name, n_dims, sections", [("qwen3vl", 128, [24, 20, 20, 0]), ("qwen35", 64, [11, 11, 10, 0])]
)
def test_sections_of_published_models_are_read(name, n_dims, sections):
    """Qwen3-VL's leave two pairs to time; one pair more is one without a section."""
    sizes = {"rope.dimension_count": n_dims, "attention.key_length": n_dims}
    sizes |= {"attention.value_length": n_dims}
    for turned, is_read in ((sections, True), ([sections[0] - 1, *sections[1:]], False)):
        more = {"rope.dimension_sections": np.array(turned, np.int32)}
        metadata = small_metadata(ARCHITECTURES[name], sizes | more)
        with nullcontext() if is_read else pytest.raises(ModelError, match="dimension_sections"):
            tensors_of(metadata, 11)


def test_a_glm_that_sees_images(tiny):
    """llama.cpp orders the rows of its q and k otherwise."""
    sections = {"glm4.rope.dimension_sections": np.array([1, 1, 0, 0], np.int32)}
    text = refusal(tiny("glm4", keys=sections))
    assert "glm4.rope.dimension_sections begin with 1 and 1, wanted a model of text alone" in text


def test_heads_that_cannot_share_keys(tiny):
    text = refusal(tiny(keys={"llama.attention.head_count_kv": 3}))
    assert "4 heads cannot share 3 key heads evenly" in text


def test_values_as_long_as_keys(tiny):
    text = refusal(tiny(keys={"llama.attention.value_length": 8}))
    assert "value_length 8 and key_length 4 differ" in text


def test_more_blocks_than_tensors(tiny):
    text = refusal(tiny(keys={"llama.block_count": 1000}))
    assert "block_count is 1000, but there are only 21 tensors" in text


def test_all_hyperparameters_at_once(tiny):
    bad = {"embedding_length": 0, "attention.head_count": None, "rope.freq_base": -1.0}
    text = refusal(tiny(keys={f"llama.{k}": v for k, v in bad.items()}))
    for key in bad:
        assert f"llama.{key} is " in text


# -- tensors ------------------------------------------------------------------------------------


def test_missing_tensors_are_all_named(tiny):
    lost = ["blk.0.attn_q.weight", "blk.1.ffn_norm.weight", "output_norm.weight"]
    text = refusal(tiny(tensors=dict.fromkeys(lost)))
    for name in lost:
        assert f"{name} is missing" in text


def test_norms_of_heads_belong_to_qwen3(tiny):
    text = refusal(tiny("qwen3", tensors={"blk.1.attn_k_norm.weight": None}))
    assert "blk.1.attn_k_norm.weight is missing" in text


def test_a_wrong_shape_is_shown_with_the_right_one(tiny):
    wrong = {"blk.0.ffn_up.weight": (16, 24), "blk.1.attn_k.weight": (8, 17), "output.bias": (12,)}
    text = refusal(tiny(tensors=wrong))
    assert "blk.0.ffn_up.weight has shape (16, 24), wanted (24, 16)" in text
    assert "blk.1.attn_k.weight has shape (8, 17), wanted (8, 16)" in text
    assert "output.bias has shape (12,), wanted (11,)" in text


def test_an_embedding_of_another_width(tiny):
    assert "token_embd.weight" in refusal(tiny(tensors={"token_embd.weight": (11, 8)}))


@pytest.mark.parametrize("shape", [None, (11,), (2, 11, 16)])
def test_an_embedding_that_is_no_matrix(shape, tiny):
    assert "no matrix token_embd.weight" in refusal(tiny(tensors={"token_embd.weight": shape}))


def test_tensors_without_a_use(tiny):
    """A scale or norm that was left out would change the logits without a word."""
    text = refusal(tiny(tensors={"blk.0.attn_q.scale": (3,), "blk.1.post_ffw_norm.weight": (16,)}))
    for name in ("blk.0.attn_q.scale", "blk.1.post_ffw_norm.weight"):
        assert f"{name} is not used by this architecture" in text


def test_a_hundred_faults_are_cut_short(tiny):
    text = refusal(tiny(keys={"llama.block_count": 20}, tensors={"blk.0.attn_q.weight": (1, 1)}))
    assert "; and " in text
    assert " more" in text


@pytest.mark.parametrize("kind", [F64, dtype("I8")])
def test_a_type_that_cannot_be_unpacked(kind, tiny, tmp_path):
    name = "blk.0.ffn_down.weight"
    path = rewritten(tiny(sizes={"feed_forward_length": 256}), tmp_path, {name: (kind, np.zeros)})
    assert f"{name} has type {kind}, known are F32" in refusal(path)


def test_a_vector_of_blocks(tiny, tmp_path):
    changes = {"output_norm.weight": (dtype("Q8_0"), np.zeros)}
    text = refusal(rewritten(tiny(sizes={"embedding_length": 32}), tmp_path, changes))
    assert "the vector output_norm.weight has type Q8_0, wanted a float type" in text


def rewritten(path, folder, changes):
    """The file with some tensors of another type: name -> (type, shape -> array)."""
    with gguf.open(path) as file:
        tensors = []
        for name, info in file.tensors.items():
            kind, array = info.dtype, file.data(name)
            if name in changes:
                kind, make = changes[name]
                stored = (*info.shape[:-1], kind.row_bytes(info.shape[-1]) // kind.numpy.itemsize)
                array = make(stored, kind.numpy)
            tensors.append((name, kind, info.shape, array))
        gguf.write(folder / "changed.gguf", file.metadata, tensors)
    return folder / "changed.gguf"


# -- what may be absent -------------------------------------------------------------------------


def test_a_tied_output_is_the_embedding(tiny, tmp_path):
    apart = tiny()
    with gguf.open(apart) as file:
        embedding = np.array(file.data("token_embd.weight"))
    copied = rewritten(apart, tmp_path, {"output.weight": (F32, lambda *_: embedding)})
    with_a_copy, with_its_own = pyggml.load(copied), pyggml.load(apart)
    assert with_a_copy.parts.output_name == with_its_own.parts.output_name == "output"
    wanted, other = with_a_copy.logits([1, 2, 3]), with_its_own.logits([1, 2, 3])
    tied = pyggml.load(tiny(tensors={"output.weight": None}))
    assert tied.parts.output_name == "token_embd"
    np.testing.assert_array_equal(tied.logits([1, 2, 3]), wanted)
    assert np.abs(other - wanted).max() > 0.1


@pytest.mark.parametrize("tied", [True, False])
def test_a_bias_of_the_output_is_added(tied, tiny):
    """Also where the output matrix is the embedding."""
    output = {"output.weight": None} if tied else {}
    plain = pyggml.load(tiny(tensors=output)).logits([1, 2, 3])
    path = tiny(tensors=output | {"output.bias": (11,)})
    with gguf.open(path) as file:
        bias = np.array(file.data("output.bias"))
    found = pyggml.load(path).logits([1, 2, 3])
    np.testing.assert_allclose(found - plain, np.tile(bias, (3, 1)), atol=1e-4)


def test_vectors_of_halves_are_read(tiny, tmp_path):
    halves = {"output_norm.weight": (F16, np.ones), "blk.0.attn_norm.weight": (F16, np.ones)}
    model = pyggml.load(rewritten(tiny(), tmp_path, halves))
    assert model.parts.weights["output_norm.weight"].dtype is F32
    np.testing.assert_array_equal(model.parts.weights["output_norm.weight"].data, 1)


def test_matrices_stay_mapped_and_packed(tiny, tmp_path):
    def packed(shape, numpy):
        return quantize(np.ones((24, 32), np.float32), "Q8_0")

    name = "blk.1.ffn_up.weight"
    path = rewritten(
        tiny(sizes={"embedding_length": 32}), tmp_path, {name: (dtype("Q8_0"), packed)}
    )
    model = pyggml.load(path)
    w = model.parts.weights[name]
    assert w.dtype is dtype("Q8_0")
    assert w.shape == (24, 32)
    assert w.data.dtype == np.uint8
    assert not w.data.flags.owndata
    assert not w.data.flags.writeable
    assert np.isfinite(model.logits([1, 2])).all()


# -- learned positions --------------------------------------------------------------------------


def test_a_context_beyond_the_learned_positions(tiny):
    model = pyggml.load(
        tiny("gpt2", keys={"gpt2.context_length": 8}, tensors={"position_embd.weight": (8, 16)})
    )
    model.logits(range(8))
    Session(model, 8).feed([1, 2])
    with pytest.raises(DataError, match="9 tokens, wanted at most the 8 of the model's context"):
        model.logits(range(9))
    with pytest.raises(ConfigError, match="a context of 9 tokens, wanted at most 8"):
        Session(model, 9).feed([1])
