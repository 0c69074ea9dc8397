"""--gpu-layers and --split: blocks of a model on several devices give the CPU's bits."""

from types import SimpleNamespace

import pytest
from separate_cpu import SeparateCPU
from tiny_models import TOKENS, VOCABULARY, write_llama

import pyggml as library
from pyggml.cli.commands.finetune import memory
from pyggml.cli.commands.finetune.summary import say_places
from pyggml.cli.terminal import placing
from pyggml.errors import ConfigError
from pyggml.lora.ranks import Ranks
from pyggml.models import build
from pyggml.models.texts import inputs_of
from pyggml.runtime import backends_of
from pyggml.runtime.choice import DeviceKind

MISSING = "wanted a device beside the CPU: device cuda, webgpu or auto"


class Card(SeparateCPU):
    """One of several, with so many bytes free if it tells."""

    def __init__(self, name, free=None):
        super().__init__()
        self.name, self.free = name, free

    def memory(self):
        return self.free and (self.free, 100_000_000)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("layers") / "tiny.gguf"
    return write_llama(path, len(TOKENS), n_layer=4, seed=5, keys=VOCABULARY)


@pytest.fixture
def cards(monkeypatch):
    """Devices that `--device a,b` finds, by name."""
    found = {}

    def open_named(device, compute="auto"):
        words = [] if device == "cpu" else device.split(",")
        return [found.setdefault(word, Card(word)) for word in words]

    monkeypatch.setattr("pyggml.model.backends_of", open_named)
    return found


def test_a_run_on_two_devices_and_the_cpu_writes_its_adapter(pyggml, cards, model, text, tmp_path):
    """The norm is clipped, passes are added up. The run goes on without them, too."""
    short = ("-f", text, "--ctx", 16, "--prompt", "the ", "--compute", "f32", "--lora-rank", 2)
    short += ("--grad-accum", 2, "--lr", 0.01, "--clip", 0.01, "--lora-plus-ratio", 4)
    short += ("--max-steps", 4, "--checkpoint-every", 2)
    placed = ("--device", "a,b", "-ngl", 3, "--split", "2,1")
    bytes_of, ended = [], []
    for name, options in (("cpu", ()), ("devices", placed)):
        output, folder = tmp_path / f"{name}.gguf", tmp_path / name
        run = pyggml(
            "finetune", "-m", model, "-o", output, *short, *options, "--checkpoint-dir", folder
        )
        assert run.code == 0, run.err
        bytes_of.append(output.read_bytes())
        ended.append(run)
    assert bytes_of[0] == bytes_of[1]
    assert ended[1].row("layers") == (
        "cpu: the embedding, block 0 and the output; a: blocks 1 to 2; b: block 3"
    )
    assert all(cards[name].launches for name in "ab")
    resumed = ("-o", tmp_path / "resumed.gguf", "--resume", tmp_path / "devices/step-00000002.gguf")
    run = pyggml("finetune", "-m", model, *short, *resumed, "--checkpoint-dir", tmp_path / "more")
    assert run.code == 0, run.err
    assert (tmp_path / "resumed.gguf").read_bytes() == bytes_of[0]


def test_a_plan_says_how_many_passes_overlap(pyggml, cards, model, text, monkeypatch):
    planned = plans_of(monkeypatch)
    short = ("finetune", "-m", model, "-f", text, "--ctx", 16, "--prompt", "the ", "--dry-run")
    short += ("--compute", "f32", "--device", "a,b", "--split", "1,1", "--grad-accum")
    ended = pyggml(*short, 3)
    assert "up to 2 passes of a step overlap" in ended.out
    assert "passes of a step overlap" not in pyggml(*short, 1).out
    first = planned[0][0]
    cards["a"].free = first.n_bytes - first.cache - 1
    assert "no passes of a step overlap; with 2 the run needs " in pyggml(*short, 3).out


class Told(Ranks):
    """The first of two ranks, of which the other says this."""

    def __init__(self, other):
        self.size, self.other = 2, other

    def texts(self, text):
        return [text, self.other]


def test_ranks_that_leave_other_layers_to_the_cpu_are_refused(model, capsys):
    opened = library.load(model, compute="f32", backends=[Card("a")], gpu_layers=3)
    memory.expect_alike(opened, Told("2"))
    with pytest.raises(ConfigError, match="rank 0 leaves 2 of 5 layers to the CPU, rank 1 none"):
        memory.expect_alike(opened, Told("0"))
    opened.placement = None
    say_places(SimpleNamespace(model=opened, ranks=Told("1 of 4 blocks stay")))
    assert "rank 1: 1 of 4 blocks stay" in capsys.readouterr().out


def test_a_device_has_its_blocks_alone_and_activations_cross_once(model):
    a, b = Card("a"), Card("b")
    opened = library.load(model, compute="f32", backends=[a, b], gpu_layers=3, split=(1, 1))
    assert str(opened.placement) == (
        "cpu: the embedding, block 0 and the output; a: blocks 1 to 2; b: block 3"
    )
    tokens = [5, 3, 9]
    program = opened.program(build(opened.parts, inputs_of(tokens, opened.config)))
    crossing = [(c.source.name, c.giver.name, c.taker.name) for c in program.schedule.copies]
    assert crossing == [
        ("blk.0.out", "cpu", "a"),
        ("rope table", "cpu", "a"),
        ("blk.2.out", "a", "b"),
        ("rope table", "cpu", "b"),
        ("blk.3.out", "b", "cpu"),
    ]
    for part in program.schedule.parts:
        blocks = {t.name.split(".")[1] for t in part.leaves if t.name.startswith("blk.")}
        assert blocks <= {"a": {"1", "2"}, "b": {"3"}}.get(part.backend.name, {"0"})
    wanted = library.load(model, compute="f32").logits(tokens)
    assert opened.logits(tokens).tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("n_layers", "shares", "wanted"),
    [
        (0, (), "cpu: the embedding, blocks 0 to 3 and the output"),
        (4, (), "cpu: the embedding and the output; a: blocks 0 to 1; b: blocks 2 to 3"),
        (99, (0, 1), "a: the embedding; b: blocks 0 to 3 and the output"),
        (5, (3, 2), "a: the embedding and blocks 0 to 2; b: block 3 and the output"),
    ],
)
def test_where_blocks_are(model, n_layers, shares, wanted):
    cards = [Card("a"), Card("b")]
    opened = library.load(model, backends=cards, gpu_layers=n_layers, split=shares or None)
    assert str(opened.placement) == wanted


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("-ngl", -1), "is '-1', wanted a number of blocks from 0 on, all or auto"),
        (("-ngl", "some"), "is 'some', wanted a number of blocks from 0 on, all or auto"),
        (("-ngl", 2), f"--gpu-layers is 2, {MISSING}"),
        (("--split", "1,2.5"), f"--split is 1,2.5, {MISSING}"),
        (("-ngl", 2, "--split", "1,2"), f"--gpu-layers is 2, {MISSING}"),
        (("--stream-weights", "on"), "--stream-weights is on, wanted a device that can stream"),
        (("--split", "1,x"), "is '1,x', wanted a share for each device, such as 3,1"),
        (
            ("--device", "a,b", "--split", "3"),
            "--split is 3, wanted a share from 0 on for each of a and b, not all of them 0",
        ),
        (("--device", "a,b", "--split", "0,0"), "--split is 0,0, wanted a share from 0 on"),
        (("--device", "a,b", "--split", "1,-1"), "--split is 1,-1, wanted a share from 0 on"),
        (("--device", "a,b", "--split", "1,nan"), "--split is 1,nan, wanted a share from 0 on"),
    ],
)
def test_what_is_no_placement_is_refused(pyggml, cards, model, options, wanted):
    ended = pyggml("generate", "-m", model, "-p", "a", *options)
    assert ended.code == 2 and wanted in ended.err and ended.err.count("\n") == 1


def test_a_device_is_named_once():
    with pytest.raises(ConfigError, match="device names webgpu twice, wanted another one"):
        backends_of("webgpu,webgpu")
    with pytest.raises(ConfigError, match="is 'cuda:0,cpu', wanted devices beside the CPU"):
        backends_of("cuda:0,cpu")


def plans_of(monkeypatch):
    """A list that gets what each plan of training says of devices."""
    planned, whole = [], memory.on_devices
    monkeypatch.setattr(memory, "on_devices", lambda *a: planned.append(whole(*a)) or planned[-1])
    return planned


def limits(monkeypatch, **rates):
    for name, rate in rates.items():
        monkeypatch.setattr(placing, f"{name}_limit", lambda *_, rate=rate: rate)


def test_the_cpu_has_blocks_where_that_takes_less_than_to_stream(pyggml, cards, model, monkeypatch):
    """By the estimate, which a line says. --device auto rather takes further cards."""
    cards["a"] = cards["auto"] = Card("a", 620_000)
    cards["b"] = Card("b", 620_000)
    told = ("generate", "-m", model, "-p", "a", "-n", 1, "--seed", 1, "--compute", "f32")
    for read, placed in (1e6, "streamed: "), (1e12, "layers: cpu: the embedding"):
        limits(monkeypatch, read=read, multiply=1e15)
        ended = pyggml(*told, "--device", "a")
        assert ended.code == 0 and placed in ended.err, ended.err
        assert "a token is estimated to take 0 ms where they stream, " in ended.err
    kind = DeviceKind(None, lambda: iter([("a", ""), ("b", "")]), automatic=True)
    monkeypatch.setattr(placing, "KINDS", {"card": kind})
    several = "and the output; one of them is too small"
    assert several in pyggml(*told, "--device", "auto").err
    cards["b"].free = 10_000
    assert "layers: cpu: the embedding" in pyggml(*told, "--device", "auto").err


def test_weights_stream_where_they_do_not_fit(pyggml, cards, model, text, tmp_path, monkeypatch):
    """As few as memory requires, to the bytes of the CPU; a dry run says what that costs."""
    short = ("finetune", "-m", model, "-f", text, "--ctx", 16, "--prompt", "the ")
    short += ("--compute", "f32", "--grad-checkpointing", "--max-steps", 2)
    planned = plans_of(monkeypatch)
    limits(monkeypatch, read=1e6, multiply=1e6)
    card = cards["a"] = Card("a", 10_000_000)
    ended = pyggml(*short, "--device", "a", "--dry-run")
    assert ended.code == 0 and "streamed" not in ended.out
    card.free = planned[-1][0].n_bytes - 1
    ended = pyggml(*short, "--device", "a", "--dry-run")
    said = ended.row("streamed")
    assert " of 4 blocks stay in the file, " in said and " s at 20 GB/s (assumed)" in said
    assert f"; the run needs {card.free + 1:,} bytes of a, of whose " in said
    assert planned[-1][0].n_bytes <= card.free
    outputs = [tmp_path / name for name in ("cpu", "streamed", "parked")]
    for output, device in zip(outputs, ((), ("--device", "a"), ("--device", "a")), strict=True):
        if output.name == "parked":  # less than all blocks streamed take
            pyggml(*short, *device, "--stream-weights", "on", "--dry-run")
            card.free = planned[-1][0].n_bytes - 1
        ended = pyggml(*short, *device, "-o", output)
        assert ended.code == 0, ended.err
    assert "of what blocks give wait in the host's memory for the way back" in ended.out
    assert planned[-1][0].n_bytes <= card.free
    assert outputs[0].read_bytes() == outputs[1].read_bytes() == outputs[2].read_bytes()
    told = (
        "generate",
        "-m",
        model,
        "-p",
        "a",
        "-n",
        3,
        "--seed",
        1,
        "--compute",
        "f32",
        "--device",
    )
    on = pyggml(*told, "a", "--stream-weights", "on")
    assert "streamed: 4 of 4 blocks stay in the file, " in on.err
    assert on.out == pyggml(*told, "cpu").out
    full = ("--train", "full", "--dry-run")
    refused = pyggml(*short, "--device", "a", "--stream-weights", "on", *full)
    assert refused.code == 2 and "weights is on, wanted weights that never change" in refused.err


def test_auto_takes_what_fits_and_says_why(pyggml, cards, model, text, monkeypatch):
    """In training the plan of its step counts, in use that of a pass; a dry run says what a device
    holds, or that it is full."""
    short = ("-f", text, "--ctx", 16, "--prompt", "the ", "--compute", "f32", "--dry-run")
    planned = plans_of(monkeypatch)
    card = cards["a"] = Card("a", 10_000_000)
    ended = pyggml("finetune", "-m", model, *short, "--device", "a", "-ngl", "auto")
    assert ended.row("layers").endswith("blocks 0 to 3 and the output; all 5 layers fit")
    card.free = planned[0][0].n_bytes - 1
    ended = pyggml("finetune", "-m", model, *short, "--device", "a", "-ngl", "auto")
    assert ended.code == 0, ended.err
    assert "cpu: the embedding" in ended.row("layers")
    assert " of 5 layers fit; with one more the run needs " in ended.row("layers")
    card.free = planned[0][0].arena + planned[0][0].weights
    whole = ("--device", "a", "-ngl", "all", "--stream-weights", "off")
    ended = pyggml("finetune", "-m", model, *short, *whole)
    assert ended.code == 2 and f"bytes {card.free:,} are free; smaller are " in ended.err
    card.free = 150_000
    used = ("--device", "a", "-ngl", "auto", "--compute", "f32")
    ended = pyggml("generate", "-m", model, "-p", "a", "-n", 2, *used)
    assert " of 5 layers fit; with one more the model needs " in ended.err
