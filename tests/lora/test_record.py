"""adapter.metrics.jsonl: whole after a kill, continued by a resumed run, silent before step 1."""

import json
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from extras import need

from pyggml.errors import ConfigError, PyggmlError
from pyggml.extras import how_to_install
from pyggml.lora.record import Recorder, check_loggers, read_records
from pyggml.lora.record.loggers import LOGGERS
from pyggml.lora.record.metrics import append
from pyggml.lora.trainer.reports import StepReport, ValidationReport


def _recorded(trainer, tmp_path, **options):
    with Recorder(trainer, tmp_path / "adapter.gguf", **options) as recorder:
        trainer.run(recorder)
    return recorder


def _steps(records):
    return [r["step"] for r in records if r["event"] == "step"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "adapter.metrics.jsonl"


def test_every_report_is_a_line(trainer_of, tmp_path, path):
    trainer, told = trainer_of(max_steps=3, grad_accum=2, weight_decay=0.1), []
    with Recorder(trainer, tmp_path / "adapter.gguf") as recorder:
        trainer.run(lambda report: (told.append(report), recorder(report)))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    records = [r for r in lines if r["event"] != "gradients"]
    assert [r["event"] for r in records] == [
        {StepReport: "step", ValidationReport: "validation"}[type(t)] for t in told
    ]
    for report, record in zip(told, records, strict=True):
        assert (record["step"], record["loss"]) == (report.step, report.loss)
    step, first = records[1], told[1]
    assert step["grad_norm"] == first.grad_norm and step["lr"] == first.lr
    assert step["n_tokens"] == first.n_tokens and step["memory_bytes"] > 1 << 20
    assert step["tokens_per_second"] == first.n_tokens / first.seconds
    held_out = records[0]
    assert (step["token_accuracy"], held_out["token_accuracy"]) == (
        first.token_accuracy,
        told[0].token_accuracy,
    )


def test_lines_are_on_disk_as_they_are_told(trainer_of, tmp_path, path):
    trainer, seen = trainer_of(max_steps=3), []

    def watched(report):
        recorder(report)
        seen.append(len(path.read_text().splitlines()) if path.exists() else None)

    with Recorder(trainer, tmp_path / "adapter.gguf") as recorder:
        trainer.run(watched)
    assert seen == [None, 3, 5, 7, 8], "the validation before step 1 waits for it"


def test_a_run_that_is_stopped_before_its_first_step_leaves_the_older_file(
    trainer_of, tmp_path, path
):
    path.write_text("older\n")
    trainer = trainer_of(max_steps=3)
    with Recorder(trainer, tmp_path / "adapter.gguf", log_to=["unheard of"]) as recorder:
        trainer.run(lambda report: (recorder(report), trainer.stop()))
    assert trainer.progress.step == 0
    assert path.read_text() == "older\n" and list(tmp_path.iterdir()) == [path]


def test_a_new_run_sets_an_older_file_aside(trainer_of, tmp_path, path):
    older = '{"event": "step", "step": 1, "loss": 9.0}\n{"event": "st'
    path.write_text(older)
    _recorded(trainer_of(max_steps=2), tmp_path)
    assert (tmp_path / "adapter.metrics.old.jsonl").read_text() == older
    assert _steps(read_records(path)) == [1, 2]


@pytest.mark.parametrize("name", ["adapter.metrics.jsonl", "adapter.metrics.old.jsonl"])
@pytest.mark.parametrize(
    "theirs", ["mine\n", '{"text": "mine"}\n', '{"event": "step"}\n', '{"event": 1, "step": 1}\n']
)
def test_a_file_that_no_run_wrote_is_neither_set_aside_nor_replaced(
    trainer_of, tmp_path, path, name, theirs
):
    path.write_text('{"event": "step", "step": 1, "loss": 9.0}\n')
    (tmp_path / name).write_text(theirs)
    before = {p: p.read_text() for p in tmp_path.glob("*.jsonl")}
    recorded = _recorded(trainer_of(max_steps=2), tmp_path)
    (fault,) = recorded.faults
    assert fault == f"{tmp_path / name}: was not written by a run, whose metrics would replace it"
    assert {p: p.read_text() for p in tmp_path.glob("*.jsonl")} == before


@pytest.mark.parametrize("gone", ["nothing", "a step", "all", "another run's"])
def test_a_resumed_run_goes_on_in_the_file(trainer_of, tmp_path, path, gone):
    settings = {"checkpoint_every": 2, "checkpoint_dir": str(tmp_path / "points"), "val_every": 2}
    _recorded(trainer_of(max_steps=6, **settings), tmp_path)
    whole = list(read_records(path))
    lines = path.read_text().splitlines(keepends=True)
    killed = [line for line in lines if json.loads(line)["step"] <= 5]
    changed = {
        "nothing": killed,
        "a step": [line for line in killed if json.loads(line)["step"] != 1],
        "all": [],
        "another run's": [line.replace('"loss": ', '"loss": 1') for line in killed],
    }[gone]
    path.write_text("".join(changed) + '{"event": "step", "st')
    again = trainer_of(max_steps=6, **settings)
    again.resume(tmp_path / "points" / "step-00000004.gguf")
    _recorded(again, tmp_path)
    found = list(read_records(path))
    for event in ("step", "validation"):
        told = [
            [(r["step"], r["loss"]) for r in rs if r["event"] == event] for rs in (whole, found)
        ]
        assert told[0] == told[1]
    assert (tmp_path / "adapter.metrics.old.jsonl").exists() == (gone != "nothing")


def test_a_full_disk_ends_no_run(trainer_of, tmp_path, path, monkeypatch):
    def fsync(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    trainer = trainer_of(max_steps=2)
    recorder = _recorded(trainer, tmp_path)
    assert trainer.is_done and not path.exists()
    assert recorder.faults == [f"{path}: cannot be written: No space left on device"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="asks for a file that is always full")
def test_a_disk_that_fills_on_the_way_ends_no_run(trainer_of, tmp_path, path):
    trainer = trainer_of(max_steps=3)

    def filled(report):
        recorder(report)
        if report.step == 1:
            recorder.metrics._file.close()
            recorder.metrics._file = os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")

    with Recorder(trainer, tmp_path / "adapter.gguf") as recorder:
        trainer.run(filled)
    assert trainer.is_done and _steps(read_records(path)) == [1]
    assert recorder.faults == [f"{path}: cannot be written: No space left on device"]


def test_a_file_of_others_is_read_with_care(path):
    lines = [b"[" * 100_000, b"\xff\xfe", b"{}", b'{"event": 1, "step": 1}', b"null", b"7"]
    good = b'{"event": "step", "step": 3, "loss": 1.5}'
    path.write_bytes(b"\n".join([*lines, good, b'{"event": "step", "step": 4']))
    assert list(read_records(path)) == [{"event": "step", "step": 3, "loss": 1.5}]


def test_loggers_are_refused_by_one_sentence(monkeypatch):
    monkeypatch.setattr("pyggml.lora.record.loggers.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_loggers(["wandb", "wandv"])
    assert str(caught.value) == (
        f"--log-to wandb needs the package wandb: {how_to_install('wandb')}; "
        "--log-to wandv is unknown, wanted some of tensorboard, wandb, mlflow: did you mean "
        "'wandb'?"
    )


def test_a_logger_that_fails_ends_no_run(trainer_of, tmp_path, path, monkeypatch):
    def broken(*about):
        raise RuntimeError("no server")

    monkeypatch.setattr("pyggml.lora.record.loggers.LOGGERS", {"wandb": broken})
    trainer = trainer_of(max_steps=2)
    recorder = _recorded(trainer, tmp_path, log_to=["wandb"])
    assert trainer.is_done and recorder.faults == ["wandb: no server"]
    assert _steps(read_records(path)) == [1, 2]


def test_tensorboard_shows_a_resumed_run_once(trainer_of, tmp_path):
    need("tensorboardX")
    settings = {"checkpoint_every": 2, "checkpoint_dir": str(tmp_path / "points")}
    _recorded(trainer_of(max_steps=4, **settings), tmp_path, log_to=["tensorboard"])
    again = trainer_of(max_steps=4, **settings)
    again.resume(tmp_path / "points" / "step-00000002.gguf")
    _recorded(again, tmp_path, log_to=["tensorboard"])
    files = sorted((tmp_path / "adapter.tensorboard").iterdir())
    assert len(files) == 2 and all(b"train/loss" in f.read_bytes() for f in files)


# MLflow 3.17 takes a word of SQLAlchemy that 2.1 will drop.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_has_the_settings_and_every_step(trainer_of, tmp_path, monkeypatch):
    """In a database beside the adapter, read by MLflow itself; a resumed run says where it
    started."""
    for module in ("mlflow", "sqlalchemy", "alembic"):
        need(module)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    points = {"checkpoint_every": 2, "checkpoint_dir": str(tmp_path / "points")}
    about = {"log_to": ["mlflow"], "settings": {"lr": 1e-3, "long": "x" * 9999}}
    monkeypatch.chdir(tmp_path)
    first = _recorded(trainer_of(max_steps=3, **points), Path(), **about)  # as `-o adapter.gguf`
    again = trainer_of(max_steps=3, **points)
    again.resume(tmp_path / "points" / "step-00000002.gguf")
    assert first.faults == _recorded(again, tmp_path, **about).faults == []
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path.as_posix()}/adapter.mlflow/mlflow.db")
    later, run = client.search_runs([client.get_experiment_by_name("pyggml").experiment_id])
    assert run.info.run_name == "adapter" and run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.001", "long": "x" * 500}
    wanted = [
        r["loss"] for r in read_records(tmp_path / "adapter.metrics.jsonl") if r["event"] == "step"
    ]
    assert [p.name for p in (tmp_path / "adapter.mlflow").iterdir()] == ["mlflow.db"]
    assert not (tmp_path / "mlruns").exists(), "all of it lies beside the adapter"
    logged = client.get_metric_history(run.info.run_id, "train/loss")
    assert [m.step for m in logged] == [1, 2, 3] and [m.value for m in logged] == wanted
    assert (run.data.tags["start_step"], later.data.tags["start_step"]) == ("0", "2")
    assert [m.step for m in client.get_metric_history(later.info.run_id, "train/loss")] == [3]


def test_tensorboard_has_the_settings_as_a_table(tmp_path):
    need("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    made = LOGGERS["tensorboard"](tmp_path, "a", {"lr": 0.5, "batch": 4}, 0)
    made.close()
    (file,) = tmp_path.iterdir()
    raw, events = file.read_bytes(), []
    while raw:  # of each record: its length, a sum, its bytes, a sum
        n = int.from_bytes(raw[:8], "little")
        events.append(Event.FromString(raw[12 : 12 + n]))
        raw = raw[16 + n :]
    (value,) = (v for event in events for v in event.summary.value)
    assert value.tag.startswith("settings")
    table = "| setting | value |\n|---|---|\n| lr | 0.5 |\n| batch | 4 |"
    assert value.tensor.string_val == [table.encode()]


def test_weights_and_biases_has_the_settings_and_every_step_in_its_folder(
    trainer_of, tmp_path, path, monkeypatch
):
    need("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    for name in ("WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    about = {"log_to": ["wandb"], "settings": {"lr": 1e-3, "modules": ("q", "v")}}
    assert _recorded(trainer_of(max_steps=3), tmp_path, **about).faults == []
    (file,) = tmp_path.glob("adapter.wandb/wandb/offline-run-*/run-*.wandb")
    records = [Record.FromString(raw) for raw in _log_records(file.read_bytes())]
    (run,) = (r.run for r in records if r.WhichOneof("record_type") == "run")
    config = {u.key: json.loads(u.value_json) for u in run.config.update}
    assert (config["lr"], config["modules"], run.display_name) == (1e-3, "('q', 'v')", "adapter")
    losses = {}
    for row in (r.history for r in records if r.WhichOneof("record_type") == "history"):
        values = {i.key or i.nested_key[0]: json.loads(i.value_json) for i in row.item}
        if "train/loss" in values:
            losses[values["_step"]] = values["train/loss"]
    assert losses == {r["step"]: r["loss"] for r in read_records(path) if r["event"] == "step"}


def _log_records(raw):
    """The records of a file of wandb: a log as LevelDB writes it, behind 7 bytes of its own."""
    at, record = 7, b""
    while at + 7 <= len(raw):
        left = (1 << 15) - at % (1 << 15)  # of a block, which no header reaches over
        if left < 7:
            at += left
            continue
        n, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        record += raw[at + 7 : at + 7 + n]
        at += 7 + n
        if kind in (1, 4):  # whole, or the last part of one
            yield record
            record = b""


def test_weights_and_biases_gets_numbers_and_an_end(tmp_path, monkeypatch):
    """Its part that pyggml calls, by a double."""
    run, library = Mock(), Mock()
    library.init.return_value = run
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    made = LOGGERS["wandb"](tmp_path / "w", "a", {"lr": 0.5, "modules": ("q", "v")}, 0)
    about = library.init.call_args.kwargs
    assert about["mode"] == "offline" and about["config"] == {"lr": 0.5, "modules": "('q', 'v')"}
    assert about["dir"] == str(tmp_path / "w") and (tmp_path / "w").is_dir()
    made.log(3, {"train/loss": 2.0})
    run.log.assert_called_once_with({"train/loss": 2.0}, step=3)
    run.finish.assert_not_called()
    made.close()
    run.finish.assert_called_once_with()


def test_mlflow_writes_a_database_and_tells_nobody(tmp_path, monkeypatch):
    for name in ("MLFLOW_LOGGING_LEVEL", "MLFLOW_DISABLE_TELEMETRY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", Mock())
    monkeypatch.setitem(sys.modules, "mlflow.entities", Mock())
    monkeypatch.setattr(os, "environ", dict(os.environ))
    LOGGERS["mlflow"](tmp_path, "a", {}, 0)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    client = sys.modules["mlflow"].MlflowClient
    client.assert_called_once_with(f"sqlite:///{tmp_path.as_posix()}/mlflow.db")
    monkeypatch.setitem(os.environ, "MLFLOW_TRACKING_URI", "http://localhost:5000")
    LOGGERS["mlflow"](tmp_path, "a", {}, 0)
    assert client.call_args.args == ("http://localhost:5000",)


def test_a_logger_gets_the_gradients_of_each_layer(trainer_of, tmp_path, monkeypatch):
    rows = []

    class Noted:
        def __init__(self, *about):
            pass

        def log(self, step, values):
            rows.append((step, values))

        def close(self):
            pass

    monkeypatch.setattr("pyggml.lora.record.loggers.LOGGERS", {"wandb": Noted})
    recorder = _recorded(trainer_of(max_steps=2), tmp_path, log_to=["wandb"])
    assert recorder.faults == []
    names = {name for _, values in rows for name in values}
    assert {"train/loss", "validation/loss"} <= names
    assert any(name.startswith("gradients/") for name in names)


def test_a_record_that_cannot_be_added_is_one_sentence(path, monkeypatch):
    append(path, {"event": "end"})
    assert not path.exists(), "without a file nothing is written"
    path.write_text("")
    append(path, {"event": "end"})
    assert path.read_text() == '{"event": "end"}\n'

    def full(*about, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyggml.lora.record.metrics.open_to_append", full)
    with pytest.raises(PyggmlError) as caught:
        append(path, {"event": "end"})
    assert str(caught.value) == f"{path}: cannot be written: No space left on device"
