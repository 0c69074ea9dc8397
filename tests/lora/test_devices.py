"""A whole run on other devices: training, resuming, evaluation and generation equal the CPU's.

The reference device knows half of the ops and rounds otherwise; the separate one knows all of them
and computes the CPU's bits, in memory of its own.
"""

import warnings
from collections import Counter

import numpy as np
import pytest
from reference_backend import ReferenceBackend
from separate_cpu import SeparateCPU

import pyggml
from pyggml.backends.cpu import CPU
from pyggml.errors import ConfigError
from pyggml.graph.op import SENT, STREAMED
from pyggml.lora import (
    LoraConfig,
    StepReport,
    TrainConfig,
    Trainer,
    attach,
    loss_and_grads,
    perplexity,
)
from pyggml.ops import OPS
from pyggml.sizes import round_up

CTX, STEPS = 12, 4
TOKENS = np.arange(19) * 7 % 48
DEVICES = {
    "half": lambda: ReferenceBackend(sorted(OPS)[::2]),
    "the other half": lambda: ReferenceBackend(sorted(OPS)[1::2]),
    "separate": SeparateCPU,
}
pytestmark = pytest.mark.filterwarnings("ignore:reference leaves")


PARKED = {"get_rows", "mul_mat_add", "scale", "rope_apply", "flash_attn_ext", "saved", "add"}


class Numbers:
    """A tokenizer of texts that are token ids in decimal."""

    bos_id, add_bos, n_vocab = 5, True, 64

    def encode(self, text, parse_special=False):
        return [int(word) for word in text.split()]

    def is_eog(self, token):
        return False

    def stream(self, shown):
        return Silent()


class Silent:
    """Tokens without a text."""

    def feed(self, token):
        return ""

    def flush(self):
        return ""


def adapter_of(path, *backends):
    model = pyggml.load(path, compute="f32", backends=backends)
    model.__dict__["tokenizer"] = Numbers()
    adapter = attach(model, LoraConfig(rank=3, alpha=5.0))
    adapter.parameters.data[:] = np.random.default_rng(3).normal(
        0, 0.1, adapter.parameters.data.size
    )
    return adapter


def trainer_of(adapter, corpus_of, **settings):
    """Accumulation, decay and clipping that acts in every step."""
    corpus = corpus_of(CTX, [70, 60, 50, 30])
    config = TrainConfig(
        compute="f32", batch=2, grad_accum=2, max_steps=STEPS, lr=1e-2, weight_decay=0.1, clip=0.05,
        val_every=2, **settings,
    )  # fmt: skip
    return Trainer(adapter.model, adapter.parameters, corpus, config)


def equal(found, wanted, device, allowed=5e-5, start=0.0):
    """Bit for bit where the device computes with the CPU's kernels, else to rounding: AdamW divides
    by gradients that are near zero, which makes it larger in the parameters."""
    if isinstance(device, SeparateCPU):
        np.testing.assert_array_equal(found, wanted)
    else:
        change = np.linalg.norm(np.subtract(wanted, start))
        assert np.linalg.norm(np.subtract(found, wanted)) <= allowed * change


@pytest.fixture(params=list(DEVICES))
def device(request):
    return DEVICES[request.param]()


def test_a_run_gives_the_cpu_s_adapter(tiny, corpus_of, device):
    mine, theirs = adapter_of(tiny, device), adapter_of(tiny)
    start = theirs.parameters.data.copy()
    events = [], []
    for adapter, seen in zip((mine, theirs), events, strict=True):
        assert trainer_of(adapter, corpus_of).run(seen.append)
    assert [type(e) for e in events[0]] == [type(e) for e in events[1]]
    losses = ([e.loss for e in seen] for seen in events)
    equal(*losses, device)
    norms = [[e.grad_norm for e in seen if isinstance(e, StepReport)] for seen in events]
    assert min(norms[1]) > 0.05
    equal(*norms, device)
    equal(mine.parameters.data, theirs.parameters.data, device, 5e-4, start)
    for moment in ("m", "v"):
        equal(getattr(mine.parameters, moment), getattr(theirs.parameters, moment), device, 5e-4)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("remade", "there_and_back"),
    [(False, {"0": 11, "1": 13, "2": 7}), (True, {"0": 14, "1": 14, "2": 7})],
    ids=["kept", "made again"],
)
def test_a_run_whose_weights_stream_gives_the_cpu_s_adapter(
    tiny, corpus_of, remade, there_and_back
):
    """The last block turns at once; nothing before the first one's values wants a gradient."""
    device = SeparateCPU()
    mine, theirs = adapter_of(tiny, device), adapter_of(tiny)
    mine.model.stream(3)
    trainer = trainer_of(mine, corpus_of, grad_checkpointing=remade)
    assert trainer.run()
    assert trainer_of(theirs, corpus_of, grad_checkpointing=remade).run()
    np.testing.assert_array_equal(mine.parameters.data, theirs.parameters.data)
    (plan,) = trainer.passes.training.plans.values()
    streamed = [t.params["leaf"].name for t in plan.graph.nodes if t.op is STREAMED]
    assert Counter(name.split(".")[1] for name in streamed) == there_and_back
    assert not {leaf.name for part in trainer.passes.parts for leaf in part.leaves} & {*streamed}


@pytest.mark.parametrize(("remade", "parked"), [(True, {"get_rows"}), (False, PARKED)])
def test_what_is_read_late_waits_with_the_host(tiny, corpus_of, remade, parked):
    """What blocks give, and without checkpointing what their kernels save too. The second block's
    are read again too soon. No bit changes."""
    device = SeparateCPU()
    mine, theirs = adapter_of(tiny, device), adapter_of(tiny)
    mine.model.stream(3)
    mine.model.devices.parked = 1 << 30
    trainer = trainer_of(mine, corpus_of, grad_checkpointing=remade)
    assert trainer.run()
    assert trainer_of(theirs, corpus_of, grad_checkpointing=remade).run()
    (plan,) = trainer.passes.training.plans.values()
    assert {t.src[0].op.name for t in plan.graph.nodes if t.op is SENT} == parked
    np.testing.assert_array_equal(mine.parameters.data, theirs.parameters.data)


def test_a_run_may_go_on_on_another_device(tiny, corpus_of, device, tmp_path):
    whole, first, second = adapter_of(tiny), adapter_of(tiny, device), adapter_of(tiny)
    start = whole.parameters.data.copy()
    trainer_of(whole, corpus_of).run()
    settings = {"checkpoint_dir": str(tmp_path), "checkpoint_every": 2}
    stopped = trainer_of(first, corpus_of, **settings)
    stopped.run(lambda e: stopped.stop() if getattr(e, "step", 0) == 2 else None)
    assert stopped.progress.step == 2
    for on, adapter in (("cpu", second), ("device", adapter_of(tiny, device))):
        resumed = trainer_of(adapter, corpus_of, checkpoint_dir=str(tmp_path / on))
        resumed.resume(tmp_path / "step-00000002.gguf")
        resumed.run()
        equal(adapter.parameters.data, whole.parameters.data, device, 5e-4, start)


def test_an_adapter_saved_by_a_callback_has_the_numbers_of_its_step(tiny, corpus_of, tmp_path):
    files = []
    for device in ([SeparateCPU()], []):
        adapter, path = adapter_of(tiny, *device), tmp_path / f"{len(files)}.gguf"

        def save(report, adapter=adapter, path=path):
            if isinstance(report, StepReport) and report.step == 2:
                adapter.save(path)

        trainer_of(adapter, corpus_of).run(save, progress=False)
        files.append(path.read_bytes())
    assert files[0] == files[1]


def test_what_a_trained_adapter_computes(tiny, corpus_of, device):
    mine, theirs = adapter_of(tiny, device), adapter_of(tiny)
    for adapter in (mine, theirs):
        trainer_of(adapter, corpus_of).run()
    mine.parameters.data[:] = theirs.parameters.data  # between runs the host's numbers count
    text = " ".join(map(str, np.arange(40) * 5 % 48))
    for compute in (
        lambda a: a.model.logits(TOKENS),
        lambda a: [p.value for p in perplexity(a.model, text, CTX)],
        lambda a: list(pyggml.generate(a.model, TOKENS, 9)),
        lambda a: np.concatenate([g.ravel() for g in loss_and_grads(a.model, TOKENS)[1].values()]),
    ):
        equal(compute(mine), compute(theirs), device, 1e-5)


def test_on_a_device_that_can_do_all_the_host_reads_losses_alone(tiny, corpus_of):
    device = SeparateCPU()
    adapter = adapter_of(tiny, device)
    trainer = trainer_of(adapter, corpus_of)
    seen = []

    def report(event):
        if isinstance(event, StepReport):
            seen.append((device.moved.copy(), device.launches))

    trainer.run(report)
    (before, launches), (after, later) = seen[:2]
    passes = 2
    # Bytes of ids, positions, spans, lengths; of targets and their weights.
    batch, targets = ([2 * CTX * n for n in sizes] for sizes in ((4, 4, 8, 4), (4, 4)))
    together = {(sum(round_up(n, 64) for n in part),): passes for part in (batch, targets)}
    written = {**together, (): passes, (7,): 1}  # inputs, each part in one copy; seed; settings
    read = {(): 2 * passes, (1,): 1}  # loss and right tokens, the gradient's length
    assert after - before == Counter(
        {("written", shape): times for shape, times in written.items()}
        | {("read", shape): times for shape, times in read.items()}
    )
    sums = 2 * passes  # add and zero after each batch but the last; the sum's own zero and its end
    assert later - launches == passes + 3 + sums, "zero, clip and update are a launch each"
    shapes = Counter(w.shape for w in trainer.model.parts.weights.values())
    assert {shape: before["written", shape] for shape in shapes} == shapes, "each weight once"


def test_what_a_device_lacks_is_said_once(tiny):
    device = ReferenceBackend(set(OPS) - {"rms_norm_mul", "mul_mat_add"})
    model = adapter_of(tiny, device).model
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.logits(TOKENS)
        model.logits(TOKENS[:5])
    (only,) = found
    assert str(only.message).startswith("reference leaves ")
    assert "mul_mat_add" in str(only.message) and "rms_norm_mul" in str(only.message)
    assert str(only.message).endswith(" to cpu")


def test_the_cpu_is_not_one_of_the_backends(tiny):
    with pytest.raises(ConfigError, match="backends has a CPU"):
        pyggml.load(tiny, backends=[CPU()])


@pytest.mark.parametrize("n_devices", [1, 2])
def test_devices_that_are_alike_rewrite_the_whole_graph_as_one(tiny, n_devices):
    """With the loss, after which the backward pass begins."""
    seen = []

    class Noting(SeparateCPU):
        def rewritten(self, graph):
            seen.append("loss" in graph.names)
            return graph

    model = pyggml.load(tiny, backends=[Noting() for _ in range(n_devices)])
    model.place(99)
    loss_and_grads(attach(model, LoraConfig(rank=2)).model, TOKENS)
    assert seen == [True]
