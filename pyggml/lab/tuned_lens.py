"""The tuned lens: what every block would predict, after an affine map that was trained for it.

    training = train_tuned_lens(model, Path("text.txt"))
    print(training)                            # how far each block's prediction is from the last
    training.lens.save("lens.gguf")
    print(lens_table(model, ids, TunedLens.read("lens.gguf")))

The map of block i takes its stream h to h + W_i·h + b_i, which the last norm and the output matrix
read. W and b start at 0, where it is the logit lens, and lower the divergence KL(p ‖ q_i) of what
the model predicts, p, from what the lens does, q_i (Belrose et al. 2023). The last block needs no
map.

general.architecture     "tunedlens"
tunedlens.model_hint     the model's architecture; tunedlens.layer_count  how many maps
translator.3.weight      F32 (n_embd, n_embd), W of blk.3.out; translator.3.bias  F32 (n_embd,)
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from pyggml import gguf
from pyggml.eager.optim import AdamW
from pyggml.errors import ConfigError, DataError, GGUFError, first_of
from pyggml.gguf.fields import brief
from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Tensor, zeros
from pyggml.lab.linear import exact
from pyggml.lab.passages import Passage, Text, activations_of, whole_windows
from pyggml.look.lens import predict_from
from pyggml.model import Model
from pyggml.ops import add, cross_entropy_loss, mul_mat
from pyggml.runtime import Arenas, Program, bind, schedule

_KIND = "tunedlens"
_NAME = re.compile(r"translator\.([0-9]|[1-9][0-9]{1,5})\.(weight|bias)")
Report = Callable[[int, float], object]  # steps done, mean divergence of the last one


@dataclass(frozen=True, slots=True, eq=False)
class TunedLens:
    """Maps by block: W (n_embd, n_embd) and b (n_embd,), float32.

    architecture  of the model that they were trained on; "" if a file does not say
    """

    weights: Mapping[int, np.ndarray]
    biases: Mapping[int, np.ndarray]
    architecture: str = ""

    def translate(self, block: int, stream: np.ndarray) -> np.ndarray:
        """The stream after a block (T, n_embd) as the last norm is to read it; of a block without a
        map, as it is."""
        if block not in self.weights:
            return stream
        return np.asarray(stream + stream @ self.weights[block].T + self.biases[block], np.float32)

    def check(self, model: Model) -> None:
        """ConfigError for maps that do not fit a model."""
        c = model.config
        if beyond := [i for i in self.weights if i >= c.n_layer]:
            raise ConfigError(f"tuned lens: it has a map of block {beyond[0]} of {c.n_layer}")
        if sizes := {w.shape[0] for w in self.weights.values()} - {c.n_embd}:
            raise ConfigError(
                f"tuned lens: its maps are of {min(sizes)} numbers, wanted the model's {c.n_embd}"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a GGUF file. PyggmlError if the disk refuses."""
        metadata = {
            "general.architecture": _KIND,
            f"{_KIND}.model_hint": self.architecture,
            f"{_KIND}.layer_count": np.int32(len(self.weights)),
        }
        tensors: list[gguf.TensorSource] = []
        for i, w in sorted(self.weights.items()):
            b = self.biases[i]
            tensors.append((f"translator.{i}.weight", F32, w.shape, w))
            tensors.append((f"translator.{i}.bias", F32, b.shape, b))
        gguf.write(path, metadata, tensors)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> TunedLens:
        """The lens in a file. GGUFError, naming the faults, for another kind of file, and for maps
        that are not F32, finite, whole and of one size."""
        with gguf.open(path) as file:
            kind, hint = file.word("general.architecture"), file.word(f"{_KIND}.model_hint")
            if kind != _KIND:
                raise GGUFError(f"{path}: general.architecture is {kind!r}, wanted {_KIND!r}")
            if faults := _faults(file):
                raise GGUFError(f"{path}: {first_of(faults, 5)}")
            parts: dict[str, dict[int, np.ndarray]] = {"weight": {}, "bias": {}}
            for name in file.tensors:
                _, block, part = name.split(".")
                parts[part][int(block)] = np.array(file.data(name), np.float32)
        return cls(parts["weight"], parts["bias"], hint)


def _faults(file: gguf.GGUFFile) -> list[str]:
    """What is wrong with the tensors of a file."""
    faults, sizes = [], set()
    for info in file.tensors.values():
        name = _NAME.fullmatch(info.name)
        if not name:
            faults.append(f"tensor {brief(info.name)}, wanted translator.0.weight and so on")
            continue
        n = info.shape[-1] if info.shape else 0
        shape = (n, n) if name[2] == "weight" else (n,)
        sizes.add(n)
        if info.dtype is not F32 or info.shape != shape:
            faults.append(f"{info.name} is {info.dtype}{list(info.shape)}, wanted F32{list(shape)}")
        elif not np.isfinite(file.data(info.name)).all():
            faults.append(f"{info.name} is not finite")
        other = f"translator.{name[1]}.{'bias' if name[2] == 'weight' else 'weight'}"
        if other not in file.tensors:
            faults.append(f"there is {info.name} and no {other}")
    if not file.tensors:
        faults.append("there are no maps")
    elif len(sizes) > 1 and not faults:
        faults.append(f"maps of {len(sizes)} sizes, wanted one")
    return faults


# -- training --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LensTraining:
    """A tuned lens, and what training did.

    before, after  (n_blocks − 1,) float64: KL(p ‖ q) of each block but the last, in nats a token,
                   the mean over the windows that were held out: of the logit and the tuned lens
    losses         (n_steps,) float64: the mean over the blocks of each window that was learned
    """

    lens: TunedLens
    before: np.ndarray
    after: np.ndarray
    losses: np.ndarray

    def __str__(self) -> str:
        rows = [
            f"blk.{i:<6}  {before:10.3f}  {after:10.3f}"
            for i, (before, after) in enumerate(zip(self.before, self.after, strict=True))
        ]
        return "\n".join(["KL, nats    logit lens  tuned lens", *rows])


def train_tuned_lens(
    model: Model,
    text: Text,
    n_steps: int = 300,
    *,
    n_window: int = 128,
    n_held_out: int = 8,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    report: Report | None = None,
) -> LensTraining:
    """Train a map for each block but the last, by AdamW, a window of a text (`windows_of`) a step.

    The first n_held_out windows measure, the others are learned, over again where the text ends;
    the learning rate falls to 0. Nothing is drawn, so that a run repeats bit for bit. All blocks
    learn from one pass of the model, and share the memory of their graphs: about
    5 · n_window · n_vocab float32.

    Raises ConfigError for settings out of range, for a model of one block, or whose stream is
    several vectors; DataError for a text that has too few whole windows.
    """
    model, c = exact(model), model.config
    if n_steps < 1 or n_held_out < 1 or not 0 < lr < np.inf:
        raise ConfigError(f"n_steps is {n_steps}, n_held_out {n_held_out} and lr {lr}, wanted 1 or "
                          "more, and above 0")  # fmt: skip
    if c.n_layer < 2:
        raise ConfigError("the model has one block, wanted two: the last needs no map")
    held = [*islice(whole_windows(model, text, n_window), n_held_out)]
    if len(held) < n_held_out:
        raise DataError(f"the text has {len(held)} windows of {n_window} tokens, wanted more than "
                        f"the {n_held_out} held out")  # fmt: skip
    maps = _Maps(model, n_window, lr, weight_decay)
    before, losses = maps.measure(held), []
    windows = islice(_learning_windows(model, text, n_window, n_held_out), n_steps)
    for step, passage in enumerate(activations_of(model, windows, *maps.reads)):
        losses.append(maps.step(passage, lr * (1 - step / n_steps)))
        if report is not None:
            report(step + 1, losses[-1])
    return LensTraining(maps.lens(), before, maps.measure(held), np.array(losses))


def _learning_windows(
    model: Model, text: Text, n_window: int, n_held_out: int
) -> Iterator[np.ndarray]:
    """The whole windows after those held out, again and again."""
    while True:
        empty = True
        for window in islice(whole_windows(model, text, n_window), n_held_out, None):
            empty = False
            yield window
        if empty:
            raise DataError(
                f"the text has no window of {n_window} tokens beside the {n_held_out} held out"
            )


class _Maps:
    """The maps of all blocks while they are trained: leaves of one graph each, which read the same
    stream and the same predictions p."""

    def __init__(self, model: Model, n_window: int, lr: float, weight_decay: float) -> None:
        c = model.config
        self.model, self.blocks = model, range(c.n_layer - 1)
        self.reads = [*(f"blk.{i}.out" for i in self.blocks), "logits"]
        self.stream, self.p = zeros((n_window, c.n_embd)), zeros((n_window, c.n_vocab))
        self.w = [zeros((c.n_embd, c.n_embd), F32, f"translator.{i}.weight") for i in self.blocks]
        self.b = [zeros((c.n_embd,), F32, f"translator.{i}.bias") for i in self.blocks]
        arenas, losses = Arenas(), [*map(self._loss, self.w, self.b)]
        self.optimisers = [
            AdamW([w, b], lr, (0.9, 0.999), 1e-8, weight_decay, loss, model.devices, arenas)
            for w, b, loss in zip(self.w, self.b, losses, strict=True)
        ]
        self.forward = [
            (loss, bind(schedule(Graph.of(loss), model.devices), arenas=arenas)) for loss in losses
        ]

    def _loss(self, w: Tensor, b: Tensor) -> Tensor:
        """The cross entropy of p and the lens, the mean over tokens."""
        moved = add(add(self.stream, mul_mat(w, self.stream)), b)
        return cross_entropy_loss(predict_from(self.model, moved), self.p)

    def step(self, passage: Passage, lr: float) -> float:
        """Learn from one window; the mean divergence of all blocks before it."""
        return float(np.mean([*self._each(passage, lambda i: self._update(i, lr))]))

    def measure(self, windows: list[np.ndarray]) -> np.ndarray:
        """(n_blocks − 1,): the mean divergence of each block."""
        read = activations_of(self.model, windows, *self.reads)
        return np.mean([[*self._each(p, lambda i: _run(*self.forward[i]))] for p in read], axis=0)

    def _each(self, passage: Passage, loss: Callable[[int], float]) -> Iterator[float]:
        """The divergence of each block, given what runs its cross entropy."""
        arrays = passage[1]
        entropy = self._write_predictions(arrays["logits"])
        for i, name in enumerate(self.reads[:-1]):
            if arrays[name].shape != self.stream.shape:
                raise ConfigError("the model's residual stream is several vectors, wanted one")
            write(self.stream, arrays[name])
            yield loss(i) - entropy

    def _write_predictions(self, logits: np.ndarray) -> float:
        """Give p to the graphs; the mean of its entropy over tokens."""
        logits -= logits.max(axis=-1, keepdims=True)
        p = np.exp(logits)
        total = p.sum(axis=-1, keepdims=True)
        p /= total
        write(self.p, p)
        logits -= np.log(total)
        return -float(np.einsum("tv,tv->t", p, logits).mean(dtype=np.float64))

    def _update(self, i: int, lr: float) -> float:
        self.optimisers[i].lr = lr
        loss = self.optimisers[i].step()
        assert loss is not None
        return loss

    def lens(self) -> TunedLens:
        weights, biases = (
            {i: self.optimisers[i].program.read(t).copy() for i, t in enumerate(tensors)}
            for tensors in (self.w, self.b)
        )
        return TunedLens(weights, biases, self.model.config.architecture)


def _run(loss: Tensor, program: Program) -> float:
    program()
    return float(program.read(loss))
