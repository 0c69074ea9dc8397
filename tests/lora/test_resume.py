"""Stopping and resuming: a resumed run is the same run, and no other run's checkpoint is taken."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pyggml import gguf
from pyggml.errors import CheckpointError
from pyggml.graph.dtypes import F32
from pyggml.lora import CheckpointReport, StepReport
from pyggml.lora.ranks import ALONE
from pyggml.lora.trainer import checkpoint
from pyggml.lora.trainer.folder import newest
from pyggml.lora.trainer.identity import older_identity

from runs import state, steps


def stop_at(trainer, step, how):
    def report(event):
        if isinstance(event, StepReport) and event.step == step:
            if how == "flag":
                trainer.stop()
            else:
                raise KeyboardInterrupt

    return report


@pytest.mark.parametrize("how", ["flag", "interrupt"])
@pytest.mark.parametrize("at", [3, 6])  # in the first epoch; in the second
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(trainer_of, tmp_path, how, at):
    settings = {"batch": 2, "grad_accum": 1, "epochs": 2, "seed": 5}
    whole, events = trainer_of(**settings), []
    whole.run(events.append)
    first = trainer_of(**settings, checkpoint_dir=str(tmp_path))
    assert not first.run(stop_at(first, at, how))
    assert first.progress.step == at and (first.progress.epoch == 1) == (at == 6)
    second = trainer_of(**settings, checkpoint_dir=str(tmp_path), threads=1)
    second.parameters.data[:] = 7  # whatever was there is replaced
    second.resume(tmp_path / f"step-{at:08d}.gguf")
    assert second.parameters.m.any() and second.parameters.v.any()
    rest = []
    assert second.run(rest.append)
    assert state(second) == state(whole)
    assert second.history == whole.history and len(whole.history.losses) == whole.progress.step
    assert [e.loss for e in steps(rest)] == [e.loss for e in steps(events)[at:]]


def test_a_run_over_weighted_windows_resumes_bit_for_bit(trainer_of, corpus_of, tmp_path):
    corpus = corpus_of(10)
    repeats = np.where(np.arange(len(corpus.train)) % 2, 2.0, 0.5)
    corpus = replace(corpus, train=replace(corpus.train, repeats=repeats))
    settings = {"batch": 2, "epochs": 3, "seed": 5, "corpus": corpus}
    whole = trainer_of(**settings)
    whole.run()
    for at in (2, whole.n_steps - 2):
        folder = tmp_path / str(at)
        first = trainer_of(**settings, checkpoint_dir=str(folder))
        first.run(stop_at(first, at, "flag"))
        second = trainer_of(**settings, checkpoint_dir=str(folder))
        second.resume(folder / f"step-{at:08d}.gguf")
        assert second.run() and state(second) == state(whole)
    plain = trainer_of(**settings | {"corpus": corpus_of(10)}, checkpoint_dir=str(folder))
    with pytest.raises(CheckpointError):
        plain.resume(folder / f"step-{at:08d}.gguf")


def test_ctrl_c_in_the_middle_of_a_step_goes_back_to_the_last_whole_one(trainer_of, tmp_path):
    trainer = trainer_of(checkpoint_dir=str(tmp_path), grad_accum=2, max_steps=3)
    trainer.run(stop_at(trainer, 1, "flag"))
    before, begin, calls = state(trainer), trainer.passes.begin, []

    def interrupted(batch, alone):
        calls.append(batch)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return begin(batch, alone)

    trainer.passes.begin = interrupted
    assert not trainer.run()
    assert state(trainer) == before
    trainer.passes.begin = begin
    trainer.run()
    whole = trainer_of(grad_accum=2, max_steps=3)
    whole.run()
    assert state(trainer) == state(whole)


def test_the_last_step_alone_has_a_checkpoint_if_asked(trainer_of, tmp_path):
    trainer_of(max_steps=3, checkpoint_dir=str(tmp_path), checkpoint_every=0).run()
    assert [path.name for path in tmp_path.glob("*.gguf")] == ["step-00000003.gguf"]


def test_the_two_newest_checkpoints_are_kept(trainer_of, tmp_path):
    trainer = trainer_of(max_steps=7, checkpoint_dir=str(tmp_path / "a" / "b"), checkpoint_every=2)
    events = []
    trainer.run(events.append)
    saved = [e.step for e in events if isinstance(e, CheckpointReport)]
    assert saved == [2, 4, 6, 7]
    names = sorted(p.name for p in (tmp_path / "a" / "b").iterdir())
    assert names == ["step-00000006.gguf", "step-00000007.gguf"]


def test_a_new_run_does_not_write_among_another_run_s_checkpoints(trainer_of, tmp_path):
    trainer_of(max_steps=1, checkpoint_dir=str(tmp_path)).run()
    with pytest.raises(CheckpointError, match="holds checkpoints of an earlier run"):
        trainer_of(max_steps=1, checkpoint_dir=str(tmp_path)).run()


OTHER_RUNS = [
    ({"lr": 0.02}, "settings.lr is 0.01 there and 0.02 here"),
    ({"seed": 9, "clip": 2.0}, "settings.clip is 1.0 .* settings.seed is 0 there and 9 here"),
    ({"ctx": 12}, "settings.ctx is 10 there and 12 here"),  # so the text differs, too
    ({"lora": {"rank": 2}}, "adapter.rank is 3 there and 2 here"),  # and each tensor's shape
    ({"lora": {"alpha": 6.0}}, "adapter.alpha is 5.0 there and 6.0 here"),
    (
        {"lora": {"modules": ("attn_q",)}},
        r"adapter.modules is not given there and \['attn_q'\] here",
    ),
    ({"path": "tiny_tied"}, "model is another model than that run's: it has other tensors, .*"),
    ({"corpus": 1}, "text is another text than that run's"),
]


@pytest.mark.parametrize("changes, message", OTHER_RUNS)
def test_a_checkpoint_of_another_run_is_refused(
    trainer_of, corpus_of, request, tmp_path, changes, message
):
    trainer_of(max_steps=2, checkpoint_dir=str(tmp_path)).run()
    if "path" in changes:
        changes = {"path": request.getfixturevalue(changes["path"])}
    if "corpus" in changes:
        changes = {"corpus": corpus_of(10, seed=1)}
    other = trainer_of(max_steps=2, **changes)
    before = state(other)
    with pytest.raises(CheckpointError, match=f"is of another run: {message}$"):
        other.resume(tmp_path / "step-00000002.gguf")
    assert state(other) == before


def test_a_run_may_be_longer_or_shorter_than_it_was(trainer_of, tmp_path):
    """A constant learning rate: the same bits as a run of that length from the start."""
    constant = {"lr_scheduler": "constant", "warmup_steps": 0}
    trainer_of(max_steps=2, checkpoint_dir=str(tmp_path), **constant).run()
    whole, longer = (trainer_of(max_steps=4, **constant) for _ in range(2))
    whole.run()
    with pytest.warns(RuntimeWarning, match="of a run of 2 steps, this one has 4: the"):
        longer.resume(tmp_path / "step-00000002.gguf")
    assert longer.progress.step == 2 and not longer.is_done
    longer.run()
    np.testing.assert_array_equal(longer.parameters.data, whole.parameters.data)
    with pytest.raises(
        CheckpointError,
        match="after step 2, and this run ends with step 1: more",
    ):
        trainer_of(max_steps=1, **constant).resume(tmp_path / "step-00000002.gguf")


def without(path, part, name, **changes):
    """Write a checkpoint as it was before a setting existed; changes: of its run."""
    with gguf.open(path) as file:
        metadata = {key: field.value for key, field in file.metadata.items()}
        tensors = [(n, F32, t.shape, file.data(n).copy()) for n, t in file.tensors.items()]
    run = json.loads(metadata["checkpoint.run"])
    run |= changes
    run[part].pop(name, None)
    metadata.pop("checkpoint.sha256", None)  # which came later, too
    digest = hashlib.sha256()
    for name, _, _, array in tensors:
        digest.update(name.encode() + array.tobytes())
    metadata["checkpoint.digest"] = digest.hexdigest()
    whole = {"step": np.uint64, "epoch": np.uint64, "index": np.uint64}
    metadata |= {f"checkpoint.{k}": kind(metadata[f"checkpoint.{k}"]) for k, kind in whole.items()}
    gguf.write(path, metadata | {"checkpoint.run": json.dumps(run)}, tensors)


def test_a_checkpoint_that_is_older_than_a_setting_is_one_of_its_default(trainer_of, tmp_path):
    """What it would be if `clip` had come later, and always been 1 before."""
    trainer_of(max_steps=2, checkpoint_dir=str(tmp_path)).run()
    path = tmp_path / "step-00000002.gguf"
    without(path, "settings", "clip")
    without(path, "adapter", "skip_layers")
    usual = trainer_of(max_steps=2)
    usual.resume(path)
    assert usual.progress.step == 2
    with pytest.raises(CheckpointError, match="settings.clip is 1.0 there and 0.5 here"):
        trainer_of(max_steps=2, clip=0.5).resume(path)
    with pytest.raises(CheckpointError, match="adapter.skip_layers is 0 there and 1 here"):
        trainer_of({"skip_layers": 1}, max_steps=2).resume(path)


@pytest.mark.parametrize("settings", [5, "clip", ["template"], None])
def test_settings_that_are_no_object_are_another_run_s(trainer_of, tmp_path, settings):
    trainer_of(max_steps=2, checkpoint_dir=str(tmp_path)).run()
    path = tmp_path / "step-00000002.gguf"
    without(path, "adapter", "skip_layers", settings=settings)
    with pytest.raises(CheckpointError, match="is of another run: settings is .* there and"):
        trainer_of(max_steps=2).resume(path)


def with_one_changed(path, to, name):
    """The same model but for the middle of one tensor: as large, with the same two ends."""
    with gguf.open(path) as file:
        tensors = [(n, t.dtype, t.shape, file.data(n).copy()) for n, t in file.tensors.items()]
        for n, _, _, array in tensors:
            if n == name:
                array.reshape(-1)[:] += 1
        gguf.write(to, file.metadata, tensors)
    return to


def test_a_model_with_other_weights_of_the_same_size_is_another(trainer_of, tiny, tmp_path):
    """As a merge of queries and values is, which leaves both ends of the file as they were."""
    trainer_of(max_steps=1, checkpoint_dir=str(tmp_path)).run()
    other = with_one_changed(tiny, tmp_path / "other.gguf", "blk.1.attn_q.weight")
    assert other.stat().st_size == tiny.stat().st_size
    with pytest.raises(CheckpointError, match="it has other weights under the same names$"):
        trainer_of(max_steps=1, path=other).resume(tmp_path / "step-00000001.gguf")


def test_a_checkpoint_of_an_older_version_knows_its_model_otherwise(trainer_of, tiny, tmp_path):
    trainer_of(max_steps=2, checkpoint_dir=str(tmp_path), checkpoint_every=1).run()
    path = tmp_path / "step-00000001.gguf"
    older = older_identity([tiny])
    without(path, "settings", "clip", model=older)
    resumed = trainer_of(max_steps=2, checkpoint_dir=str(tmp_path))
    resumed.resume(path)
    assert resumed.progress.step == 1 and resumed.run(), "it may write there, too"
    without(path, "adapter", "skip_layers", model=older[:-1] + "?")
    with pytest.raises(CheckpointError, match="is another model than that run's$"):
        trainer_of(max_steps=2).resume(path)


def test_what_is_not_this_run_s_stays_in_the_folder_of_its_checkpoints(trainer_of, tiny, tmp_path):
    """A run goes on from another folder into one that has checkpoints, or files of their names."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    trainer_of(max_steps=1, checkpoint_dir=str(mine)).run()
    trainer_of(max_steps=2, lr=0.02, checkpoint_dir=str(theirs)).run()
    model = theirs.parent / "models" / "step-00000002.gguf"
    text = theirs.parent / "text" / "step-00000009.gguf"
    for path, raw in ((model, tiny.read_bytes()), (text, b"my own words")):
        path.parent.mkdir()
        path.write_bytes(raw)
    for folder in (theirs, model.parent, text.parent):
        before = {p: p.read_bytes() for p in folder.iterdir()}
        trainer = trainer_of(max_steps=4, checkpoint_dir=str(folder), checkpoint_every=1)
        with pytest.warns(RuntimeWarning, match="of a run of 1 steps"):
            trainer.resume(mine / "step-00000001.gguf")
        with pytest.raises(CheckpointError, match="is of another run, or no checkpoint: name"):
            trainer.run()
        assert {p: p.read_bytes() for p in folder.iterdir()} == before


def test_a_step_that_is_no_number_is_another_run_s(trainer_of, tmp_path):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    trainer_of(max_steps=1, checkpoint_dir=str(mine)).run()
    stranger = {"general.type": "checkpoint", "checkpoint.step": np.arange(3)}
    theirs.mkdir()
    gguf.write(theirs / "step-00000007.gguf", stranger, [])
    trainer = trainer_of(max_steps=1, checkpoint_dir=str(theirs))
    trainer.resume(mine / "step-00000001.gguf")
    with pytest.raises(CheckpointError, match="step-00000007.gguf is of another run, or no"):
        trainer.run()


def test_checkpoints_are_rotated_by_what_is_in_them(trainer_of, tiny, tmp_path):
    """Files that come while a run is under way are not taken for its older checkpoints."""
    trainer = trainer_of(max_steps=6, checkpoint_dir=str(tmp_path), checkpoint_every=1)
    planted = tmp_path / "step-00000001.gguf"

    def plant(event):
        if isinstance(event, StepReport) and event.step == 4:
            planted.write_bytes(tiny.read_bytes())

    trainer.run(plant)
    names = sorted(p.name for p in tmp_path.glob("*.gguf"))
    assert names == [f"step-{i:08d}.gguf" for i in (1, 5, 6)]
    assert planted.read_bytes() == tiny.read_bytes()


def damage(path: Path, how):
    raw = bytearray(path.read_bytes())
    if how == "a flipped bit":
        raw[-100] ^= 1
    elif how == "half of it":
        raw = raw[: len(raw) // 2]
    else:
        raw = bytearray(b"not a checkpoint")
    path.write_bytes(raw)


@pytest.mark.parametrize("how", ["a flipped bit", "half of it", "something else"])
def test_a_damaged_checkpoint_is_refused(trainer_of, tmp_path, how):
    trainer_of(max_steps=2, checkpoint_dir=str(tmp_path)).run()
    path = tmp_path / "step-00000002.gguf"
    damage(path, how)
    other = trainer_of(max_steps=2)
    before = state(other)
    with pytest.raises(CheckpointError, match="damaged|wanted a checkpoint"):
        other.resume(path)
    assert state(other) == before


@pytest.mark.parametrize("key, value", [("step", 1), ("epoch", 1 << 63), ("index", 0)])
def test_a_checkpoint_with_another_position_is_damaged(trainer_of, tmp_path, key, value):
    """Also one whose numbers are whole. A folder's newest is then the one before."""
    trainer_of(max_steps=2, checkpoint_dir=str(tmp_path), checkpoint_every=1).run()
    path = tmp_path / "step-00000002.gguf"
    with gguf.open(path) as file:
        tensors = [(n, F32, t.shape, file.data(n).copy()) for n, t in file.tensors.items()]
        metadata = dict(file.metadata)
        gguf.write(tmp_path / "same.gguf", metadata, tensors)
        metadata[f"checkpoint.{key}"] = gguf.Field.of(np.uint64(value))
    trainer_of(max_steps=2).resume(tmp_path / "same.gguf")
    gguf.write(path, metadata, tensors)
    with pytest.raises(CheckpointError, match="is damaged: its content does not match its SHA-256"):
        trainer_of(max_steps=2).resume(path)
    with pytest.warns(RuntimeWarning, match="is damaged; an older one is taken"):
        assert newest(tmp_path) == tmp_path / "step-00000001.gguf"


def test_a_checkpoint_whose_tensors_fit_no_parameter_is_refused(trainer_of, tmp_path):
    """What no run of these settings writes: its digest is right, its tensors are shorter."""
    trainer_of(max_steps=2, checkpoint_dir=str(tmp_path)).run()
    path = tmp_path / "step-00000002.gguf"
    with gguf.open(path) as file:
        tensors = {n: file.data(n)[:-1].copy() for n in file.tensors}
        metadata = dict(file.metadata)
    metadata[checkpoint._SUM] = gguf.Field.of(checkpoint._whole_digest(metadata, tensors))
    gguf.write(path, metadata, [(n, F32, t.shape, t) for n, t in tensors.items()])
    with pytest.raises(CheckpointError, match=r": \w+ is F32 \(\d+,\), wanted F32 \(\d+,\)"):
        trainer_of(max_steps=2).resume(path)


def test_a_file_of_another_kind_is_no_checkpoint(trainer_of, tiny):
    with pytest.raises(CheckpointError, match="general.type is missing, wanted 'checkpoint'"):
        trainer_of().resume(tiny)


def test_nor_is_one_whose_kind_is_no_word(trainer_of, tmp_path):
    gguf.write(tmp_path / "a.gguf", {"general.type": np.arange(3)}, [])
    with pytest.raises(CheckpointError, match="general.type is .*, wanted 'checkpoint'"):
        trainer_of().resume(tmp_path / "a.gguf")


def test_a_run_that_makes_no_step_writes_no_checkpoint(trainer_of, tmp_path):
    trainer = trainer_of(max_steps=3, checkpoint_dir=str(tmp_path))
    assert not trainer.run(lambda event: trainer.stop())
    assert trainer.progress.step == 0 and list(tmp_path.glob("*.gguf")) == []


def test_the_newest_checkpoint_that_is_a_file_at_all_is_taken(trainer_of, tmp_path):
    trainer_of(max_steps=2, checkpoint_dir=str(tmp_path), checkpoint_every=1).run()
    (tmp_path / "step-00000002.gguf").write_bytes(b"no model")
    with pytest.warns(RuntimeWarning, match="00002.gguf: is damaged; an older one is taken"):
        assert newest(tmp_path) == tmp_path / "step-00000001.gguf"


def test_a_rank_that_is_asked_to_stop_saves_the_last_whole_step(trainer_of, tmp_path):
    """At once, as the process may be ended before the step under way is."""
    trainer = trainer_of(max_steps=3, checkpoint_dir=str(tmp_path))
    path = tmp_path / "step-00000001.gguf"

    def stop(event):
        if trainer.progress.step == 1 and not path.exists():
            trainer.ranks = SimpleNamespace(leaves_time=False)
            with pytest.warns(RuntimeWarning, match="stopping: step 1 is saved as .*00001.gguf"):
                trainer.stop()
            trainer.ranks = ALONE
            assert path.exists()

    assert not trainer.run(stop)
