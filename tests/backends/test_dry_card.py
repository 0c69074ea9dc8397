"""Every architecture's programs for a card, bound without one: nothing is left to the CPU."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import ranked_run
from card_patterns import patterns, sample_of
from extras import reason
from llama_models import VARIANTS, write

import pyggml
from pyggml.backends.cpu import CPU
from pyggml.generation import Session
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16
from pyggml.lora import LoraConfig, attach, loss_and_grads, train_tensors
from pyggml.lora.trainer.passes import Passes
from pyggml.models import Inputs, build
from pyggml.runtime import Devices, bind, schedule

from peers.peer import LORA_RANK
from peers.trial import wide_modules

pytest.importorskip("numba_cuda", reason=reason("numba_cuda"))

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = sorted((*GOLDEN.glob("peers/*.gguf"), *GOLDEN.glob("formulas/*.gguf")))
TOKENS = np.arange(20) * 7 % 40
pytestmark = [
    pytest.mark.filterwarnings("error:.* leaves .* to cpu"),
    pytest.mark.filterwarnings("ignore:llama.cpp passes over"),
    pytest.mark.usefixtures("without_cublas"),
]


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.stem)
def test_a_model_is_bound_whole(path):
    bind_whole(path)


@pytest.mark.parametrize("name", sorted(p.stem for p in GOLDEN.glob("llama_cpp/*.npz")))
def test_a_model_that_llama_cpp_is_asked_about_is_bound_whole(name, tmp_path):
    bind_whole(write(tmp_path / "model.gguf", *VARIANTS[name]))


@pytest.mark.parametrize("kind", ranked_run.OF_KIND)
def test_what_learns_of_a_teacher_and_of_rewards_is_bound_whole(kind, speaking):
    from dry_card import DryCard

    how = {"compute": "bf16", "backends": [DryCard()]}
    ranked_run.trainer_of(speaking, kind=kind, **how, **ranked_run.SHORT).passes.bind()


def bind_whole(path):
    """Generation over a cache, and the gradients of an adapter."""
    from dry_card import DryCard

    model = pyggml.load(path, compute="bf16", backends=[DryCard()])
    session = Session(model, len(TOKENS))
    for n in (7, 1, 12):  # a prompt, a token, more of the prompt
        session.feed(TOKENS[session.n_past : session.n_past + n])
    modules = wide_modules(model, LORA_RANK)
    loss_and_grads(attach(model, LoraConfig(rank=LORA_RANK, modules=modules)).model, TOKENS)


def test_the_card_is_current_whenever_it_is_asked(monkeypatch):
    """In a thread that has not met it, too: Numba would ask the first card, and open it."""
    from dry_card import DryCard

    from pyggml.backends.cuda.gemm import few_rows
    from pyggml.backends.cuda.runtime import early

    class Noting(DryCard):
        depth = 0

        @contextmanager
        def _working(self, n_bytes=0):
            self.depth += 1
            yield
            self.depth -= 1

    card, asked = Noting(), []

    def most_shared():
        asked.append(card.depth)
        return 99 << 10

    for module in (few_rows, early):
        monkeypatch.setattr(module, "most_shared", most_shared)
    monkeypatch.setattr(few_rows, "shared_bytes", few_rows.shared_bytes.__wrapped__)
    model = pyggml.load(GOLDEN / "models/qwen2-Q4_K_M.gguf", backends=[card])
    Session(model, 8).feed(TOKENS[:1])
    loss_and_grads(attach(model, LoraConfig(rank=4)).model, TOKENS)
    assert asked and min(asked) > 0


# Of a token after seven, and of the loss and the gradients of 20. With so few keys, dk and dv of a
# layer are summed from parts, by a launch of its own: there are more blocks than key heads.
LAUNCHES = {"qwen3-F16": (28, 278), "llama-Q8_0": (25, 254), "qwen2-Q4_K_M": (31, 260)}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_token_and_a_step_are_no_more_launches_than_they_were(name):
    from dry_card import DryCard

    from pyggml.backends.cuda.runtime.launches import steps

    class Counting(DryCard):
        def join(self, calls):
            self.n_steps = sum(1 for call in calls for _ in steps(call))
            return []

    card = Counting()
    model = pyggml.load(GOLDEN / f"models/{name}.gguf", compute="bf16", backends=[card])
    session, counts = Session(model, len(TOKENS)), []
    for n in (7, 1):
        session.feed(TOKENS[session.n_past : session.n_past + n])
    counts.append(card.n_steps)
    loss_and_grads(attach(model, LoraConfig(rank=4)).model, TOKENS)
    counts.append(card.n_steps)
    assert all(n <= most for n, most in zip(counts, LAUNCHES[name], strict=True)), counts


def test_a_card_computes_what_is_watched():
    """Norms join products and gates join their products, but what is watched stays a node."""
    from dry_card import DryCard

    card = DryCard()
    model = pyggml.load(GOLDEN / "models/qwen3-F16.gguf", compute="bf16", backends=[card])
    graph = Graph.of(build(model.parts, Inputs.empty(1)))
    products = [t for t in graph.nodes if t.op.name == "mul_mat"]
    watched = dict.fromkeys((t.src[1] for t in products), print)
    made = schedule(graph, model.devices, watched)
    assert len(watched) >= 4 * model.config.n_layer
    assert {made.place(t)[1] for t in watched} == {card}
    assert made.n_bytes <= 2 * schedule(graph, model.devices).n_bytes


def test_a_matrix_that_is_trained_is_multiplied_in_bfloat16(monkeypatch):
    """Its gradient too, which is added to its place, and units between products."""
    from dry_card import DryCard

    from pyggml.backends.cuda import rewrites
    from pyggml.backends.cuda.gemm import cublas

    for module in (cublas, rewrites):
        monkeypatch.setattr(module, "has_cublas", lambda: True)
    card = DryCard()
    monkeypatch.setattr(card, "memory", lambda: (1 << 40, 1 << 40), raising=False)
    model = pyggml.load(GOLDEN / "models/qwen3-F16.gguf", compute="bf16", backends=[card])
    trained = train_tensors(model, ["*"])
    passes = Passes(trained.model, trained.parameters, 32)
    (plan, *_) = passes.training.plans.values()
    nodes = [t for t in plan.graph.nodes if t.op is not None]
    gradients = [t for t in nodes if t.op.name == "out_prod_add" and t.is_write]
    table, tensors = "token_embd.weight", trained.parameters.tensors
    matrices = [name for name, t in tensors.items() if len(t.shape) == 2 and name != table]
    assert len(gradients) == len(matrices)
    assert {t.src[1].dtype for t in gradients} == {BF16}
    units = [t for t in nodes if t.op.name.startswith("swiglu")]
    assert units and {t.dtype for t in units} == {BF16}


@pytest.mark.parametrize("name", patterns())
def test_every_launch_of_a_pattern_has_its_arguments(name):
    """None of them is an array that the fused nodes do not have, such as queries not made yet."""
    from dry_card import DryCard

    from pyggml.backends.cuda.runtime.launches import launches

    class Noting(DryCard):
        def join(self, calls):
            noted.extend(calls)
            return []

    noted = []
    graph, _ = sample_of(name)
    bind(schedule(graph, Devices([Noting(), CPU()])))
    arguments = [one for call in noted for _, given in launches(call) for one in given]
    assert arguments and not any(one is None for one in arguments)
