"""A model and texts → its importance matrix: Σ x² of the inputs of each matrix of the blocks.

A text is cut into chunks as for perplexity; of documents every token counts, learned or not, in the
windows that they fill. What the products of the graph read is watched as it is made; matrices that
share an input, such as q, k and v, have equal sums.

Source: llama.cpp, tools/imatrix/imatrix.cpp (`collect_imatrix`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from pyggml.errors import ConfigError, DataError
from pyggml.graph import Graph
from pyggml.graph.arrays import array, has_memory
from pyggml.graph.tensor import Tensor
from pyggml.lora.data import Dataset
from pyggml.lora.evaluate.perplexity import chunks_of
from pyggml.model import Model
from pyggml.models import Inputs, Net
from pyggml.models.texts import fill
from pyggml.requantize.imatrix import ImportanceMatrix, InputSums
from pyggml.runtime import Program, bind, schedule

_LEAST = 16  # tokens of a chunk; llama.cpp skips products of fewer


class Collector:
    """Sums over the chunks of some texts so far.

    n_chunks     how many chunks the texts have together
    n_left_out   tokens at the end of each that fill no chunk
    """

    def __init__(
        self,
        model: Model,
        texts: Mapping[str, str | Dataset],
        n_ctx: int = 512,
        most: int | None = None,
        parse_special: bool = False,
    ) -> None:
        """texts: by the names that the file shall have; a Dataset has windows of n_ctx tokens.
        most: so many chunks at most; parse_special: whether control tokens in a text are those.

        Raises ConfigError for a context that the model does not have; DataError for a text that is
        shorter than two contexts, and for windows none of which is full.
        """
        if not _LEAST <= n_ctx <= model.config.n_ctx:
            fault = f"is {n_ctx}, wanted {_LEAST} to the model's {model.config.n_ctx}"
            raise ConfigError([("n_ctx", fault)])
        self._names, self.n_left_out = tuple(texts), 0
        self._inputs = Inputs.empty(n_ctx)
        self._chunks: list[Callable[[], None]] = []  # each fills the inputs
        for text in texts.values():
            if isinstance(text, Dataset):
                self._chunks += self._of_windows(model, text)
            else:
                self._chunks += self._of_text(model, text, parse_special)
        self._chunks = self._chunks[:most]
        self._squares: dict[str, np.ndarray] = {}  # float64 (n_matrices, n)
        self._counts: dict[str, np.ndarray] = {}  # (n_matrices,)
        self._of_heads: set[str] = set()  # tensors with a matrix for each head
        self._program = self._watching(model)
        self.n_chunks = len(self._chunks)

    def _of_text(self, model: Model, text: str, parse: bool) -> Iterator[Callable[[], None]]:
        tokenizer, (n_ctx,) = model.tokenizer, self._inputs.tokens.shape
        bos = tokenizer.bos_id if tokenizer.add_bos else None
        ids = tokenizer.encode(text, parse_special=parse)
        self.n_left_out += len(ids) % n_ctx
        for tokens in chunks_of(model, ids, n_ctx):
            chunk = tokens if bos is None else np.concatenate([[bos], tokens[1:]])
            yield partial(fill, self._inputs, chunk)

    def _of_windows(self, model: Model, data: Dataset) -> Iterator[Callable[[], None]]:
        is_token = data.documents[:, :-1] >= 0
        full = np.flatnonzero(is_token.all(axis=1))
        n_left_out = int(is_token.sum()) - is_token[full].size
        if not len(full):
            raise DataError(
                f"the rows have {n_left_out} tokens, wanted at least {data.ctx}, a window"
            )
        self.n_left_out += n_left_out
        model.check_tokens(data.tokens.reshape(-1))
        for batch in replace(data.part(full), lengths=None).batches(range(len(full)), 1):
            yield partial(batch.fill, self._inputs)

    def _watching(self, model: Model) -> Program:
        taps = model.taps(reads=False)
        net = Net(model.parts.weights, self._inputs, model.adapters, taps=taps)
        graph = Graph.of(model.parts.decoder.hidden(net))
        users: dict[tuple[Tensor, ...], list[Tensor]] = defaultdict(list)
        for node in graph.nodes:
            if _is_product(node, model):
                users[node.src[1:]].append(node)
        groups: dict[Tensor, list[_SameInputs]] = defaultdict(list)
        for inputs, nodes in users.items():
            weights = [node.src[0] for node in nodes]
            for w in weights:
                shape = (w.shape[0] if len(w.shape) == 3 else 1, inputs[0].shape[-1])
                self._squares[w.name] = np.zeros(shape, np.float64)
                self._counts[w.name] = np.zeros(shape[0], np.int64)
            of_nodes = [t for t in inputs if t.root.op is not None]
            if len(of_nodes) < len(inputs):  # the heads' numbers are data
                self._of_heads |= {w.name for w in weights}
            group = _SameInputs(inputs, partial(self._add, [w.name for w in weights]))
            for t in of_nodes:
                groups[t].append(group)
        watched = {t: partial(_give, leaves, t) for t, leaves in groups.items()}
        return bind(schedule(graph, model.devices, watched))

    def run(self) -> Iterator[int]:
        """Add one chunk after the other; yields how many there are so far. DataError for inputs
        that are not finite."""
        for n, fill_inputs in enumerate(self._chunks, 1):
            fill_inputs()
            self._program()
            yield n

    def _add(self, names: list[str], x: np.ndarray, *ids: np.ndarray) -> None:
        """Add an input of some matrices: x (T, n); of experts x (T, U or 1, n) and ids (T, U)."""
        squares = np.square(x, dtype=np.float64)
        if not np.isfinite(squares).all():
            raise DataError(f"the input of {names[0]} is not finite, so it has no importance")
        if ids:
            added, counts = _by_expert(squares, ids[0], len(self._counts[names[0]]))
        else:
            rows = squares.reshape(-1, squares.shape[-1])
            added, counts = rows.sum(0, keepdims=True), np.array([len(rows)])
        for name in names:
            self._squares[name] += added
            self._counts[name] += counts

    def result(self, n_chunks: int) -> ImportanceMatrix:
        """The sums of the chunks so far. Heads have one count, and their columns lie in one row."""
        sums = {}
        for name, squares in self._squares.items():
            counts = self._counts[name].astype(np.float32)
            if name in self._of_heads:
                squares, counts = squares.reshape(1, -1), counts[:1]
            sums[name] = InputSums(squares.astype(np.float32), counts)
        return ImportanceMatrix(sums, self._names, n_chunks, self._inputs.n_ctx)


class _SameInputs:
    """Products with the same inputs: `add` gets these once the last of them is made."""

    def __init__(self, inputs: Sequence[Tensor], add: Callable[..., None]) -> None:
        self._inputs, self._add = inputs, add
        self._data = {t: array(t) for t in inputs if t.root.op is None and has_memory(t)}
        self._made: dict[Tensor, np.ndarray] = {}

    def take(self, t: Tensor, numbers: np.ndarray) -> None:
        self._made[t] = numbers
        arrays = self._data | self._made
        if len(arrays) == len(self._inputs):
            self._made.clear()
            self._add(*(arrays[t] for t in self._inputs))


def _give(groups: Sequence[_SameInputs], t: Tensor, numbers: np.ndarray) -> None:
    for group in groups:
        group.take(t, numbers)


def _is_product(node: Tensor, model: Model) -> bool:
    """Whether a node is a product with a matrix of a block."""
    w = node.src[0] if node.src else node
    ops = ("mul_mat", "mul_mat_id")
    of_block = w.name.startswith("blk.") and model.parts.weights.get(w.name) is w
    return node.op is not None and node.op.name in ops and of_block


def _by_expert(squares: np.ndarray, ids: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums (n, n_in) and counts (n,) of the rows that each expert reads."""
    rows = np.broadcast_to(squares, (*ids.shape, squares.shape[-1]))
    sums = np.stack([rows[ids == i].sum(0) for i in range(n)])
    return sums, np.bincount(ids.ravel(), minlength=n)
