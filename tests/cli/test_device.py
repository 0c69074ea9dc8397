"""--device: what is refused, and a device that is lost in the middle of a run."""

import io
from dataclasses import replace

import pytest
from separate_cpu import SeparateCPU

from pyggml.backends.cuda import cards
from pyggml.backends.webgpu import adapter_name
from pyggml.cli.__main__ import COMMANDS, command
from pyggml.cli.commands.finetune import memory
from pyggml.cli.commands.serve import startup
from pyggml.cli.terminal.devices import DEVICE_HELP
from pyggml.errors import ConfigError, DeviceError, DeviceLostError, DeviceMemoryError
from pyggml.lora import Trainer
from pyggml.runtime.choice import WANTED, backends_of


def has_card():
    try:
        return bool(cards())
    except DeviceError:
        return False


class Lost(SeparateCPU):
    """Fails at a launch, and from then on."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def _launch(self, calls):
        if self.launches >= self.at:
            raise DeviceLostError("separate has failed: unplugged")
        super()._launch(calls)

    def read(self, tensor):
        if self.launches >= self.at:
            raise DeviceLostError("separate has failed: unplugged")
        return super().read(tensor)


@pytest.mark.parametrize("command", ["finetune", "generate", "perplexity"])
def test_another_word_is_refused(pyggml, finetune, tiny, text, command):
    more = {"finetune": ("-f", text, "-o", "x.gguf"), "generate": ("-p", "a")}
    ended = pyggml(command, "-m", tiny, "--device", "gpu", *more.get(command, ("-f", text)))
    assert ended.code == 2
    assert f"--device is 'gpu', {WANTED}" in ended.err


@pytest.mark.parametrize(
    "command", ["control-vector", "embed", "eval", "generate", "imatrix", "perplexity", "teach"]
)
def test_a_command_computes_on_its_device(pyggml, tiny, text, command, tmp_path, monkeypatch):
    """And says the same as on the CPU, whose kernels this device has."""
    output = tmp_path / "made.gguf"
    more = {
        "control-vector": (
            *("--positive-file", text, "--negative-file", text.with_name("other.txt")),
            *("-o", output, "--force"),
        ),
        "embed": ("-p", "the", "--pooling", "mean"),
        "eval": ("-f", text),
        "generate": ("-p", "a", "-n", 3, "--temp", 0),
        "imatrix": ("-f", text, "--ctx", 16, "-o", output, "--force"),
        "perplexity": ("-f", text, "--ctx", 16),
        "teach": ("-f", text, "--ctx", 16, "-o", output, "--force"),
    }[command]
    text.with_name("other.txt").write_text("the end of a thing\n" * 3)
    device, second, said = SeparateCPU(), SeparateCPU(), []
    places = {"cpu": ([], ()), "cuda": ([device], ()), "two": ([device, second], ("-ngl", 2))}
    for name, (devices, options) in places.items():
        monkeypatch.setattr("pyggml.model.backends_of", lambda *_, devices=devices: devices)
        used = ("--compute", "f32", "--device", name, *options)
        ended = pyggml(command, "-m", tiny, *more, *used)
        assert ended.code == 0, ended.err
        said.append((ended.out, output.read_bytes() if output.exists() else b""))
        assert bool(device.launches) == (name != "cpu")
    assert said[0] == said[1] == said[2] and second.launches


def test_which_commands_take_a_device():
    """Those that the tests here and of `serve` run on one, and `sweep` and `heal`, whose runs are
    those of `finetune`; no other command accepts the option."""
    takes = {n for n in COMMANDS if any(p.name == "device" for p in command(n).params)}
    tried = {
        "chat",
        "control-vector",
        "embed",
        "eval",
        "finetune",
        "generate",
        "imatrix",
        "perplexity",
        "serve",
        "teach",
    }
    assert takes == {*tried, "sweep", "heal"}


def test_a_chat_computes_on_its_device(pyggml, model_with, monkeypatch):
    device = SeparateCPU()
    monkeypatch.setattr("pyggml.model.backends_of", lambda word, _: [device])
    monkeypatch.setattr("sys.stdin", io.StringIO("the path\n"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = model_with(tokenizer__chat_template=template)
    ended = pyggml("chat", "-m", model, "-n", 2, "--compute", "f32", "--device", "cuda")
    assert ended.code == 0 and device.launches, ended.err


def test_a_server_opens_its_models_on_its_device(pyggml, tiny, monkeypatch):
    device, opened = SeparateCPU(), []

    def run(listening, sampling, limits, context, given):
        opened.extend(startup.Opener(given, limits, context, sampling).voices().of_open_models)
        return 0

    monkeypatch.setattr("pyggml.model.backends_of", lambda word, _: [device])
    monkeypatch.setattr(startup, "run", run)
    ended = pyggml("serve", "-m", tiny, "--port", 0, "--compute", "f32", "--device", "cuda")
    assert ended.code == 0, ended.err
    (voice,) = opened
    assert device in voice.model.devices.backends


@pytest.mark.parametrize("word", ["cuda:", "cuda:-1", "cuda:²", "webgpu:0", "cpu:0", "auto:0"])
def test_a_number_is_decimal_and_a_cards(word):
    with pytest.raises(ConfigError, match=f"device is '{word}', wanted"):
        backends_of(word)


@pytest.mark.skipif(has_card(), reason="there is a card")
def test_a_card_that_is_not_there(pyggml, tiny):
    ended = pyggml("generate", "-m", tiny, "-p", "a", "--device", "cuda")
    assert ended.code == 2 and ended.err.startswith("pyggml: no CUDA device: ")
    assert pyggml("generate", "-m", tiny, "-p", "a", "-n", 1, "--device", "auto").code == 0


@pytest.mark.parametrize("keeps", [True, False])
def test_the_checkpoint_of_a_lost_device_goes_on_elsewhere(finetune, tmp_path, monkeypatch, keeps):
    folder = tmp_path / "kept"
    options = ("--checkpoint-dir", folder, "--checkpoint-every", 1) if keeps else ()
    with monkeypatch.context() as fakes:  # what other fixtures have set stays
        fakes.setattr("pyggml.model.backends_of", lambda *_: [Lost(at=16)])
        ended = finetune("--device", "cuda", *options)
    assert ended.code == 2 and "separate has failed: unplugged; " in ended.err
    newest = max((p.name for p in folder.glob("*.gguf")), default="")
    wanted = f"--resume {folder} goes on from {newest}" if keeps else "no checkpoint was kept"
    assert wanted in ended.err and bool(newest) == keeps
    assert not (tmp_path / "adapter.gguf").exists()
    if keeps:
        ended = finetune("--device", "cpu", "--resume", folder, *options)
        assert ended.code == 0 and (tmp_path / "adapter.gguf").exists()


def test_help_names_the_devices_that_there_are():
    assert f"wanted {DEVICE_HELP}" == WANTED


def test_webgpu_from_the_command_line(finetune, pyggml, tiny, tmp_path, monkeypatch):
    """Nothing is left to the CPU, on which the adapter loads and writes the same."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # else Mesa complains
    try:
        adapter_name()
    except DeviceError as error:
        pytest.skip(f"no WebGPU here: {error}")
    ended = finetune("--device", "webgpu", "--lora-dropout", 0.1)
    assert ended.code == 0, ended.err
    assert "leaves" not in ended.err
    options = ("--lora", tmp_path / "adapter.gguf", "-p", "a", "-n", 6, "--temp", 0)
    texts = [
        pyggml("generate", "-m", tiny, *options, "--compute", "f32", "--device", device).out
        for device in ("webgpu", "cpu")
    ]
    assert texts[0] == texts[1] != ""


class Small(SeparateCPU):
    """Has 100 million bytes, of which so many are free; its driver takes 500."""

    def own(self, n_nodes):
        return 500

    def __init__(self, free, fails_at=None):
        super().__init__()
        self.free, self.fails_at, self.asked = free, fails_at, []

    def memory(self):
        return self.free, 100_000_000

    def alloc(self, n_bytes):
        self.asked.append(n_bytes)
        return super().alloc(n_bytes)

    def _launch(self, calls):
        if self.launches == self.fails_at:
            raise DeviceMemoryError("separate is out of memory: 7 bytes are wanted, 5 are free")
        super()._launch(calls)


def test_a_dry_run_says_a_device_s_memory(finetune, monkeypatch):
    device, planned = Small(90_000_000), []
    whole = memory.on_devices
    monkeypatch.setattr("pyggml.model.backends_of", lambda *_: [device])
    monkeypatch.setattr(memory, "on_devices", lambda *a: planned.append(whole(*a)) or planned[-1])
    ended = finetune("--device", "cuda", "--dry-run")
    assert ended.code == 0
    *_, (found,) = planned
    assert ended.row("separate").endswith("of 90.0 MB that are free, of which")
    assert "0 B  activations and gradients" in ended.out, "of the host"
    (_,) = (n for n in device.asked if n > 100_000)  # the run's arena; the optimiser's is small
    taken = sum(device.asked) + found.own + found.cache
    assert found.n_bytes == pytest.approx(taken, rel=0.02)


def test_a_dry_run_on_a_device_times_the_third_step(finetune, monkeypatch):
    seconds = iter([30.0, 20.0, 0.25])
    made = Trainer._step
    monkeypatch.setattr("pyggml.model.backends_of", lambda *_: [Small(90_000_000)])
    monkeypatch.setattr(Trainer, "_step", lambda t: replace(made(t), seconds=next(seconds)))
    assert finetune("--device", "cuda", "--dry-run").row("time").startswith("0.2 s a step")


def test_a_device_with_too_little_memory_is_found_before_a_step(finetune, monkeypatch):
    device = Small(9000)
    monkeypatch.setattr("pyggml.model.backends_of", lambda *_: [device])
    ended = finetune("--device", "cuda", "--dry-run")
    assert ended.code == 2 and device.launches == 0
    assert "bytes of separate, of whose 100,000,000 bytes 9,000 are free; smaller are" in ended.err


@pytest.mark.parametrize(
    ("launch", "end"),
    [(17, "was saved as"), (16, "was not saved: half of the step had changed it")],
)
def test_memory_that_runs_out_in_a_run_names_what_is_smaller(launch, end, finetune, monkeypatch):
    """A step is four launches, of which the last is the optimiser's. The device's rate is not
    measured meanwhile, by further ones."""
    monkeypatch.setattr("pyggml.look.limits._limit", lambda *_: None)
    device = Small(90_000_000, fails_at=launch)
    monkeypatch.setattr("pyggml.model.backends_of", lambda *_: [device])
    ended = finetune("--device", "cuda")
    assert ended.code == 2
    assert "7 bytes are wanted, 5 are free; smaller are --batch, --ctx and" in ended.err
    assert end in ended.err
