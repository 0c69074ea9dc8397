"""Questions to a model that its activations answer, each in terms of `Model.trace`.

attention_maps          how much each token attends to each earlier one
logit_lens              what every layer would predict if it were the last
lens_choices            the tokens that it would choose, and how probable they are
token_losses            how surprising each token is
token_table             the same with its rank among all tokens, and which tokens count
logit_attribution       what every part adds to the logit of one token
gradient_x_activation   how much a metric depends on every activation, to first order
integrated_gradients    the same along the way from a baseline, so that the shares sum up
attribution_patching    what patching each activation would change, to first order
patch                   the logits if some activations were those of another text
steering_vector         the mean difference between activations of two sets of texts

Texts are token ids (T,). Of a list of texts, which share passes, `OfTexts` gives a list of answers.
Everything is float32, or float64 where NumPy computes it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload
from warnings import warn

import numpy as np

from pyggml.backward import build_backward
from pyggml.errors import ConfigError, DataError, first_names, suggestion
from pyggml.graph import Graph
from pyggml.graph.arrays import read
from pyggml.graph.tensor import Tensor, leaf
from pyggml.look.control import AFTER_FIRST, text_means
from pyggml.look.gradients import loss_and_grads
from pyggml.model import Model
from pyggml.models import Inputs, Net, Taps
from pyggml.models.block import OutputScale
from pyggml.models.metric import Gradients, Metric
from pyggml.models.norm import Norm, RmsNorm
from pyggml.models.texts import Ids, fill, is_several
from pyggml.runtime import results, run

_ROWS = 8  # of logits that are float64 at a time
P = ParamSpec("P")
T = TypeVar("T")


class OfTexts(Protocol[P, T]):
    """A question that takes a text, or a list of texts and then gives a list of answers."""

    @overload
    def __call__(self, model: Model, ids: Ids, *args: P.args, **kwargs: P.kwargs) -> T: ...

    @overload
    def __call__(
        self, model: Model, ids: Sequence[Ids], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]: ...


def of_texts(question: Callable[Concatenate[Model, Sequence[Ids], P], list[T]]) -> OfTexts[P, T]:
    """A question that is put to several texts, put to one too."""

    @wraps(question)
    def ask(model: Model, ids: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        answers = question(model, as_texts(ids), *args, **kwargs)
        return answers if is_several(ids) else answers[0]

    return ask


def as_texts(ids: Any, name: str = "ids") -> Sequence[Ids]:
    """A text as a list of one, and a list of texts as it is. DataError for an empty list."""
    if isinstance(ids, list | tuple) and not ids:
        raise DataError(f"{name} is empty, wanted a text or a list of texts")
    return ids if is_several(ids) else [ids]


def numbers_by_text(name: str, given: int | Sequence[int], n_texts: int) -> list[Any]:
    """A number for each text, of one for all or a list. DataError for a list of another length."""
    numbers = [*given] if isinstance(given, Sequence | np.ndarray) else [given] * n_texts
    if len(numbers) != n_texts:
        raise DataError(
            f"{name} has {len(numbers)} numbers, wanted one, or one for each of {n_texts} texts"
        )
    return numbers


@of_texts
def attention_maps(
    model: Model, texts: Sequence[Ids], blocks: Iterable[int] | None = None
) -> list[np.ndarray]:
    """Attention (n_blocks, n_head, T, T): row t has the weights of the keys that token t reads.

    blocks: which; all by default. A row sums to 1, or less where a layer has sinks. Raises
    ConfigError for a block without attention.
    """
    blocks = range(model.config.n_layer) if blocks is None else list(blocks)
    names = {i: f"blk.{i}.attn_pattern" for i in blocks}
    activations = {*model.activations}
    if lacking := [i for i, name in names.items() if name not in activations]:
        raise ConfigError(f"block {lacking[0]} has no attention")
    with model.trace(*names.values()) as t:
        model.logits(texts)
    by_text = zip(*(t[name] for name in names.values()), strict=True)
    return [np.stack([pattern.transpose(1, 0, 2) for pattern in each]) for each in by_text]


@of_texts
def logit_lens(model: Model, texts: Sequence[Ids]) -> list[np.ndarray]:
    """Logits (n_blocks, T, n_vocab) of the last norm and the output matrix after each block."""
    names = [f"blk.{i}.out" for i in range(model.config.n_layer)]
    with model.trace(*names) as t:
        model.logits(texts)
    by_text = zip(*(t[name] for name in names), strict=True)
    return [np.stack([stream_logits(model, stream) for stream in each]) for each in by_text]


def lens_choices(model: Model, ids: Ids, n: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """The n tokens that every block would choose if it were the last, most probable first, and
    their probabilities: (n_blocks, T, n) int64 and float64. Of `logit_lens` no more is kept."""
    names = [f"blk.{i}.out" for i in range(model.config.n_layer)]
    with model.trace(*names) as t:
        model.logits(ids)
    chosen = [choices(stream_logits(model, t[name]), n) for name in names]
    return np.stack([c for c, _ in chosen]), np.stack([p for _, p in chosen])


def choices(logits: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The n most probable tokens of each row of logits (T, n_vocab), and their probabilities:
    (T, n) int64 and float64."""
    n = min(n, logits.shape[-1])
    best = np.argpartition(logits, -n, axis=-1)[:, -n:]
    order = np.argsort(-np.take_along_axis(logits, best, axis=-1), axis=-1, kind="stable")
    best = np.take_along_axis(best, order, axis=-1)
    logs = [log_softmax(row)[i] for row, i in zip(logits, best, strict=True)]
    return best, np.exp(np.stack(logs))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """log p of logits (…, n_vocab), float64."""
    z = logits.astype(np.float64)
    z -= z.max(axis=-1, keepdims=True)
    return np.asarray(z - np.log(np.exp(z).sum(axis=-1, keepdims=True)))


@of_texts
def token_losses(model: Model, texts: Sequence[Ids]) -> list[np.ndarray]:
    """−log p of each token but the first given those before it, (T - 1,) float64."""
    pairs = zip(model.logits(texts), texts, strict=True)
    return [losses_and_ranks(z[:-1], np.asarray(ids)[1:])[0] for z, ids in pairs]


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """How a model reads a text of T tokens. Nothing predicts the first one.

    ids       (T,) int32
    losses    (T,) float64, −log p given the tokens before; NaN of the first
    ranks     (T,) int64, how many tokens were more probable, 0 for the model's own choice; −1 of
              the first
    counted   (T,) bool, which tokens are targets of a loss; never the first
    """

    ids: np.ndarray
    losses: np.ndarray
    ranks: np.ndarray
    counted: np.ndarray

    @property
    def loss(self) -> float:
        """The mean over the tokens that count; NaN if none does."""
        chosen = self.losses[self.counted]
        return float(chosen.mean()) if chosen.size else float("nan")


def token_table(model: Model, ids: Ids, mask: np.ndarray | None = None) -> TokenTable:
    """The loss and the rank of every token. mask: (T,) bool, which ones count; all by default."""
    tokens = model.check_tokens(ids)
    counted = np.ones(len(tokens), bool) if mask is None else np.array(mask, bool)
    if counted.shape != tokens.shape:
        raise DataError(f"a mask of shape {counted.shape}, wanted {tokens.shape}")
    counted[0] = False
    losses, ranks = np.full(len(tokens), np.nan), np.full(len(tokens), -1)
    losses[1:], ranks[1:] = losses_and_ranks(model.logits(tokens)[:-1], tokens[1:])
    return TokenTable(tokens, losses, ranks, counted)


def losses_and_ranks(logits: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """−log p of the targets (n,) float64, and how many tokens are more probable (n,) int64.

    logits: (n, n_vocab)
    """
    losses, ranks = np.empty(len(targets)), np.empty(len(targets), np.int64)
    for first in range(0, len(targets), _ROWS):
        part = slice(first, first + _ROWS)
        z = logits[part].astype(np.float64)
        z -= z.max(axis=-1, keepdims=True)
        own = np.take_along_axis(z, targets[part, None].astype(np.int64), axis=-1)
        ranks[part] = (z > own).sum(axis=-1)
        losses[part] = np.log(np.exp(z, out=z).sum(axis=-1)) - own[:, 0]
    return losses, ranks


@of_texts
def logit_attribution(
    model: Model, texts: Sequence[Ids], token: int | Sequence[int], at: int | Sequence[int] = -1
) -> list[dict[str, float]]:
    """What the embedding and every branch add to the logit of `token` at position `at`: of several
    texts one for all, or a list.

    The last norm counts as fixed: its factor, and its mean if it takes one off, are those of the
    whole residual stream (direct logit attribution, Elhage et al. 2021). So do the factors by which
    layers multiply their output. The values and "bias", which stands for what the norm and the
    output matrix add themselves, sum to the logit before a soft cap. Raises DataError for a token
    or a position that there is not, and ConfigError for a model whose residual stream is several
    vectors, so that what a branch adds is in none of them alone.
    """
    tokens, ats = (numbers_by_text(*of, len(texts)) for of in (("token", token), ("at", at)))
    model.check_tokens(tokens, "token")
    if not isinstance(model.parts.decoder.norm, Norm | None):
        raise ConfigError(f"{model.config.architecture} has a residual stream of several vectors")
    endings = "attn_out", "ffn_out", "per_layer_out"
    branches = [n for n in model.activations if n.endswith(endings)]
    last = f"blk.{model.config.n_layer - 1}.out"
    with model.trace(*branches, last, "output") as t:
        model.logits(texts)
    factors, answers = later_factors(model), []
    for i, (token_of, row) in enumerate(zip(tokens, ats, strict=True)):
        n = len(t[last][i])
        if not isinstance(row, int | np.integer) or not -n <= row < n:
            raise DataError(f"there is no position {row} in a text of {n} tokens")
        stream = t[last][i][row]
        values = {name: factors[int(name.split(".")[1])] * t[name][i][row] for name in branches}
        values = {"token_embd": stream - sum(values.values()), **values}
        direction = logit_direction(model, stream, token_of)
        shares = {name: float(v.astype(np.float64) @ direction) for name, v in values.items()}
        bias = float(t["output"][i][row, token_of]) - sum(shares.values())
        answers.append(shares | {"bias": bias})
    return answers


@overload
def gradient_x_activation(
    model: Model,
    ids: Ids,
    *patterns: str,
    metric: Metric | None = None,
    mask: np.ndarray | None = None,
) -> dict[str, np.ndarray]: ...


@overload
def gradient_x_activation(
    model: Model, ids: Sequence[Ids], *patterns: str, metric: Metric | Sequence[Metric]
) -> list[dict[str, np.ndarray]]: ...


def gradient_x_activation(
    model: Model, ids: Any, *patterns: str, metric: Any = None, mask: np.ndarray | None = None
) -> Any:
    """d(metric)/dx · x, summed over the last axes to one number a token, by activation name.

    It is how much the metric would fall, to first order, if the activation were 0. metric: as
    `Model.grad` has it; by default minus the loss of one text, whose mask is that of
    `loss_and_grads`. The last token of a loss is only a target, so that there are T - 1 rows.
    """
    if metric is not None:
        g = model.grad(metric, ids, *patterns)
        return [_x_activation(each) for each in g] if is_several(ids) else _x_activation(g)
    with model.trace(*patterns) as t:
        loss_and_grads(model, ids, mask, parameters={})
    return {n: -_by_token(t.grad(n).astype(np.float64) * t[n]) for n in t.names}


def _x_activation(g: Gradients) -> dict[str, np.ndarray]:
    return {name: _by_token(g[name].astype(np.float64) * x) for name, x in g.at.items()}


@of_texts
def integrated_gradients(
    model: Model,
    texts: Sequence[Ids],
    metric: Metric | Sequence[Metric],
    *patterns: str,
    baseline: Mapping[str, np.ndarray | float] | float = 0.0,
    n_steps: int = 32,
) -> list[dict[str, np.ndarray]]:
    """(x − b) · mean over α of d(metric)/dx at b + α(x − b), summed to one number a token (T,), by
    activation name (Sundararajan et al. 2017).

    The numbers of one activation sum to the metric, less the metric with the baseline in its place,
    but for an error: α takes the middles of n_steps equal parts of [0, 1]. A sum that is off by
    more than a twentieth is warned of: from 0, norms make the way steep at its start.
    baseline: b, a number, or by name what broadcasts to the activation. Each activation is moved
    by itself, in n_steps and one more. Raises as `Model.grad` and `Model.trace` do.
    """
    if n_steps < 1:
        raise ConfigError(f"n_steps is {n_steps}, wanted 1 or more")
    whole = model.grad(metric, texts, *patterns)
    if isinstance(baseline, Mapping) and (extra := [n for n in baseline if n not in whole[0].at]):
        raise ConfigError(
            f"baseline has {extra[0]}, which is not differentiated by"
            + (suggestion(extra[0], whole[0].at) or f": {first_names([*whole[0].at], 3)} are")
        )
    names, alphas = [*whole[0].at], [*(np.arange(n_steps) + 0.5) / n_steps, 0.0]
    sweep = model.sweep(metric, texts, *names, by=names)
    shares: list[dict[str, np.ndarray]] = [{} for _ in texts]
    for name in names:
        start = baseline.get(name, 0.0) if isinstance(baseline, Mapping) else baseline
        xs = [g.at[name] for g in whole]
        ways = [x - np.asarray(start, np.float32) for x in xs]
        at = ([x - np.float32(1 - a) * w for x, w in zip(xs, ways, strict=True)] for a in alphas)
        *steps, first = sweep({"replace": {name: values}} for values in at)
        for i, way in enumerate(ways):
            total = sum(g[i][name].astype(np.float64) for g in steps)
            shares[i][name] = _by_token(total / n_steps * way)
            difference = whole[i].metric - first[i].metric
            _note_gap(name, float(shares[i][name].sum()), difference)
    return shares


def _note_gap(name: str, total: float, difference: float) -> None:
    if abs(total - difference) > 0.05 * abs(difference) + 1e-3:
        warn(
            f"the shares of {name} sum to {total:.3g}, and the metric is {difference:.3g} from "
            "that of the baseline: more steps are wanted, or a baseline that is nearer",
            RuntimeWarning,
            stacklevel=3,
        )


@of_texts
def attribution_patching(
    model: Model,
    texts: Sequence[Ids],
    source: Ids | Sequence[Ids],
    metric: Metric | Sequence[Metric],
    *patterns: str,
) -> list[dict[str, np.ndarray]]:
    """d(metric)/dx · (x of `source` − x), summed to one number a token (T,), by activation name.

    It is how much the metric of `ids` would rise, to first order, if the activation of that token
    were patched in from `source`: all of `patch` for one pass of each text and one back (Nanda
    2023). source: of each text one. Raises DataError for texts of unlike length.
    """
    sources = _sources(texts, source)
    grads = model.grad(metric, texts, *patterns)
    with model.trace(*grads[0].at) as t:
        model.logits(sources)
    return [
        {name: _by_token(g[name] * (t[name][i].astype(np.float64) - x)) for name, x in g.at.items()}
        for i, g in enumerate(grads)
    ]


@of_texts
def patch(
    model: Model,
    texts: Sequence[Ids],
    source: Ids | Sequence[Ids],
    *patterns: str,
    tokens: Iterable[int],
) -> list[np.ndarray]:
    """The logits (T, n_vocab) of `ids` if activations were those that `source` has.

    patterns: of the activations; tokens: at these positions, in both texts. source: of each text
    one. Raises DataError for texts of unlike length.
    """
    sources = _sources(texts, source)
    with model.trace(*patterns) as t:
        model.logits(sources)
    with model.trace(replace={name: t[name] for name in t.names}, tokens=tokens):
        return model.logits(texts)


def steering_vector(
    model: Model,
    name: str,
    towards: Iterable[Ids],
    away: Iterable[Ids],
    positions: slice = AFTER_FIRST,
) -> np.ndarray:
    """The mean of an activation over the texts `towards`, less that over those `away`, float32.

    Of each text the mean over its positions counts, those after the first by default. Added by
    `model.trace(add={name: factor * vector})` while the model writes, it turns the text towards the
    first (Turner et al. 2023). `pyggml.look.control` has one for all blocks, in files.
    """
    to, off = (text_means(model, [name], [*texts], positions)[:, 0] for texts in (towards, away))
    return np.asarray(to.mean(axis=0) - off.mean(axis=0), np.float32)


def _sources(texts: Sequence[Ids], source: Ids | Sequence[Ids]) -> Sequence[Ids]:
    """The source of each text, as long as it."""
    sources: Sequence[Any] = source if is_several(source) else [source]
    if len(sources) != len(texts):
        raise DataError(f"{len(texts)} texts and {len(sources)} sources, wanted one of each")
    for ids, other in zip(texts, sources, strict=True):
        if len(ids) != len(other):
            raise DataError(
                f"texts of {len(ids)} and {len(other)} tokens, wanted two of one length"
            )
    return sources


# -- how ------------------------------------------------------------------------------------------


def stream_logits(model: Model, stream: np.ndarray) -> np.ndarray:
    """Logits (T, n_vocab) of a residual stream (T, n_embd): the last norm and what follows, with
    what traces change of these."""
    return run(predict_from(model, leaf(stream)), devices=model.devices)[0]


def predict_from(model: Model, stream: Tensor) -> Tensor:
    """The same as a graph."""
    inputs = Inputs.empty(stream.shape[0])
    fill(inputs, np.zeros(stream.shape[0], np.int32))
    net = Net(model.parts.weights, inputs, model.adapters, taps=model.taps(reads=False))
    decoder = model.parts.decoder
    return decoder.logits(net, decoder.last(net, stream))


def later_factors(model: Model) -> np.ndarray:
    """By block, what all that a branch there adds is multiplied by until the last norm, float32."""
    weights = model.parts.weights
    names = (f"blk.{i}.{OutputScale.name}" for i in range(model.config.n_layer))
    factors = [read(weights[n])[0] if n in weights else np.float32(1) for n in names]
    return np.cumprod(factors[::-1], dtype=np.float32)[::-1]


def logit_direction(model: Model, stream: np.ndarray, token: int) -> np.ndarray:
    """d(logit of token) / d(stream) (n_embd,) float64 while the last norm's factor is fixed."""
    decoder = model.parts.decoder
    h, taps = leaf(np.zeros((1, model.config.n_embd), np.float32)), Taps(["output"])
    decoder.logits(Net(model.parts.weights, Inputs.empty(1), model.adapters, taps=taps), h)
    z = taps.read["output"]
    one = leaf(np.eye(1, z.shape[1], token, dtype=np.float32))
    back = build_backward(Graph.of(z), [h], one)
    _, (row,) = results(back, model.devices)
    g = row.astype(np.float64)
    g *= decoder.logit_scale
    norm, x = decoder.norm, stream.astype(np.float64)
    if norm is None:
        return g
    assert isinstance(norm, Norm)
    weight = model.parts.weights.get(f"{norm.name}.weight")
    g = g if weight is None else g * read(weight)
    if isinstance(norm, RmsNorm):
        return np.asarray(g / np.sqrt(np.mean(x * x) + norm.eps))
    return np.asarray((g - g.mean()) / np.sqrt(x.var() + norm.eps))


def _by_token(a: np.ndarray) -> np.ndarray:
    return a.reshape(len(a), -1).sum(axis=-1)
