"""A model as a teacher: its distributions over the student's tokens, window by window.

A window is scored by itself, whatever batch it is in, and its logits are made for some positions at
a time. So the numbers depend on nothing else, and a resumed run finds the same ones.
"""

from collections.abc import Sequence

import numpy as np

from pyggml.errors import NotFiniteError
from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.tensor import Tensor, zeros
from pyggml.lora.data import Dataset, WindowBatch
from pyggml.lora.teacher.distributions import Distributions
from pyggml.model import Model
from pyggml.models import Inputs, Net
from pyggml.ops import cont, cross_entropy_by_row, get_rows, narrow, reshape, scale, soft_max, top_k
from pyggml.ops.loss.head import rows_within
from pyggml.runtime import Program

_LOGITS_BYTES = 20 << 20  # that exist at once


class TeacherModel:
    """The graphs of a model's distributions.

    lengths       in which windows are computed, ascending; the last is a window's whole one
    n_vocab       the student's rows of logits: of more the first ones count
    k             tokens of a distribution, at most all
    temperature   that divides the logits
    """

    def __init__(
        self, model: Model, lengths: Sequence[int], n_vocab: int, k: int, temperature: float
    ) -> None:
        ctx, parts = lengths[-1], model.parts
        n_vocab = min(n_vocab, parts.config.n_vocab)
        self.k, self._lengths = min(k, n_vocab), tuple(lengths)
        self._has_others = k < n_vocab
        self._inputs = {n: Inputs.empty(n, ctx) for n in lengths}
        forward = [_hidden(model, inputs) for inputs in self._inputs.values()]
        self._hidden = zeros((ctx, parts.config.n_embd), F32, "hidden states of the teacher")
        n_rows = rows_within(ctx, F32.block_bytes * parts.config.n_vocab, _LOGITS_BYTES)
        self._rows = zeros((n_rows,), I32, "scored rows")
        self._targets = zeros((n_rows,), I32, "scored tokens")
        self._ones = zeros((n_rows,), F32, "weights of the scored tokens")
        write(self._ones, np.ones(n_rows, np.float32))
        net = Net(parts.weights, self._inputs[ctx], model.adapters)
        net.logits_of = self._rows
        logits = parts.decoder.logits(net, get_rows(self._hidden, self._rows))
        if n_vocab < logits.shape[1]:
            logits = cont(narrow(logits, 1, 0, n_vocab))
        self.graphs: tuple[Graph, ...] = (*forward, self._head(net, logits, temperature))

    def _head(self, net: Net, logits: Tensor, temperature: float) -> Graph:
        if temperature != 1:
            logits = scale(logits, 1 / temperature)
        ids, p = top_k(logits, self.k), soft_max(logits)
        probs = reshape(get_rows(reshape(p, (*p.shape, 1)), ids), ids.shape)
        nll = cross_entropy_by_row(logits, self._targets, self._ones)
        return net.graph(ids=ids, probs=probs, nll=nll)

    def distributions(
        self, programs: Sequence[Program], data: Dataset, window: int
    ) -> Distributions:
        """As `Teacher` has it."""
        part = data.part(np.array([window]))
        (batch,) = part.batches([0], 1)
        positions = np.flatnonzero(part.targets()[0]).astype(np.int32)
        self._compute_hidden(programs, batch)
        return self._scores(programs[-1], positions, batch.targets[positions])

    def _compute_hidden(self, programs: Sequence[Program], batch: WindowBatch) -> None:
        n = len(batch.tokens)
        program = programs[self._lengths.index(n)]
        batch.fill(self._inputs[n])
        program()
        hidden = np.zeros(self._hidden.shape, np.float32)
        hidden[:n] = program.read(program.schedule.graph["hidden"])
        write(self._hidden, hidden)

    def _scores(self, head: Program, positions: np.ndarray, targets: np.ndarray) -> Distributions:
        (n_rows,), graph, parts = self._rows.shape, head.schedule.graph, []
        for first in range(0, len(positions), n_rows):
            part = slice(first, first + n_rows)
            write(self._rows, np.resize(positions[part], n_rows))
            write(self._targets, np.resize(targets[part], n_rows))
            head()
            n = len(positions[part])
            ids, probs, nll = (head.read(graph[name])[:n] for name in ("ids", "probs", "nll"))
            parts.append(
                Distributions.of((ids, probs), (targets[part], np.exp(-nll)), self._has_others)
            )
        ids = np.concatenate([p.ids for p in parts])
        log_probs = np.concatenate([p.log_probs for p in parts])
        if np.isnan(log_probs).any():
            raise NotFiniteError("the teacher's weights make no numbers")
        return Distributions(ids, log_probs)


def _hidden(model: Model, inputs: Inputs) -> Graph:
    net = Net(model.parts.weights, inputs, model.adapters, taps=model.taps(reads=False))
    return net.graph(hidden=model.parts.decoder.hidden(net))
