"""A loss that is not finite: the step, the window, the tensor, and what stays on the disk."""

from types import SimpleNamespace

import numpy as np
import pytest

import pyggml
from pyggml import gguf
from pyggml.errors import ConfigError, DataError, PyggmlError
from pyggml.graph.dtypes import BF16, DTYPES, F32
from pyggml.graph.tensor import leaf
from pyggml.lora import Parameters, TrainConfig
from pyggml.lora.optim import FlatAdamW
from pyggml.lora.trainer.passes import Passes
from pyggml.ops import swiglu_back
from pyggml.quants import quantize
from pyggml.runtime import run


@pytest.fixture
def spoilt(tiny, tmp_path):
    """spoilt(token) -> the tiny model, whose embedding of one token is no number."""

    def make(token):
        def spoil(name, array):
            if name == "token_embd.weight":
                array[token] = np.nan
            return F32, array

        return rewritten(tiny, tmp_path / "spoilt.gguf", spoil)

    return make


def rewritten(source, target, change):
    """A model's file with tensors as `change` says: name, float32 -> type, array."""
    with gguf.open(source) as file:
        metadata = {key: field.value for key, field in file.metadata.items()}
        tensors = []
        for name, t in file.tensors.items():
            dtype, array = change(name, np.array(file.data(name)))
            tensors.append((name, dtype, t.shape, array))
        gguf.write(target, metadata, tensors)
    return target


def test_the_step_the_window_and_the_tensor_are_named(trainer_of, corpus_of, spoilt, tmp_path):
    corpus = corpus_of(10, n_held_out=0)
    train, order = corpus.train, corpus.train.order(0, 0)
    has_next = train.documents[:, :-1] == train.documents[:, 1:]
    seen = [set(train.tokens[w, :-1][has_next[w]].tolist()) for w in order]
    new = [tokens - set().union(*seen[:i]) for i, tokens in enumerate(seen)]
    at = next(i for i in range(4, len(order)) if new[i])  # the first in the second step or later
    settings = {"batch": 2, "grad_accum": 2, "checkpoint_dir": str(tmp_path / "c")}
    trainer = trainer_of(path=spoilt(min(new[at])), corpus=corpus, **settings, checkpoint_every=1)
    step = 1 + at // 4
    with pytest.raises(PyggmlError) as caught:
        trainer.run()
    said = str(caught.value)
    assert (
        said.startswith(f"step {step}: the loss is nan") and f", of window {order[at] + 1}" in said
    )
    assert "get_rows" in said and "lr may be too high" in said
    assert sorted(p.name for p in (tmp_path / "c").glob("*.gguf"))[-1:] == [
        f"step-{step - 1:08d}.gguf"
    ]


@pytest.mark.parametrize("compute", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("spoilt_tensor, op", [("ffn_norm", "rms_norm"), ("ffn_down", "mul_mat")])
def test_the_op_is_named_on_every_path(
    compute, spoilt_tensor, op, trainer_of, corpus_of, tiny, tmp_path
):
    """A norm's weight that is NaN, and the scale of a block of Q8_0."""

    def spoil(name, array):
        if name == f"blk.1.{spoilt_tensor}.weight":
            array.flat[0] = np.nan
        if array.ndim == 1 or array.shape[-1] % 32:
            return F32, array
        packed = quantize(np.nan_to_num(array), "Q8_0")
        if np.isnan(array).any():
            packed[0, :2] = 0xFF  # a half that is NaN
        return DTYPES["Q8_0"], packed.view(DTYPES["Q8_0"].numpy)

    path = rewritten(tiny, tmp_path / "spoilt.gguf", spoil)
    trainer = trainer_of(path=path, load={"compute": compute}, corpus=corpus_of(10, n_held_out=0))
    with pytest.raises(PyggmlError, match="^step 1: the loss is nan") as caught:
        trainer.run()
    said = str(caught.value)
    assert f"= {op}" in said, said


@pytest.mark.quick
def test_a_model_that_is_no_number_is_told_before_the_first_step(trainer_of, corpus_of, spoilt):
    corpus = corpus_of(10)
    token = int(corpus.validation.tokens[1, 0])
    at = next(i for i, w in enumerate(corpus.validation.tokens[:, :-1]) if token in w)
    with pytest.raises(PyggmlError) as caught:
        trainer_of(path=spoilt(token), corpus=corpus).run()
    said = str(caught.value)
    assert said.startswith("after step 0 the validation loss is nan; the first number that is not")
    assert f"get_rows>, of window {at + 1}" in said and "lr" not in said
    assert said.endswith("the model's weights or its adapter make no numbers")


# -- the optimiser at its extremes --------------------------------------------------------------


def steps_of(gradients, **settings):
    """A parameter after AdamW's steps with these gradients."""
    parameters = Parameters({"a": (1,)})
    optimiser = FlatAdamW(parameters, TrainConfig(weight_decay=0.0, **settings))
    with np.errstate(all="ignore"):
        for n, g in enumerate(gradients, 1):
            parameters.gradients["a"].data[:] = g
            optimiser.check_length(optimiser.clip())
            optimiser.step(1e-3, n)
    return float(parameters.data[0])


@pytest.mark.parametrize("size", [1e-45, 1e-30, 1e-10, 1.0, 1e10, 1e18])
def test_adamw_takes_gradients_of_every_size(size):
    """Steps as long as the rate, shorter where ε is larger than the gradient; then it goes on."""
    first = steps_of([size], clip=0.0)
    assert -1.01e-3 <= first <= 0 and (size < 1e-6 or first < -0.9e-3)
    assert np.isfinite(steps_of([size, -1.0, size], clip=0.0))
    assert -1.01e-3 <= steps_of([size * 1e20 if size > 1 else size], clip=1.0) <= 0


def test_a_gradient_whose_square_is_infinite_is_refused_unless_it_is_clipped():
    """The second moment would stay infinite, and the parameter where it is, in silence."""
    with pytest.raises(PyggmlError, match=r"length is 1e\+20, .*; clip is 0, wanted 0 < clip"):
        steps_of([1e20], clip=0.0)
    with pytest.raises(PyggmlError, match="clip is 2e.25, wanted 0 < clip"):
        steps_of([1e20], clip=2e25)
    assert steps_of([1e20], clip=0.5) < -0.9e-3


def test_a_gradient_of_nothing_is_no_step():
    assert steps_of([0.0, 0.0], eps=1e-37) == 0


@pytest.mark.parametrize(
    "setting, value", [("eps", 1e-46), ("beta2", 1 - 1e-9), ("beta1", 1 - 1e-9)]
)
def test_settings_that_float32_takes_for_their_limits_are_refused(setting, value):
    with pytest.raises(ConfigError, match=setting):
        TrainConfig(**{setting: value})


# -- elsewhere ----------------------------------------------------------------------------------


def test_logits_that_are_no_numbers_are_refused(spoilt):
    model = pyggml.load(spoilt(3))
    assert np.isfinite(model.logits([1, 2])).all()
    with pytest.raises(DataError, match="the greatest logit is nan, wanted a finite number"):
        model.logits([1, 3])


def test_a_second_result_is_looked_at_too():
    """dup of swiglu_back, which a later product reads, is no number; dgate is 0."""
    gate, up = (leaf(bits_of(values), dtype=BF16) for values in ([3e5], [0.0]))
    node = swiglu_back(gate, up, leaf(np.full(1, 3e38, np.float32)))
    results = dict(zip((node, *node.saved), run(node, *node.saved), strict=True))
    device = SimpleNamespace(read=results.__getitem__)
    program = SimpleNamespace(walk=lambda: [(node, device)])
    passes = SimpleNamespace(programs={0: program}, _last=0)
    assert np.isfinite(results[node]).all() and "swiglu_back" in Passes.first_not_finite(passes)


def bits_of(values):
    return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
