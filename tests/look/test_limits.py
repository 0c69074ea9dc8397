"""Limits of a machine: kept once measured, whatever the file has; what a token takes of them."""

import json
from functools import partial

import pytest
import tiny_models

import pyggml
from pyggml import threads
from pyggml.backends.cpu import CPU
from pyggml.errors import DeviceMemoryError
from pyggml.graph.arrays import array
from pyggml.graph.dtypes import F32, dtype
from pyggml.look import limits
from pyggml.look.limits import (
    generation_seconds,
    multiply_limit,
    read_limit,
    share_of_limit,
    training_seconds,
)
from pyggml.runtime import Devices


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where limits are kept, with nothing kept or asked for."""
    monkeypatch.setattr(limits, "CACHE", str(tmp_path))
    monkeypatch.setattr(limits, "_LIMITS", {})
    monkeypatch.setattr(limits, "_SECONDS", 0.01)
    return tmp_path


@pytest.fixture
def rates(folder, monkeypatch):
    """Rates that are measured, one after the other."""
    coming = []
    monkeypatch.setattr(limits, "_measure_products", lambda *_: coming.pop(0))
    monkeypatch.setattr(limits, "_measure_reads", lambda *_: coming.pop(0))
    return coming


def forget(monkeypatch):
    monkeypatch.setattr(limits, "_LIMITS", {})


class Card(CPU):
    """A device beside the host that computes as it does."""

    is_host = False
    about = "a card"

    def __init__(self, bytes_free=1 << 40):
        super().__init__()
        self.bytes_free = bytes_free

    def alloc(self, n_bytes):
        if n_bytes > self.bytes_free:
            raise DeviceMemoryError("a card: it is full")
        return super().alloc(n_bytes)

    read = staticmethod(lambda t: array(t).copy())

    def write(self, tensor, values):
        array(tensor)[...] = values


HOST = Devices([CPU("f32")])


@pytest.mark.parametrize("devices", [HOST, Devices([Card(), CPU()])])
def test_real_measurements_are_rates(devices, folder):
    assert multiply_limit(devices, F32) > 1e7
    assert read_limit(devices) > 1e6
    kept = json.loads((folder / limits.FILE).read_bytes())
    assert len(kept) == 2 and all(devices.backends[0].about in name for name in kept)


def test_a_process_that_is_stopped_as_it_begins_to_measure_has_a_rate(folder, monkeypatch):
    """The time of a measurement is over before its first run."""
    monkeypatch.setattr(limits, "_SECONDS", 0.0)
    assert 0 < limits._best_seconds(lambda: None) < 1


def test_a_full_card_has_no_limits(folder, tmp_path):
    devices = Devices([Card(bytes_free=1 << 10), CPU()])
    assert multiply_limit(devices, F32) is read_limit(devices) is None
    assert not any(devices._copies.values()), "nothing stays there"


def test_a_limit_is_measured_once_a_machine(rates, monkeypatch):
    rates += [5.0, 7.0]
    assert [read_limit(HOST), read_limit(HOST)] == [5.0, 5.0]
    forget(monkeypatch)
    assert read_limit(HOST) == 5.0, "of the file"
    assert multiply_limit(HOST, dtype("Q4_K")) == multiply_limit(HOST, dtype("Q6_K")) == 7.0


def test_of_measurements_the_better_is_kept(rates, monkeypatch):
    """A busy machine made the lower one."""
    rates += [5.0, 9.0, 6.0]
    assert [read_limit(HOST), read_limit(HOST, anew=True), read_limit(HOST, anew=True)] == [
        5.0,
        9.0,
        9.0,
    ]
    forget(monkeypatch)
    assert read_limit(HOST) == 9.0


def test_threads_and_compute_types_have_limits_of_their_own(rates, monkeypatch):
    rates += [1.0, 2.0, 3.0]
    assert multiply_limit(HOST, F32) == 1.0
    assert multiply_limit(Devices([CPU("int8")]), F32) == 2.0
    monkeypatch.setattr(threads, "get", lambda: 3)
    assert multiply_limit(HOST, F32) == 3.0


@pytest.mark.parametrize(
    "raw", [b"", b"[1]", b"{", b'{"read": "x"}', b"[" * 9000, b"\xff", b" " * (1 << 17)]
)
def test_a_file_that_is_none_of_ours_is_measured_anew(raw, rates, folder):
    (folder / limits.FILE).write_bytes(raw)
    rates += [4.0]
    assert read_limit(HOST) == 4.0
    assert 4.0 in json.loads((folder / limits.FILE).read_bytes()).values()


@pytest.mark.parametrize("value", ["-1.0", "0.0", "NaN", "Infinity", "true", '"9"'])
def test_a_number_that_is_no_rate_is_measured_anew(value, rates, folder, monkeypatch):
    rates += [4.0, 6.0]
    read_limit(HOST)
    (name,) = json.loads((folder / limits.FILE).read_bytes())
    (folder / limits.FILE).write_text(f'{{"{name}": {value}}}')
    forget(monkeypatch)
    assert read_limit(HOST) == 6.0


def test_without_a_folder_a_process_measures_once(rates, monkeypatch):
    monkeypatch.setattr(limits, "CACHE", None)
    rates += [4.0]
    assert [read_limit(HOST), read_limit(HOST)] == [4.0, 4.0]


def matrices(model, tied=False, part=1.0):
    """Weights and bytes of the matrices of a token, by the names that files give them."""
    weights = model.parts.weights
    names = [n for n, w in weights.items() if len(w.shape) > 1]
    used = {n: part if "_exps" in n else 1.0 for n in names if tied or n != "token_embd.weight"}
    return (
        sum(p * weights[n].n_elements for n, p in used.items()),
        sum(p * weights[n].n_bytes for n, p in used.items()),
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_token_takes_its_matrices_once(tied, rates, tmp_path):
    rates += [1e9, 2e9]
    path = tiny_models.write_llama(tmp_path / "m.gguf", 40, n_layer=2, seed=1, tied=tied)
    model = pyggml.load(path)
    n_weights, n = matrices(model, tied)
    assert training_seconds(model) == pytest.approx(4 * n_weights / 1e9)
    assert generation_seconds(model) == pytest.approx(n / 2e9)


def test_of_experts_those_count_that_a_token_has(rates, tmp_path):
    rates += [1e9]
    model = pyggml.load(
        tiny_models.write(tmp_path / "m.gguf", "qwen3moe", numbers=tiny_models.scaled)
    )
    model.tied = False
    every, used = (model.file.get(f"qwen3moe.expert_{x}count") for x in ("", "used_"))
    assert used < every
    n_weights, _ = matrices(model, part=used / every)
    assert training_seconds(model) == pytest.approx(4 * n_weights / 1e9)


def test_a_limit_that_is_exceeded_is_measured_again(rates, tmp_path):
    """At most all of it is said, and a limit that holds is not measured twice."""
    rates += [1e9, 4e9, 5e8]
    model = pyggml.load(tiny_models.write_llama(tmp_path / "m.gguf", 40, n_layer=2, seed=1))
    least = partial(training_seconds, model)
    seconds = least()
    assert share_of_limit(least, 10, 20 * seconds) == pytest.approx(0.5)
    assert share_of_limit(least, 10, 5 * seconds) == pytest.approx(0.5)
    assert least() == pytest.approx(seconds / 4)
    assert share_of_limit(least, 10, seconds) == 1.0
    assert share_of_limit(lambda anew: None, 10, 1.0) is None and not rates


def test_of_a_model_on_a_device_the_limits_are_the_devices(folder, tmp_path):
    path = tiny_models.write_llama(tmp_path / "m.gguf", 40, n_layer=1, seed=1)
    model = pyggml.load(path, backends=[Card()])
    assert training_seconds(model) > 0 < generation_seconds(model)
    assert all("a card" in name for name in json.loads((folder / limits.FILE).read_bytes()))
    full = pyggml.load(path, backends=[Card(bytes_free=1 << 10)])
    assert training_seconds(full) is not None, "it is known already"
