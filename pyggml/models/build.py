"""A model file -> decoder and weights -> the graph of its logits or its loss."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyggml.errors import ModelError
from pyggml.gguf import GGUFFile
from pyggml.graph import Graph
from pyggml.graph.tensor import Shape, Tensor
from pyggml.models.architectures import ARCHITECTURES, ENCODERS
from pyggml.models.attention import Attention
from pyggml.models.config import ModelConfig, Reader, full_key, short
from pyggml.models.decoder import Decoder, output_name
from pyggml.models.low_rank import LoraPairs
from pyggml.models.net import Cache, Inputs, Net
from pyggml.models.pooling import Pool, pooled
from pyggml.models.taps import Taps
from pyggml.models.weights import Weights, factor_of, read_weights
from pyggml.ops import (
    cont,
    cross_entropy_by_row,
    cross_entropy_rows,
    get_rows,
    linear_cross_entropy,
    linear_cross_entropy_by_row,
    linear_soft_cross_entropy,
    mul_mat,
    narrow,
    scale,
    soft_cross_entropy,
    tanh,
    transpose,
)

NO_MODELS = ("adapter", "checkpoint", "imatrix")  # general.type of other files


@dataclass(frozen=True, slots=True)
class Parts:
    """A model read from a file: its decoder and its weights."""

    decoder: Decoder
    weights: Weights

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @property
    def usual_modules(self) -> tuple[str, ...]:
        """The modules that adapters target by default, of those that the file has."""
        blocks = range(self.config.n_layer)
        return tuple(
            m
            for m in self.decoder.usual_modules
            if any(f"blk.{i}.{m}.weight" in self.weights for i in blocks)
        )

    @property
    def output_name(self) -> str:
        """Name of the output matrix: "output", or "token_embd" where the two are tied."""
        return output_name(self.weights)


def read(file: GGUFFile) -> Parts:
    """The decoder and the weights of a model file.

    Raises ModelError for an unknown architecture, hyperparameters out of range and tensors that
    are missing, unused, of a wrong shape or of an unknown type.
    """
    shapes = {name: info.shape for name, info in file.tensors.items()}
    decoder = compose(file.get, shapes, str(file.path))
    if decoder.config.n_layer > len(file.tensors):
        raise ModelError(
            f"{file.path}: block_count is {decoder.config.n_layer}, but there are only "
            f"{len(file.tensors)} tensors"
        )
    return Parts(decoder, read_weights(file, decoder.tensors(), decoder.is_unread))


def compose(get: Callable[[str], object], shapes: Mapping[str, Shape], origin: str) -> Decoder:
    """The decoder of a file with this metadata and these tensor shapes.

    get(key) is a metadata value or None. Raises ModelError for an unknown architecture, and with
    every hyperparameter that is missing or out of range; its message starts with `origin`.
    """
    name, kind = get("general.architecture"), get("general.type")
    if isinstance(kind, str) and kind in NO_MODELS:
        raise ModelError(f"{origin}: general.type is {kind!r}, wanted a model")
    architecture = {**ARCHITECTURES, **ENCODERS}.get(name) if isinstance(name, str) else None
    if architecture is None:
        names = ", ".join((*ARCHITECTURES, *ENCODERS))
        raise ModelError(f"{origin}: architecture {short(name)} is not known; known are {names}")
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise ModelError(f"{origin}: has no matrix token_embd.weight, so it is no model")
    r = Reader(architecture.name, get, shapes)
    decoder = architecture.decoder(r)
    r.faults += _faults_of_both_ways(decoder)
    if r.faults:
        raise ModelError(f"{origin}: " + "; ".join(dict.fromkeys(r.faults)))
    return decoder


def _faults_of_both_ways(decoder: Decoder) -> Iterator[str]:
    """What keeps a decoder from seeing later tokens, if its file wants that."""
    if decoder.config.causal:
        return
    key = full_key(decoder.config.architecture, "attention.causal")
    if decoder.state():
        yield f"{key} is False, wanted True: recurrent parts read from the first token to the last"
    attentions = [part for part in decoder.parts() if isinstance(part, Attention)]
    if any(a.chunk or (a.window and not a.symmetric) for a in attentions):
        yield f"{key} is False, wanted True: windows and chunks end at the token that sees them"


def build(
    parts: Parts,
    inputs: Inputs,
    adapters: Sequence[LoraPairs] = (),
    cache: Cache | None = None,
    of: tuple[Tensor, int] | None = None,
    taps: Taps | None = None,
) -> Tensor:
    """Logits (T, n_vocab) of the tokens in `inputs`, or (n, n_vocab) of the first n that a vector
    of int32 names, `of` = (vector, n).

    taps: which activations are read or changed.
    """
    net = Net(parts.weights, inputs, adapters, cache, taps)
    h = parts.decoder.hidden(net)
    if of is not None:
        rows, n = of
        h, net.logits_of = narrow(get_rows(h, rows), 0, 0, n), narrow(rows, 0, 0, n)
    return parts.decoder.logits(net, h).named("logits")


def build_vectors(parts: Parts, net: Net, pool: Pool) -> Tensor:
    """The vectors (n, n_embd) of the texts of a pool over a net's tokens, of any length."""
    x = pooled(parts.decoder.hidden(net, scaled=False), pool)
    return parts.decoder.dense(net, "", x) if parts.decoder.dense else x


def build_scores(parts: Parts, net: Net, pool: Pool) -> Tensor:
    """What the classifier says of texts, (n, labels)."""
    assert parts.decoder.classifier is not None
    x = pooled(parts.decoder.hidden(net, scaled=False), pool)
    return parts.decoder.classifier(net, "", x)


def build_loss(
    parts: Parts,
    inputs: Inputs,
    targets: Tensor,
    weights: Tensor,
    adapters: Sequence[LoraPairs] = (),
    trained: Collection[str] = (),
    taps: Taps | None = None,
) -> Graph:
    """The graph of `token_loss`, its output "loss", over these inputs. Its further outputs are the
    activations that `taps` reads, by their names."""
    net = Net(parts.weights, inputs, adapters, taps=taps)
    return net.graph(loss=token_loss(parts, net, targets, weights, trained).named("loss"))


def token_loss(
    parts: Parts,
    net: Net,
    targets: Tensor,
    weights: Tensor,
    trained: Collection[str] = (),
    gradient: bool = True,
    h: Tensor | None = None,
) -> Tensor:
    """Σ_t weights_t · cross_entropy(logits_t, targets_t) over a net's inputs, a scalar.

    h: the net's hidden states, if they are made already.

    Its `saved[0]`, () float32, counts the tokens of weight other than 0 that the model has right:
    their target has the greatest logit. trained: names of the tensors that get gradients.

    The fused loss never forms the matrix of logits. It cannot serve an output matrix that is
    trained, or has an adapter or a bias: logits and loss are then separate ops.
    """
    expect_next_token(parts.config)
    h = parts.decoder.hidden(net) if h is None else h
    if _is_plain(parts, net, trained):
        w, cap = parts.weights[f"{parts.output_name}.weight"], parts.decoder.logit_softcap
        return linear_cross_entropy(h, w, targets, weights, gradient, cap)
    return cross_entropy_rows(parts.decoder.logits(net, h), targets, weights)


def soft_token_loss(
    parts: Parts,
    net: Net,
    h: Tensor,
    goals: tuple[Tensor, Tensor, Tensor],
    trained: Collection[str] = (),
    gradient: bool = True,
    temperature: float = 1.0,
    beta: float = 0.0,
) -> Tensor:
    """Σ_t weights_t · cross entropy of probabilities and softmax(logits_t / temperature), a scalar;
    with beta their divergence.

    h: the net's hidden states; wanted: targets (T, k), shares (T, k + 1) and weights (T,), as
    `pyggml.ops.soft_cross_entropy` takes them. Otherwise as `token_loss`.
    """
    expect_next_token(parts.config)
    if _is_plain(parts, net, trained):
        w, cap = parts.weights[f"{parts.output_name}.weight"], parts.decoder.logit_softcap
        h = _cooled(h, temperature)
        return linear_soft_cross_entropy(h, w, *goals, gradient, cap / temperature, beta)
    return soft_cross_entropy(_cooled(parts.decoder.logits(net, h), temperature), *goals, beta)


def _cooled(x: Tensor, temperature: float) -> Tensor:
    """Logits, or what they are a product of, over a temperature."""
    return x if temperature == 1 else scale(x, 1 / temperature)


def token_losses(
    parts: Parts,
    net: Net,
    targets: Tensor,
    weights: Tensor,
    trained: Collection[str] = (),
    gradient: bool = True,
    temperature: float = 1.0,
) -> Tensor:
    """The terms of `token_loss`, (T,), for losses that are no plain sum over tokens, of logits over
    a temperature."""
    expect_next_token(parts.config)
    h = parts.decoder.hidden(net)
    if _is_plain(parts, net, trained):
        w, cap = parts.weights[f"{parts.output_name}.weight"], parts.decoder.logit_softcap
        h = _cooled(h, temperature)
        return linear_cross_entropy_by_row(h, w, targets, weights, gradient, cap / temperature)
    return cross_entropy_by_row(
        _cooled(parts.decoder.logits(net, h), temperature), targets, weights
    )


def expect_next_token(config: ModelConfig) -> None:
    """ModelError for a model whose tokens see later ones: it embeds texts and continues none."""
    if not config.causal:
        raise ModelError(
            f"a {config.architecture} whose tokens see later ones has no next token to predict: it "
            "embeds texts (`embed`)"
        )


def logits_among(parts: Parts, net: Net, tokens: Tensor, trained: Collection[str] = ()) -> Tensor:
    """The logits (T, n) of n tokens of the vocabulary, tokens (n,) int32, over a net's inputs.

    Of a plain output matrix no more than their rows are read."""
    expect_next_token(parts.config)
    h, decoder = parts.decoder.hidden(net), parts.decoder
    if not _is_plain(parts, net, trained):
        every = cont(transpose(decoder.logits(net, h)))
        return cont(transpose(get_rows(every, tokens)))
    w, cap = get_rows(parts.weights[f"{parts.output_name}.weight"], tokens), decoder.logit_softcap
    z = mul_mat(w, h)
    return scale(tanh(scale(z, 1 / cap)), cap) if cap else z


def _is_plain(parts: Parts, net: Net, trained: Collection[str]) -> bool:
    """Whether the logits are a product with a fixed output matrix, and nothing more but a cap; and
    nobody wants to see them."""
    full = f"{parts.output_name}.weight"
    changes = full in trained or any(full in pairs for pairs in net.adapters)
    changes |= factor_of(parts.weights, full) is not None
    tapped = net.taps is not None and any(map(net.taps.wants, ("output", "logits")))
    return not (changes or tapped) and "output.bias" not in parts.weights
