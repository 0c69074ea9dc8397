"""Control vectors: made of texts of two kinds, added by a trace, and llama.cpp's in a file."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from extras import need

import pyggml
from pyggml import gguf
from pyggml.errors import ConfigError, DataError, GGUFError
from pyggml.graph.dtypes import F16, F32
from pyggml.look.control import ControlVector, control_vector

MODEL = Path(__file__).parents[1] / "golden/models/llama-Q8_0.gguf"
RNG = np.random.default_rng(0)
WANTED = [RNG.integers(0, 90, n) for n in (5, 9, 7, 12)]
UNWANTED = [RNG.integers(0, 90, n) for n in (6, 4, 11, 3)]


@pytest.fixture(scope="module")
def model():
    return pyggml.load(MODEL, compute="f32")


def after(model, ids, block):
    with model.trace(f"blk.{block}.out") as t:
        model.logits(ids)
    return t[f"blk.{block}.out"].astype(np.float64)


def differences(model, block, positions):
    """Of the pairs of texts, each averaged over positions."""
    means = ([after(model, ids, block)[positions].mean(0) for ids in texts]
             for texts in (WANTED, UNWANTED))  # fmt: skip
    return np.subtract(*map(np.array, means))


@pytest.mark.parametrize("positions", [slice(1, None), slice(-1, None), slice(None)])
def test_the_mean_is_that_of_texts_at_their_positions(model, positions):
    found = control_vector(model, WANTED, UNWANTED, positions=positions)
    assert sorted(found.directions) == list(range(1, model.config.n_layer))
    assert found.architecture == "llama"
    for block, direction in found.directions.items():
        by_hand = differences(model, block, positions).mean(0)
        np.testing.assert_allclose(direction, by_hand, rtol=1e-5, atol=1e-6)


def test_the_first_position_is_left_out_by_default(model):
    """So that a text of the same words, long or short, weighs it in no other way."""
    found, chosen = (
        control_vector(model, WANTED, UNWANTED, positions=p) for p in (slice(1, None), slice(1))
    )
    default = control_vector(model, WANTED, UNWANTED)
    for block, direction in default.directions.items():
        np.testing.assert_array_equal(direction, found.directions[block])
        assert np.abs(direction - chosen.directions[block]).max() > 0.01


def test_the_principal_direction_is_the_first_eigenvector_as_long_as_pairs_differ(model):
    found = control_vector(model, WANTED, UNWANTED, by="pca")
    for block, direction in found.directions.items():
        d = differences(model, block, slice(1, None))
        axis = np.linalg.eigh(d.T @ d)[1][:, -1]
        length = np.linalg.norm(direction)
        assert abs(direction @ axis) == pytest.approx(length, rel=1e-5)
        assert length == pytest.approx(abs((d @ axis).mean()), rel=1e-4)
        assert (d @ direction).mean() > 0, "towards the wanted texts"


def test_it_is_added_after_its_blocks(model):
    vector = control_vector(model, WANTED, UNWANTED)
    last = model.config.n_layer - 1
    plain = after(model, WANTED[0], last)
    with model.trace(f"blk.{last}.out", add=vector.addends(model, -2.0, blocks=[last])) as t:
        model.logits(WANTED[0])
    wanted = plain - 2.0 * vector.directions[last]
    np.testing.assert_allclose(t[f"blk.{last}.out"], wanted, rtol=1e-4, atol=1e-4)
    assert sorted(vector.addends(model)) == [f"blk.{i}.out" for i in range(1, last + 1)]


def test_blocks_can_be_chosen(model):
    every = control_vector(model, WANTED, UNWANTED)
    last = model.config.n_layer - 1
    one = control_vector(model, WANTED, UNWANTED, blocks=[last])
    assert [*one.directions] == [*every.within(last, 99).directions] == [last]
    np.testing.assert_array_equal(one.directions[last], every.directions[last])
    for blocks, said in (([0, last], "blocks has 0, wanted 1 to"), ([], "blocks has none")):
        with pytest.raises(ConfigError, match=said):
            control_vector(model, WANTED, UNWANTED, blocks=blocks)
    with pytest.raises(ConfigError, match=f"for blocks 0 to 0, wanted some of 1 to {last}"):
        every.within(0, 0)


def test_a_model_with_a_vector_is_another_model(model):
    """Whose logits are those of a trace; with the adapters that it had, and traces of its own."""
    addends = control_vector(model, WANTED, UNWANTED).addends(model, 2.0)
    steered = model.with_added(addends)
    plain = model.logits(WANTED[0])
    with model.trace(add=addends):
        np.testing.assert_array_equal(steered.logits(WANTED[0]), model.logits(WANTED[0]))
    np.testing.assert_array_equal(model.logits(WANTED[0]), plain)
    with steered.trace(scale={"blk.*.out": 0.0}):
        assert np.abs(steered.logits(WANTED[0]) - plain).max() > 0.01
    with pytest.raises(ConfigError, match="no activation is named blk.99.out"):
        model.with_added({"blk.99.out": 1.0})


def test_a_file_keeps_every_bit(model, tmp_path):
    vector = control_vector(model, WANTED, UNWANTED)
    vector.save(tmp_path / "v.gguf")
    again = ControlVector.read(tmp_path / "v.gguf")
    assert again.architecture == "llama" and sorted(again.directions) == sorted(vector.directions)
    for block, direction in vector.directions.items():
        np.testing.assert_array_equal(again.directions[block], direction)
    with gguf.open(tmp_path / "v.gguf") as file:
        assert file.get("general.architecture") == "controlvector"
        assert file.get("controlvector.layer_count") == len(vector.directions)


def write(path, tensors, kind="controlvector"):
    gguf.write(path, {"general.architecture": kind}, tensors)


def direction(name, *values, dtype=F32):
    a = np.array(values, dtype.numpy)
    return name, dtype, a.shape, a


def test_directions_of_one_block_add_up(tmp_path):
    path = tmp_path / "v.gguf"
    write(path, [direction("direction.2", 1, 2), direction("direction.02", 3, 4)])
    found = ControlVector.read(path)
    assert found.architecture == "" and list(found.directions) == [2]
    np.testing.assert_array_equal(found.directions[2], [4, 6])


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([], "no directions"),
        ([direction("direction.0", 1.0)], "wanted direction.1"),
        ([direction("other", 1.0)], "'other', wanted direction.1"),
        ([direction("direction.1", 1.0, dtype=F16)], r"direction.1 is F16\[1\], wanted F32"),
        ([direction("direction.1", [1.0, 2.0])], r"F32\[1, 2\], wanted F32 and one axis"),
        ([direction("direction.1", np.nan)], "direction.1 is not finite"),
        ([direction("direction.1", 1.0), direction("direction.2", 1.0, 2.0)], "of 2 lengths"),
    ],
)
def test_what_is_no_control_vector_is_refused(tensors, said, tmp_path):
    write(tmp_path / "v.gguf", tensors)
    with pytest.raises(GGUFError, match=said):
        ControlVector.read(tmp_path / "v.gguf")


def test_other_files_and_other_models_are_refused(model, tmp_path):
    with pytest.raises(GGUFError, match="architecture is 'llama', wanted 'controlvector'"):
        ControlVector.read(MODEL)
    n = model.config.n_embd
    for directions, said in (
        ({1: np.ones(1, np.float32)}, f"have 1 numbers, wanted the model's {n}"),
        ({99: np.ones(n, np.float32)}, "block 99 of"),
    ):
        with pytest.raises(ConfigError, match=said):
            ControlVector(directions).addends(model)
    with pytest.raises(ConfigError, match="block 7 has no direction"):
        ControlVector({1: np.ones(n, np.float32)}).addends(model, blocks=[7])
    with pytest.raises(ConfigError, match="scale is nan"):
        ControlVector({1: np.ones(n, np.float32)}).addends(model, float("nan"))


def test_texts_that_do_not_do_are_refused(model):
    with pytest.raises(DataError, match="0 wanted texts and 4 others"):
        control_vector(model, [], UNWANTED)
    with pytest.raises(DataError, match="as many of each for pairs"):
        control_vector(model, WANTED[:2], UNWANTED, by="pca")
    with pytest.raises(DataError, match="text 2 has 1 tokens, none at the positions"):
        control_vector(model, [WANTED[0], [3]], UNWANTED)
    with pytest.raises(ConfigError, match="by is 'median'"):
        control_vector(model, WANTED, UNWANTED, by="median")


def laid_out(path, n_embd):
    """A file's directions as llama.cpp's `common_control_vector_load` lays them out, which the
    package of Python has not: direction.1 first, zeros where there is none."""
    from gguf import GGUFReader

    rows = {int(t.name.split(".")[1]): t.data for t in GGUFReader(path).tensors}
    data = np.zeros((max(rows), n_embd), np.float32)
    for i, row in rows.items():
        data[i - 1] += row
    return data.ravel()


@pytest.mark.interop
@pytest.mark.parametrize("name", ["llama-Q8_0", "qwen3-F16"])
@pytest.mark.parametrize("scale", [1.0, -1.5])
def test_llama_cpp_gives_the_same_logits(name, scale, tmp_path):
    """As close as without a vector, where its products round too."""
    llama_cpp = need("llama_cpp")
    path = MODEL.with_name(f"{name}.gguf")
    model, tokens = pyggml.load(path, compute="f32"), [int(t) for t in WANTED[3]]
    control_vector(model, WANTED, UNWANTED).save(tmp_path / "v.gguf")
    vector = ControlVector.read(tmp_path / "v.gguf")
    llama = llama_cpp.Llama(str(path), n_ctx=16, logits_all=True, verbose=False)

    def theirs():
        llama.reset()
        llama.eval(tokens)
        return np.array(llama.scores[: len(tokens)])

    plain = theirs()
    data = laid_out(tmp_path / "v.gguf", model.config.n_embd) * np.float32(scale)
    pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    n_embd, last = model.config.n_embd, model.config.n_layer - 1
    assert llama_cpp.llama_set_adapter_cvec(llama.ctx, pointer, data.size, n_embd, 1, last) == 0
    steered = theirs()
    with model.trace(add=vector.addends(model, scale)):
        ours = model.logits(tokens)
    rounding = np.std(plain - model.logits(tokens))
    assert np.std(steered - plain) > 20 * rounding
    assert np.std(steered - ours) < 1.2 * rounding
