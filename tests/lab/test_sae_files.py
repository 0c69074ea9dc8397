"""SAELens' files: read and written, by its own library too, and refused where they are hostile."""

import json

import numpy as np
import pytest
from extras import need
from safetensors.numpy import load_file, save_file

from pyggml.errors import ModelError, PyggmlError
from pyggml.lab import JumpRelu, Relu, SparseCoder, TopK, read_coder, write_coder
from pyggml.lab.sae_files import CONFIG, WEIGHTS, activation_of, hook_of

RNG = np.random.default_rng(0)
KINDS = [Relu(), TopK(3), JumpRelu(np.linspace(0, 2, 24, dtype=np.float32))]


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def coder_of(activate, transcodes=False, centred=True):
    n_out, writes = (5, "blk.2.ffn_out") if transcodes else (8, "blk.2.ffn_norm")
    return SparseCoder(
        "blk.2.ffn_norm", writes, activate, normal(8, 24), normal(24), normal(24, n_out),
        normal(n_out), centred and not transcodes,
    )  # fmt: skip


def expect_same(found, coder):
    assert (found.reads, found.writes, found.centred) == (coder.reads, coder.writes, coder.centred)
    for name in ("w_enc", "b_enc", "w_dec", "b_dec"):
        np.testing.assert_array_equal(getattr(found, name), getattr(coder, name))
    x = normal(6, 8)
    np.testing.assert_array_equal(found.encode(x), coder.encode(x))


@pytest.mark.quick
@pytest.mark.parametrize("activate", KINDS, ids=lambda a: a.name)
@pytest.mark.parametrize("transcodes", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_a_folder_keeps_every_bit(tmp_path, activate, transcodes, centred):
    coder = coder_of(activate, transcodes, centred)
    write_coder(coder, tmp_path / "sae")
    expect_same(read_coder(tmp_path / "sae"), coder)
    with pytest.raises(PyggmlError, match="is there already"):
        write_coder(coder, tmp_path / "sae")


def test_names_are_those_of_transformer_lens():
    for ours, theirs in [
        ("blk.3.out", "blocks.3.hook_resid_post"),
        ("blk.11.ffn_out", "blocks.11.hook_mlp_out"),
        ("token_embd", "hook_embed"),
        ("blk.0.attention", "blocks.0.attn.hook_z"),
        ("blk.0.attn_q", "blk.0.attn_q"),
    ]:
        assert hook_of(ours) == theirs and activation_of(theirs) == ours
    assert activation_of("blocks.3.hook_resid_pre") == "blk.2.out"
    assert activation_of("blocks.0.hook_resid_pre") == "token_embd"
    assert activation_of(None) == activation_of(3) == ""


def test_directions_of_any_length_are_made_of_length_one(tmp_path):
    """Where the k largest were chosen after a factor of the direction's length."""
    coder = coder_of(TopK(3))
    write_coder(coder, tmp_path / "sae")
    change_settings(tmp_path / "sae", rescale_acts_by_decoder_norm=True)
    found, x = read_coder(tmp_path / "sae"), normal(6, 8)
    lengths = np.linalg.norm(coder.w_dec, axis=1)
    z = ((x - coder.b_dec) @ coder.w_enc + coder.b_enc) * lengths
    f = np.where(z >= np.sort(z)[:, -3:-2], np.maximum(z, 0), 0)
    np.testing.assert_allclose(found.encode(x), f, rtol=1e-4, atol=1e-5)
    y = (f / lengths) @ coder.w_dec + coder.b_dec
    np.testing.assert_allclose(found.decode(f), y, rtol=1e-4, atol=1e-5)


def test_files_of_earlier_versions_have_their_names_outside_metadata(tmp_path):
    write_coder(coder_of(Relu()), tmp_path / "sae")
    path = tmp_path / "sae" / CONFIG
    settings = json.loads(path.read_text("utf-8"))
    settings |= {"hook_point": settings.pop("metadata")["hook_name"], "activation_fn_str": "relu"}
    path.write_text(json.dumps(settings), "utf-8")
    assert read_coder(tmp_path / "sae").reads == "blk.2.ffn_norm"


def change_settings(folder, **settings):
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **settings}), "utf-8")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"architecture": "gated"}, "architecture is 'gated', known are standard, topk"),
        ({"architecture": ["topk"]}, r"architecture is \['topk'\]"),
        (
            {"architecture": "standard", "activation_fn_str": "tanh-relu"},
            "activation_fn is 'tanh-relu', wanted 'relu'",
        ),
        ({"d_in": 0}, "d_in is 0, wanted 1 to"),
        ({"d_in": 1 << 40}, "d_in is 1099511627776"),
        ({"d_sae": True}, "d_sae is True"),
        ({"d_sae": "24"}, "d_sae is '24'"),
        ({"k": 25}, "k is 25, wanted at most the 24"),
        ({"k": None}, "k is None"),
        ({"normalize_activations": "layer_norm"}, "'layer_norm': fold it into the weights"),
        ({"apply_b_dec_to_input": 1}, "apply_b_dec_to_input is 1, wanted true or false"),
        ({"metadata": []}, "metadata is no object"),
        ({"d_in": 1 << 22, "d_sae": 1 << 22}, "numbers, wanted at most"),
        ({"d_sae": 25}, r"W_enc is F32 \(8, 24\), wanted one of F32, F16, BF16, \(8, 25\)"),
        ({"architecture": "jumprelu"}, "threshold is not there"),
        ({"architecture": "topk_transcoder", "d_out": 8}, "bias is of its output"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, settings, said):
    write_coder(coder_of(TopK(3)), tmp_path / "sae")
    change_settings(tmp_path / "sae", **settings)
    with pytest.raises(ModelError, match=said):
        read_coder(tmp_path / "sae")


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"W_enc": normal(24, 8)}, r"W_enc is F32 \(24, 8\)"),
        ({"b_enc": np.zeros(24)}, r"b_enc is F64 \(24,\)"),
        ({"b_dec": np.full(8, np.inf, np.float32)}, "b_dec is not finite"),
        ({"W_skip": normal(8, 8)}, "tensor 'W_skip' is not known"),
        ({"b_enc": None}, "b_enc is not there"),
        ({"more": normal(1 << 16)}, "has more than"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, tensors, said):
    write_coder(coder_of(Relu()), tmp_path / "sae")
    path = tmp_path / "sae" / WEIGHTS
    kept = {n: a for n, a in (load_file(path) | tensors).items() if a is not None}
    save_file(kept, path)
    with pytest.raises(ModelError, match=said):
        read_coder(tmp_path / "sae")


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"cfg.json: cannot be read: No such file"):
        read_coder(tmp_path)
    write_coder(coder_of(Relu()), tmp_path / "sae")
    weights, config = tmp_path / "sae" / WEIGHTS, tmp_path / "sae" / CONFIG
    raw = weights.read_bytes()
    for bad in (raw[:-1], b"", b"\xff" * 9, (1 << 60).to_bytes(8, "little") + raw[8:]):
        weights.write_bytes(bad)
        with pytest.raises(ModelError, match="is no safetensors file"):
            read_coder(tmp_path / "sae")
    for bad, said in [
        (b"[1]", "holds no object"),
        (b"{", "is no JSON"),
        (b"\xff", "is no JSON"),
        (b'{"k": 1, "k": 2}', "'k' stands twice"),
        (b"[" * 99_999, "nested too deeply"),
        (b" " * (2 << 20), "more than 1,048,576 bytes"),
    ]:
        config.write_bytes(bad)
        with pytest.raises(ModelError, match=said):
            read_coder(tmp_path / "sae")


@pytest.mark.interop
@pytest.mark.parametrize("activate", KINDS, ids=lambda a: a.name)
@pytest.mark.parametrize("transcodes", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_sae_lens_reads_what_is_written_here_and_the_other_way_round(
    tmp_path, activate, transcodes, centred
):
    sae_lens, torch = need("sae_lens"), need("torch")
    coder, x = coder_of(activate, transcodes, centred), normal(6, 8)
    write_coder(coder, tmp_path / "ours")
    if transcodes and activate.name == "topk":
        with pytest.raises(KeyError, match="topk_transcoder"):
            sae_lens.SAE.load_from_disk(tmp_path / "ours")
        return
    theirs = sae_lens.SAE.load_from_disk(tmp_path / "ours")
    assert theirs.cfg.metadata.hook_name == "blocks.2.mlp.hook_in"
    with torch.no_grad():
        features = theirs.encode(torch.tensor(x))
        np.testing.assert_allclose(coder.encode(x), features, rtol=1e-4, atol=1e-5)
        y = theirs.decode(features).numpy()
    np.testing.assert_allclose(coder.decode(features.numpy()), y, rtol=1e-4, atol=1e-5)
    theirs.save_model(tmp_path / "theirs")
    expect_same(read_coder(tmp_path / "theirs"), coder)
