"""Model: an open GGUF file, ready to compute logits and to be fine-tuned."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property, partial
from typing import Any, Literal, overload

import numpy as np

from pyggml import gguf, tokenizer
from pyggml.backends import Backend
from pyggml.errors import (
    ConfigError,
    DataError,
    NotFiniteError,
    TokenizerError,
    first_names,
    suggestion,
)
from pyggml.gguf.fields import brief
from pyggml.graph import Graph
from pyggml.graph.tensor import Tensor
from pyggml.kernels.kernel import Compute
from pyggml.models import Inputs, LoraPairs, Net, Parts, Taps, Trace, build, read, record
from pyggml.models.adapter import AdapterFile, Path, read_weighted
from pyggml.models.batch_rows import BatchRows, by_text
from pyggml.models.edits import Terms, Whole, edits, repeat_edit
from pyggml.models.embedder import Embedder
from pyggml.models.low_rank import tensors_of_adapters
from pyggml.models.metric import (
    Gradients,
    Metric,
    NotMade,
    choose,
    gradients_by_text,
    gradients_in,
    metric_graph,
    metric_values,
    metrics_of,
    texts_of,
)
from pyggml.models.on_devices import ModelOnDevices
from pyggml.models.stack import FilePairs, doubts
from pyggml.models.sweep import Opening, Place, Sweep, SweepPass, copies_of_a_pass
from pyggml.models.taps import AnyEdit, Edit, check_layers, check_names, fits
from pyggml.models.texts import Ids, check_ids, inputs_of, is_several
from pyggml.models.weights import warn_of_zeros
from pyggml.runtime import Arenas, Program, bind, results, schedule
from pyggml.runtime.choice import backends_of

COMPUTE_TYPES: tuple[Compute | Literal["auto"], ...] = ("auto", "int8", "bf16", "f32")


class Model(ModelOnDevices):
    """An open model, with its weights quantised and mapped. `pyggml.load` makes one.

    `adapters` are the low-rank updates in its graphs. They never change: `with_adapters` gives
    another model over the same weights.
    """

    def __init__(
        self,
        file: gguf.GGUFFile,
        parts: Parts,
        compute: Compute | Literal["auto"],
        backends: Sequence[Backend] = (),
    ) -> None:
        super().__init__(parts, compute, backends)
        self.file = file
        self.traces: tuple[Trace, ...] = ()  # that are on, the outermost first
        self._said_rounding = False

    def with_adapters(self, *adapters: LoraPairs) -> Model:
        """A model over the same weights, not copied, with these updates instead; none: the base."""
        model = copy(self)  # with the tokenizer, if that is built already
        model.adapters, model.traces = adapters, ()
        return model

    def with_added(self, add: Terms) -> Model:
        """A model over the same weights and adapters that adds these to its activations in all that
        it runs, such as a control vector's `addends`. Raises as `trace(add=…)` does."""
        model = copy(self)
        model.traces = (*self.traces, self._checked(Trace((), edits(add=add))))
        return model

    def with_adapter_files(self, *given: AdapterFile) -> Model:
        """The same with the updates of these files. Raises AdapterError as `load` does."""
        adapters = [read_weighted(one, self.parts) for one in given]
        for doubt in doubts(adapters, self.file):
            warnings.warn(doubt, RuntimeWarning, stacklevel=3)
        self.devices.hold(*(t for pairs in adapters for p in pairs.values() for t in (p.a, p.b)))
        return self.with_adapters(*adapters)

    def __repr__(self) -> str:
        weights, c = self.parts.weights.values(), self.config
        sizes: Counter[str] = Counter()
        for w in weights:
            sizes[w.dtype.name] += w.n_bytes
        n, types = (
            sum(w.n_elements for w in weights),
            " and ".join(t for t, _ in sizes.most_common(2)),
        )
        name = brief(str(self.file.get("general.name", self.file.path.name)))
        adapters = f", {len(self.adapters)} adapter{'s' * (len(self.adapters) > 1)}"
        return (
            f"<Model {name}: {c.architecture}, {c.n_layer} blocks, {n:,} parameters, {types}, "
            f"context {c.n_ctx}{adapters if self.adapters else ''}>"
        )

    @cached_property
    def tokenizer(self) -> tokenizer.Tokenizer:
        """The tokenizer of the file's own vocabulary, built at its first use.

        Raises TokenizerError if the file has none, or if tokens and rows of the embedding differ in
        number.
        """
        vocabulary = tokenizer.from_gguf(self.file)
        if vocabulary.n_vocab != self.config.n_vocab:
            raise TokenizerError(
                f"{self.file.path}: the vocabulary has {vocabulary.n_vocab} tokens, wanted "
                f"{self.config.n_vocab}, the rows of token_embd.weight"
            )
        return vocabulary

    @overload
    def logits(self, tokens: Ids) -> np.ndarray: ...

    @overload
    def logits(self, tokens: Sequence[Ids]) -> list[np.ndarray]: ...

    def logits(self, tokens: Ids | Sequence[Ids]) -> np.ndarray | list[np.ndarray]:
        """Logits float32 (n_tokens, n_vocab) of a text from its start; of a list of texts, a list.

        Several texts, of any lengths, share one pass. Raises DataError if there are no tokens, more
        than the model's context, or one outside the vocabulary; and if a logit is NaN or infinite.
        """
        inputs, taps = self._inputs(tokens), self.taps()
        self.note_rounding()
        out = build(self.parts, inputs, self.adapters, taps=taps)
        program = self.program(out, taps)
        program()
        values = {name: program.read(t) for name, t in taps.read.items()} if taps else {}
        record(self.traces, by_text(inputs.batch, values))
        logits = program.read(out)
        greatest = logits.max()  # NaN if any is
        if self.edited and not np.isfinite(greatest):
            self.with_adapters(*self.adapters).logits(tokens)  # raises if those are none either
        check_greatest(greatest, self.edited)
        return logits if inputs.batch is None else inputs.batch.arrays("logits", logits)

    def embedder(self, pooling: str | None = None, normalise: bool = True) -> Embedder:
        """What embeds texts, given by their tokens, as `embed` does: for many calls."""

        def bind(out: Tensor, arenas: Arenas) -> Program:
            return self.program(out, arenas=arenas)

        taps = partial(self.taps, reads=False)
        files = (pairs for pairs in self.adapters[::-1] if isinstance(pairs, FilePairs))
        learned = next((pairs.pooling for pairs in files if pairs.pooling), None)
        pooling = learned if pooling is None else pooling
        return Embedder(self.parts, self.adapters, bind, taps, pooling, normalise)

    def embed(
        self,
        texts: Sequence[str | Ids],
        pooling: str | None = None,
        normalise: bool = True,
    ) -> np.ndarray | list[np.ndarray]:
        """The embeddings of texts, strings or tokens: float32 (n_texts, n_embd).

        pooling     "mean", "cls", "last"; None: as an adapter learned or the file says, else "last"
                    of a causal model, "mean" of others. "none": a list of arrays (tokens, n_embd)
        normalise   vectors have the length 1

        Raises ConfigError for another pooling, DataError for a text without tokens or of more than
        the model's context.
        """
        if isinstance(texts, str):
            raise DataError("texts is one string, wanted a list of texts")
        ids = [
            self.tokenizer.encode(text, parse_special=True) if isinstance(text, str) else text
            for text in texts
        ]
        vectors = self.embedder(pooling, normalise)(ids)
        if pooling == "none" or not vectors:
            return vectors
        return np.stack(vectors)

    def rerank(self, query: str, documents: Sequence[str]) -> np.ndarray:
        """How well each document answers a question, float32 (n,): the first output of the model's
        classifier. Raises ConfigError for a model without, and DataError as `embed`."""
        pairs = [self.tokenizer.encode_pair(query, document) for document in documents]
        return np.array([scores[0] for scores in self.embedder("rank")(pairs)], np.float32)

    @overload
    def grad(self, metric: Metric, tokens: Ids, *names: str) -> Gradients: ...

    @overload
    def grad(
        self, metric: Metric | Sequence[Metric], tokens: Sequence[Ids], *names: str
    ) -> list[Gradients]: ...

    def grad(
        self, metric: Metric | Sequence[Metric], tokens: Ids | Sequence[Ids], *names: str
    ) -> Gradients | list[Gradients]:
        """The gradient of any number that is made of the activations of a text.

        metric   a function of them, t["logits"][-1, 5] - t["logits"][-1, 7], that gives one number
        tokens   a text; or a list of texts, which share one pass, with a metric of each or one for
                 all: it gets the activations of one text
        names    what it is differentiated by, with * and ?: activations ("blk.*.out"), tensors of
                 the adapter ("blk.0.attn_q.weight.lora_a"), weights ("blk.0.attn_q.weight"), of
                 whatever type; of several texts, activations alone

        All is exact as far as products are: not as training, it rounds nothing beside them. Raises
        DataError for tokens as `logits` does, ConfigError for names that are none, ShapeError for a
        metric that is no number, and NoGradientError, naming what lacks one, for what the metric
        does not depend on and for ops whose gradient has no rule.
        """
        if not names:
            raise ConfigError("grad takes names to differentiate by, such as 'blk.*.out'")
        inputs = self._inputs(tokens)
        self.note_rounding()
        read = [pattern for trace in self.traces for pattern in trace.patterns]
        metrics = metrics_of(metric, inputs.batch)
        graph, values = self._metric_graph(metrics, inputs, names, read)
        arrays = dict(zip(graph.names, results(graph, self.devices), strict=True))
        by = gradients_in(arrays)
        at = {name: arrays[name] for name in values if name in by}
        of_values = {name: g for name, g in by.items() if name in values}
        read_too = {name: arrays[name] for name in values}
        record(self.traces, *(by_text(inputs.batch, each) for each in (read_too, of_values)))
        if inputs.batch is not None:
            return gradients_by_text(arrays, inputs.batch)
        return Gradients(float(arrays["loss"]), at, by)

    def _metric_graph(
        self,
        metrics: Sequence[Metric],
        inputs: Inputs,
        names: Sequence[str],
        read: Sequence[str] = (),
        edits: Callable[[], Sequence[AnyEdit]] | None = None,
    ) -> tuple[Graph, list[str]]:
        """The graph of `metric_graph`, of what names and `read` stand for, or without names of the
        metrics alone; and the activations that are read. edits: makes those of a graph; by default
        what traces change."""
        asked = [*names, *read]
        while True:
            taps = Taps(asked, edits() if edits else self._edits, every=True)
            build(self.parts, inputs, self.adapters, taps=taps)
            texts = texts_of(taps, inputs.batch)
            try:
                if not names:
                    return metric_values(metrics, texts), []
                by = self._wanted(names, taps, inputs.batch)
                reads = {n: t for n, t in taps.read.items() if n in by or fits(n, read)}
                return metric_graph(metrics, texts, by, reads), [*reads]
            except NotMade as missing:
                asked += missing.args

    def sweep(
        self,
        metric: Metric | Sequence[Metric],
        tokens: Ids | Sequence[Ids],
        *patterns: str,
        by: str | Sequence[str] = (),
        n_cells: int | None = None,
    ) -> Sweep:
        """A metric of many small changes of the model, by one program that is bound once.

        metric     as `grad` has it; without `by` it may give an array of any shape
        tokens     a text, or a list of texts, of which each result is a list
        patterns   names of the activations that cells may change, with * and ?
        by         names of activations to differentiate by: results are `Gradients`
        n_cells    the most that share a pass; None: as many as have 512 tokens, if memory allows

        It is called with cells: see pyggml.models.sweep. Traces that are on now change the model
        for all cells, and read nothing. Raises ConfigError for patterns that name nothing, and for
        tokens as `logits` does.
        """
        texts: list[Any] = [*tokens] if is_several(tokens) else [tokens]
        batch, model = self._inputs(texts).batch, copy(self)
        assert batch is not None
        if not patterns:
            raise ConfigError("sweep takes names of what cells change, such as 'blk.*.out'")
        if n_cells is not None and n_cells < 1:
            raise ConfigError(f"n_cells is {n_cells}, wanted 1 or more")
        check_names(patterns, activations := self.activations)
        self.note_rounding(*patterns)
        metrics = metrics_of(metric, batch if is_several(tokens) else None)
        names = [name for name in activations if fits(name, patterns)]
        most = copies_of_a_pass(sum(batch.lengths), self.config.n_vocab)
        by = (by,) if isinstance(by, str) else tuple(by)

        def bind_copies(n: int) -> SweepPass:
            return model._sweep_pass(metrics, texts, patterns, by, n)

        n_texts = len(texts) if is_several(tokens) else None
        return Sweep(bind_copies, names, n_cells or most, n_texts)

    def _sweep_pass(
        self,
        metrics: Sequence[Metric],
        texts: Sequence[Any],
        patterns: Sequence[str],
        by: Sequence[str],
        n_copies: int,
    ) -> SweepPass:
        """The pass of a sweep over so many copies of its texts."""
        inputs, places = self._inputs([*texts] * n_copies, checks=False), dict[str, Place]()
        traced = [repeat_edit(edit, len(texts), n_copies) for edit in self._edits]

        def edits() -> list[AnyEdit]:
            places.clear()
            return [*traced, *(Opening(pattern, places) for pattern in patterns)]

        graph, _ = self._metric_graph([*metrics] * n_copies, inputs, by, edits=edits)
        program = bind(schedule(graph, self.devices), self.release)
        assert inputs.batch is not None
        return SweepPass(program, inputs.batch, len(texts), places)

    def _wanted(
        self, names: Sequence[str], taps: Taps, batch: BatchRows | None
    ) -> dict[str, Tensor]:
        """What names stand for, to differentiate by."""
        of_adapters = tensors_of_adapters(self.adapters) if ".lora_" in "".join(names) else {}
        tensors = choose(names, taps.read, of_adapters, self.parts.weights)
        if batch is not None and (shared := [name for name in tensors if name not in taps.read]):
            raise ConfigError(
                f"{first_names(shared, 3)}: all texts of a batch share it, so that there is no "
                "gradient of each; give grad one text, or names of activations"
            )
        return tensors

    def _inputs(self, tokens: Ids | Sequence[Ids], checks: bool = True) -> Inputs:
        """A text from its start, or several in one pass. Raises DataError for tokens that make
        none, and if it checks them ShapeError for an edit's positions outside one of several."""
        inputs = inputs_of(tokens, self.config)
        if checks and (batch := inputs.batch) is not None:
            for edit in self._edits:
                edit.spot.expect_tokens(edit.pattern, batch)
        return inputs

    # -- activations -------------------------------------------------------------------------------

    @property
    def activations(self) -> list[str]:
        """The names of its activations, in the order of the graph: see pyggml.models.taps."""
        taps, inputs = Taps([]), Inputs.empty(1)
        if self.parts.decoder.has_output:
            build(self.parts, inputs, taps=taps)
        else:
            self.parts.decoder.hidden(Net(self.parts.weights, inputs, taps=taps))
        return taps.names

    @contextmanager
    def trace(
        self,
        *patterns: str,
        scale: Terms | None = None,
        add: Terms | None = None,
        replace: Terms | None = None,
        tokens: Whole = None,
    ) -> Iterator[Trace]:
        """Read activations, and change them, in everything that the model runs meanwhile.

        patterns   names to read, with * and ?: "blk.*.out"
        scale      pattern → factor
        add        pattern → addend, such as a steering vector
        replace    pattern → what stands in its place
        tokens     positions in each text that are changed, from its end if negative; None: all, and
                   an empty list: none

        What is changed takes a number, an array that broadcasts to the activation, or a function of
        it, by the operators of values; `At` of one of these says where: at its own tokens, layers,
        heads, neurons and batch rows. Traces nest: an inner one changes what the outer ones have
        changed, and all read the result.

        Raises ConfigError if a pattern names nothing, and for what is no number; and, when a graph
        is built, ShapeError for numbers or tokens that do not fit.
        """
        trace = self._checked(Trace(patterns, edits(scale, add, replace, tokens)))
        before = self.traces
        self.traces = (*before, trace)
        try:
            yield trace
        finally:
            self.traces = before

    def _checked(self, trace: Trace) -> Trace:
        """The trace. Raises ConfigError if it names what the model has not."""
        names = self.activations
        check_names(Taps(trace.patterns, trace.edits).all_patterns, names)
        check_layers(trace.edits, names)
        return trace

    @property
    def _edits(self) -> list[Edit]:
        """What traces change, the outermost first."""
        return [e for trace in self.traces for e in trace.edits]

    @property
    def edited(self) -> list[str]:
        """The patterns of what traces change."""
        return [e.pattern for e in self._edits]

    def note_rounding(self, *changed: str) -> None:
        """Warn, once, where activations are changed whose effect may drown in rounding; changed:
        beside those of traces."""
        edited = [*self.edited, *changed]
        if edited and self.rounds and not self._said_rounding:
            self._said_rounding = True
            warnings.warn(
                f"products round to {self.backend.compute}, and so does the effect of changing "
                f"{first_names(edited)}: load(…, compute='f32') is exact",
                RuntimeWarning,
                stacklevel=3,
            )

    def taps(self, reads: bool = True) -> Taps | None:
        """Taps for a graph of this model while it is traced; without `reads` they change alone."""
        if not self.traces:
            return None
        patterns = dict.fromkeys(p for trace in self.traces for p in trace.patterns if reads)
        return Taps([*patterns], self._edits)

    # -- tokens ------------------------------------------------------------------------------------

    def check_tokens(self, tokens: Ids, name: str = "tokens") -> np.ndarray:
        """Token ids as int32, every one of them inside the vocabulary. name: for a DataError."""
        return check_ids(tokens, self.config.n_vocab, name)


def check_greatest(logit: float, edited: Sequence[str] = ()) -> None:
    """NotFiniteError if the greatest logit is NaN or infinite. edited: what a trace changed."""
    if not np.isfinite(logit):
        cause = "the model's weights or its adapter make no numbers"
        if edited:
            cause = f"what a trace makes of {first_names(edited, 3)} leads to no numbers"
        raise NotFiniteError(f"the greatest logit is {logit}, wanted a finite number: {cause}")


def load(
    path: Path,
    adapter: AdapterFile | Sequence[AdapterFile] | None = None,
    compute: str = "auto",
    backends: Sequence[Backend] = (),
    device: str = "cpu",
    gpu_layers: int | str | None = None,
    split: Sequence[float] | None = None,
    stream_weights: str | None = None,
) -> Model:
    """Open a GGUF model, and LoRA adapters for it.

    adapter: a file, (file, weight), or a list of these; their updates add up. A weight multiplies
    an update, like llama.cpp's --lora-scaled.
    compute: how products with quantised weights are computed, see pyggml.kernels.gemm. "f32" is
    exact; "bf16" and "int8" round, and are slow on CPUs without such instructions; "auto" takes the
    fastest. backends: devices to compute, train and generate on, in order of preference. The CPU
    runs what they lack, with a warning, and all without them. device: "cuda", "cuda:1" or "auto"
    opens such a device as the last of the backends, "cuda:0,cuda:1" both. gpu_layers: so many of
    the last blocks are computed by the devices, one more than there are: the output too; "all", or
    "auto": as many as fit into their memory. split: the share of them that each device has.
    stream_weights: "on" leaves the weights of blocks in the file, from which each pass copies them
    to the device; "off" none; "auto", the default, as few as its memory requires. Raises GGUFError,
    ModelError, AdapterError, ConfigError or DeviceError: one sentence that names the fault.
    """
    compute_type = next((name for name in COMPUTE_TYPES if name == compute), None)
    if compute_type is None:
        near = suggestion(compute, COMPUTE_TYPES)
        raise ConfigError(f"compute is {compute!r}, known are {', '.join(COMPUTE_TYPES)}{near}")
    if any(b.is_host for b in backends):
        raise ConfigError("backends has a CPU, wanted other devices: the CPU runs what they lack")
    file = gguf.open(path)
    parts = read(file)
    warn_of_zeros(file, parts.weights)
    model = Model(file, parts, compute_type, [*backends, *backends_of(device, compute)])
    if gpu_layers is not None or split is not None or "," in device:
        model.place_as_said("all" if gpu_layers is None else gpu_layers, split or (), device)
    model.stream_as_said(stream_weights or "auto")
    given = [adapter] if isinstance(adapter, str | os.PathLike | tuple) else adapter
    return model if given is None else model.with_adapter_files(*given)
