"""Adapters on top of each other: what one stood on is in its file, and is missed where it is not
there. Adapters of other models, and with vectors of norms."""

import warnings
from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml import gguf, lens
from pyggml.cli.commands.eval.subjects import subjects
from pyggml.cli.terminal.options import AdapterStack
from pyggml.errors import AdapterError
from pyggml.graph.dtypes import F32
from pyggml.lora import LoraConfig, attach, loss_and_grads
from pyggml.models.adapter import file_digest
from pyggml.models.stack import digest

GOLDEN = Path(__file__).parents[1] / "golden/models"
MODEL, ADAPTER = GOLDEN / "qwen3-F16.gguf", GOLDEN / "qwen3-lora.gguf"
IDS = np.arange(5, 25)


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    """b.gguf, trained on top of a.gguf at half its strength."""
    folder = tmp_path_factory.mktemp("stack")
    for seed, (name, below) in enumerate((("a", None), ("b", (folder / "a.gguf", 0.5)))):
        model = pyggml.load(MODEL, below, "f32")
        made = attach(model, LoraConfig(rank=2, alpha=3.0), on_top=True)
        made.parameters.data[:] = np.random.default_rng(seed).normal(
            0, 0.1, made.parameters.data.size
        )
        made.save(folder / f"{name}.gguf")
    return folder / "a.gguf", folder / "b.gguf"


def notes(*adapters):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pyggml.load(MODEL, [*adapters], "f32")
    return [str(w.message) for w in caught]


@pytest.mark.quick
def test_an_adapter_says_what_it_stood_on(stack):
    a, b = stack
    with gguf.open(b) as file:
        assert list(file.get("pyggml.lora.below.names")) == ["a.gguf"]
        assert list(file.get("pyggml.lora.below.digests")) == [file_digest(a)]
        assert file.get("pyggml.lora.below.weights").tolist() == [0.5]
    with gguf.open(a) as file:
        assert file.get("pyggml.lora.below.names") is None
        name = pyggml.load(MODEL).file.get("general.name", "qwen3")
        assert file.get("general.base_model.0.name") == name
    assert file_digest(b) == digest(pyggml.load(MODEL, [(a, 0.5), b]).adapters[1]) != file_digest(a)


@pytest.mark.quick
def test_what_is_missing_below_is_said(stack, tmp_path):
    a, b = stack
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(a.read_bytes())
    assert notes((a, 0.5), b) == notes((renamed, 0.5), b) == notes(a) == []
    for given in ([b], [a, b], [(ADAPTER, 0.5), b]):
        (note,) = notes(*given)
        assert note.startswith("b.gguf was trained on top of a.gguf:0.5, which is not here")


@pytest.mark.quick
@pytest.mark.parametrize(
    "keys",
    [
        {"names": ["a.gguf"]},
        {"names": ["a"], "digests": ["d", "e"], "weights": np.ones(1)},
        {"names": ["a"], "digests": ["d"], "weights": np.ones(1, np.float32)},
        {"names": np.arange(1), "digests": ["d"], "weights": np.ones(1)},
    ],
)
def test_damaged_keys_are_refused(stack, tmp_path, keys):
    path = tmp_path / "a.gguf"
    with gguf.open(stack[0]) as file:
        tensors = [(n, i.dtype, i.shape, file.data(n)) for n, i in file.tensors.items()]
        more = {f"pyggml.lora.below.{name}": value for name, value in keys.items()}
        gguf.write(path, {**file.metadata, **more}, tensors)
    with pytest.raises(AdapterError, match=r"a.gguf: pyggml.lora.below (is no|has) list"):
        pyggml.load(MODEL, path)


@pytest.mark.parametrize("weight", [1e39, -(10**40), np.inf, np.nan, "0.5"])
def test_a_weight_that_float32_does_not_hold_is_refused(weight):
    with pytest.raises(AdapterError, match="lora.gguf: its weight is .*, wanted a number of float"):
        pyggml.load(MODEL, (ADAPTER, weight))


@pytest.mark.quick
def test_eval_compares_stacks(stack):
    a, b = stack
    for given, others, wanted in [
        ([(a, 0.5)], [((b, 1.0),)], ((a, 0.5), (b, 1.0))),
        ([(a, 1.0)], [((b, 1.0),)], ((b, 1.0),)),  # not what it stood on
        ([(a, 0.5)], [((a, 1.0),)], ((a, 1.0),)),
        ([], [((a, 0.5), (b, 1.0))], ((a, 0.5), (b, 1.0))),
        ([(a, 0.5)], [((a, 0.5), (b, 1.0))], ((a, 0.5), (b, 1.0))),
    ]:
        _, other = subjects(MODEL, given, others)
        assert other.adapters in (wanted, ((b, 1.0), (a, 0.5)))
    read = AdapterStack().convert(f"{a}:0.5+{b}", None, None)
    assert read == ((a, 0.5), (b, 1.0))
    plus = a.with_name("a+b.gguf")
    plus.write_bytes(a.read_bytes())
    assert AdapterStack().convert(str(plus), None, None) == ((plus, 1.0),)
    plus.unlink()


def test_activations_of_two_adapters_have_gradients():
    one = pyggml.load(MODEL, ADAPTER, "f32")
    two = pyggml.load(MODEL, [(ADAPTER, 0.25), (ADAPTER, 0.75)], "f32")
    wanted, found = (lens.gradient_x_activation(m, IDS, "blk.*.out") for m in (one, two))
    for name, rows in wanted.items():
        np.testing.assert_allclose(found[name], rows, rtol=1e-3, atol=1e-6)
    with two.trace("blk.0.out") as t:
        loss, grads = loss_and_grads(two, IDS)
    assert grads == {} and t.grad("blk.0.out").any() and loss > 0
    with pytest.raises(AdapterError, match="has two updates, so its gradients have no clear name"):
        loss_and_grads(two, IDS)


# -- other models -------------------------------------------------------------------------------


@pytest.mark.quick
def test_an_adapter_of_another_model_is_named_before_any_shape(stack, tmp_path):
    other, path = GOLDEN / "llama-Q8_0.gguf", tmp_path / "other.gguf"
    with pytest.raises(AdapterError) as error:
        pyggml.load(other, stack[0])
    said = str(error.value).removeprefix(f"{stack[0]}: ")
    name = pyggml.load(MODEL).file.get("general.name", "qwen3")
    assert said == (
        f"was made for another model, {name!r}: general.architecture is 'qwen3', wanted 'llama'"
    )
    with gguf.open(stack[0]) as file:  # as large a model of the same kind, with other shapes
        keys = {**file.metadata, "general.base_model.0.name": "Qwen3 of others"}
        tensors = [(n, F32, (*i.shape[:-1], 8), np.ones((*i.shape[:-1], 8), np.float32))
                   for n, i in file.tensors.items()]  # fmt: skip
        gguf.write(path, keys, tensors)
    with pytest.raises(AdapterError, match=r"made for another model, 'Qwen3 of others': blk\.0"):
        pyggml.load(MODEL, path)


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:.*norms are passed over")
def test_norms_in_an_adapter_are_passed_over_with_a_note(stack, tmp_path):
    path = tmp_path / "norms.gguf"
    with gguf.open(stack[0]) as file:
        tensors = [(n, i.dtype, i.shape, file.data(n)) for n, i in file.tensors.items()]
        norms = [f"blk.{i}.attn_norm.weight" for i in range(2)]
        tensors += [(n, F32, (256,), np.full(256, 9, np.float32)) for n in norms]
        gguf.write(path, file.metadata, tensors)
    (note,) = notes(path)
    assert note == (
        f"{path}: holds blk.0.attn_norm.weight and 1 more: norms are passed over, as in llama.cpp"
    )
    ours, theirs = (pyggml.load(MODEL, p, "f32").logits(IDS) for p in (stack[0], path))
    np.testing.assert_array_equal(ours, theirs)
