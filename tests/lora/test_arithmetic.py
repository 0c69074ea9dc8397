"""A resumed run computes as the run did that it continues, or says why it cannot."""

import hashlib
import json
import warnings

import numba
import numpy as np
import pytest

import pyggml
from pyggml import gguf
from pyggml.errors import CheckpointError
from pyggml.graph.dtypes import F32
from pyggml.kernels.gemm import CHOSEN
from pyggml.lora import TrainConfig, Trainer, attach
from pyggml.lora.trainer.arithmetic import stored_compute

NAME = "step-00000002.gguf"


@pytest.fixture
def run_of(tiny, corpus_of):
    """(compute, ...) -> a Trainer whose model is loaded so, and whose settings say "auto"."""

    def make(compute, **settings):
        adapter = attach(pyggml.load(tiny, compute=compute))
        return Trainer(
            adapter.model, adapter.parameters, corpus_of(16), TrainConfig(max_steps=4, **settings)
        )

    return make


def rewritten(path, **changes):
    """The checkpoint with other metadata; None leaves a key out. Its sum is that of older ones, of
    the numbers alone."""
    with gguf.open(path) as file:
        metadata = {key: field.value for key, field in file.metadata.items()} | changes
        tensors = [(n, F32, t.shape, np.array(file.data(n))) for n, t in file.tensors.items()]
    digest = hashlib.sha256()
    for name, _, _, array in tensors:
        digest.update(name.encode() + array.tobytes())
    metadata |= {"checkpoint.sha256": None, "checkpoint.digest": digest.hexdigest()}
    kept = {key: value for key, value in metadata.items() if value is not None}
    kept["checkpoint.run"] = json.dumps(json.loads(kept["checkpoint.run"]))
    gguf.write(path, kept, tensors)
    return path


@pytest.fixture
def checkpoint(run_of, tmp_path):
    trainer = run_of("int8", checkpoint_dir=str(tmp_path), checkpoint_every=2)
    trainer.run(lambda event: trainer.stop() if trainer.progress.step == 2 else None)
    return tmp_path / NAME


def test_a_checkpoint_says_what_computed_it(checkpoint):
    assert stored_compute(checkpoint) == "int8"
    with gguf.open(checkpoint) as file:
        assert file.require("checkpoint.vectors", str) == CHOSEN.name
        assert f"Numba {numba.__version__}" in file.require("checkpoint.compiler", str)


def test_a_run_that_computes_otherwise_does_not_continue_it(run_of, checkpoint):
    other = run_of("f32")
    before = other.parameters.data.copy()
    with pytest.raises(CheckpointError, match="computed as int8, this one computes as f32"):
        other.resume(checkpoint)
    assert np.array_equal(other.parameters.data, before) and other.progress.step == 0


def test_another_vector_unit_is_warned_about(run_of, checkpoint):
    there = "generic" if CHOSEN.name != "generic" else "numpy"
    rewritten(checkpoint, **{"checkpoint.vectors": there})
    with pytest.warns(RuntimeWarning, match=f"PYGGML_ISA={there} continues it exactly"):
        run_of("int8").resume(checkpoint)


def test_another_vector_unit_and_compiler_cannot_be_had_exactly(run_of, checkpoint):
    there = "generic" if CHOSEN.name != "generic" else "numpy"
    changes = {"checkpoint.vectors": there, "checkpoint.compiler": "Python 3.9, Numba 0.1"}
    rewritten(checkpoint, **changes)
    with pytest.warns(RuntimeWarning) as said:
        run_of("int8").resume(checkpoint)
    assert not any("exactly" in str(w.message) for w in said)


def test_one_that_is_not_here_cannot_be_asked_for(run_of, checkpoint):
    there = "neon" if CHOSEN.name != "neon" else "amx"
    rewritten(checkpoint, **{"checkpoint.vectors": there})
    with pytest.warns(RuntimeWarning, match="not bit for bit$"):
        run_of("int8").resume(checkpoint)


def test_another_compiler_is_warned_about(run_of, checkpoint):
    rewritten(checkpoint, **{"checkpoint.compiler": "Python 3.9, Numba 0.1"})
    wanted = "compiled by 'Python 3.9, Numba 0.1', here by 'Python 3.* not bit for bit$"
    with pytest.warns(RuntimeWarning, match=wanted):
        run_of("int8").resume(checkpoint)


@pytest.mark.parametrize("changes", [{}, {"checkpoint.compiler": None}])
def test_the_same_compiler_or_an_unknown_one_is_not(run_of, checkpoint, changes):
    rewritten(checkpoint, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_of("int8").resume(checkpoint)


def test_a_checkpoint_from_before_they_were_kept_resumes(run_of, checkpoint):
    rewritten(checkpoint, **{"checkpoint.compute": None, "checkpoint.vectors": None})
    assert stored_compute(checkpoint) is None
    trainer = run_of("f32")
    trainer.resume(checkpoint)
    assert trainer.progress.step == 2


@pytest.mark.parametrize("key", ["checkpoint.compute", "checkpoint.vectors"])
def test_what_a_file_claims_is_checked(run_of, checkpoint, key):
    rewritten(checkpoint, **{key: "fast\x1b[2J"})
    with pytest.raises(CheckpointError, match=rf"{key} is 'fast\\x1b\[2J', wanted one of"):
        run_of("int8").resume(checkpoint)
