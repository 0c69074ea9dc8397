"""A loss that is not finite: the step, the window, the tensor, and what stays on the disk."""

from types import SimpleNamespace

import numpy as np
import pytest

import pyggml
from pyggml import gguf
from pyggml.errors import DataError, PyggmlError
from pyggml.graph.dtypes import BF16
from pyggml.graph.tensor import leaf
from pyggml.lora.trainer.passes import Passes
from pyggml.ops import swiglu_back
from pyggml.runtime import run


@pytest.fixture
def spoilt(tiny, tmp_path):
    """spoilt(token) -> the tiny model, whose embedding of one token is no number."""

    def make(token):
        with gguf.open(tiny) as file:
            metadata = {key: field.value for key, field in file.metadata.items()}
            arrays = {name: (t, np.array(file.data(name))) for name, t in file.tensors.items()}
        arrays["token_embd.weight"][1][token] = np.nan
        path = tmp_path / "spoilt.gguf"
        gguf.write(path, metadata, [(n, t.dtype, t.shape, a) for n, (t, a) in arrays.items()])
        return path

    return make


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
