"""The linear parts of a model: matrices with what adapters add to them, norms whose scale counts as
fixed, and where in a block attention stands.

All take rows (n, …) and give rows, float32 where the engine multiplies. Biases are left out.
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from warnings import warn

import numpy as np

from pyggml.backends.cpu import CPU
from pyggml.backward import build_backward
from pyggml.errors import ConfigError
from pyggml.graph import Graph
from pyggml.graph.arrays import read
from pyggml.graph.tensor import Tensor, leaf
from pyggml.model import Model
from pyggml.models import Inputs, Net
from pyggml.models.attention import Attention, GatedOutput
from pyggml.models.block import Chain, Residual, Scaled, Sum
from pyggml.models.norm import LayerNorm, Norm
from pyggml.models.part import Part
from pyggml.models.shared_keys import SharedKeys
from pyggml.runtime import Devices, results, run


def exact(model: Model) -> Model:
    """The same model, in the traces that are on, whose products do not round.

    That of another device stays as it was opened, and is warned of unless it was for
    compute="f32".
    """
    devices = model.devices.beside_host
    if devices and model.compute != "f32":
        warn(
            f"products round on {devices[0].name}: load(…, compute='f32') is exact",
            RuntimeWarning,
            stacklevel=3,
        )
    if devices or not model.rounds:
        return model
    twin = copy(model)
    twin.compute, twin.backend = "f32", CPU("f32")
    twin.devices = Devices([twin.backend])
    return twin


# -- matrices -------------------------------------------------------------------------------------


def through(model: Model, module: str, x: np.ndarray) -> np.ndarray:
    """x·Wᵀ (n, n_out) of rows x (n, n_in), W the module's matrix with its adapters' updates."""
    (y,) = run(_product(model, module, leaf(_float32(x))), devices=model.devices)
    return y


def back_through(model: Model, module: str, g: np.ndarray) -> np.ndarray:
    """g·W (n, n_in) of rows g (n, n_out): of one-hot rows, these rows of W."""
    n_in = model.parts.weights[f"{module}.weight"].shape[-1]
    x = leaf(np.zeros((len(g), n_in), np.float32))
    back = build_backward(Graph.of(_product(model, module, x)), [x], leaf(_float32(g)))
    return results(back, model.devices)[1]


def matrix_rows(model: Model, module: str, first: int, n: int) -> np.ndarray:
    """The rows first to first + n of the module's matrix, (n, n_in)."""
    n_out = model.parts.weights[f"{module}.weight"].shape[-2]
    return back_through(model, module, np.eye(n, n_out, first, dtype=np.float32))


def matrix_columns(model: Model, module: str, first: int, n: int) -> np.ndarray:
    """Its columns first to first + n as rows, (n, n_out)."""
    n_in = model.parts.weights[f"{module}.weight"].shape[-1]
    return through(model, module, np.eye(n, n_in, first, dtype=np.float32))


def embeddings(model: Model, tokens: np.ndarray) -> np.ndarray:
    """Rows (n, n_embd) of the token embedding, as the file and adapters have them."""
    net = Net(model.parts.weights, Inputs.empty(len(tokens)), model.adapters)
    (rows,) = run(net.rows("token_embd", leaf(tokens.astype(np.int32))), devices=model.devices)
    return rows


def unembed(model: Model, x: np.ndarray) -> np.ndarray:
    """Logits (n, n_vocab) that rows x (n, n_embd) of the last residual stream add, while the last
    norm's scale is held at 1."""
    decoder = model.parts.decoder
    x = pass_norm(model, decoder.norm, "", x) if isinstance(decoder.norm, Norm) else x
    return through(model, model.parts.output_name, decoder.logit_scale * x)


def _product(model: Model, module: str, x: Tensor) -> Tensor:
    weights = {n: w for n, w in model.parts.weights.items() if n != f"{module}.bias"}
    return Net(weights, Inputs.empty(x.shape[0]), model.adapters).linear(module, x)


def _float32(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a, np.float32)


# -- norms ----------------------------------------------------------------------------------------


def pass_norm(model: Model, norm: Norm, at: str, x: np.ndarray) -> np.ndarray:
    """Rows x (…, size) times the norm's weight, centred before by a layer norm: what the norm gives
    but for its scale, a positive number for each row, and its bias."""
    x = x - x.mean(axis=-1, keepdims=True) if isinstance(norm, LayerNorm) else x
    return x * norm_weight(model, norm, at)


def read_norm(model: Model, norm: Norm, at: str, rows: np.ndarray) -> np.ndarray:
    """The transpose: rows (…, size) of a matrix that reads the norm's output, as they read its
    input."""
    rows = rows * norm_weight(model, norm, at)
    return rows - rows.mean(axis=-1, keepdims=True) if isinstance(norm, LayerNorm) else rows


def norm_weight(model: Model, norm: Norm, at: str) -> np.ndarray:
    """The weight of a norm, of its shape in the file; 1 if it has none."""
    names = [name for name in norm.tensors(at) if not name.endswith(".bias")]
    weights = model.parts.weights
    return read(weights[names[0]]) if names and names[0] in weights else np.ones(1, np.float32)


# -- where attention stands -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Branch:
    """A part on its way from the residual stream back to it.

    before   what the stream passes first: a norm, most often
    after    what the part's output passes before it is added
    factor   by which it is multiplied at last
    """

    part: Part
    before: tuple[Part, ...] = ()
    after: tuple[Part, ...] = ()
    factor: float = 1.0


def branches(block: Part) -> Iterator[Branch]:
    """The parts of a block that are made of no others, norms excepted, in their order."""
    return (b for b in _walk(Branch(block)) if not isinstance(b.part, Norm))


def _walk(b: Branch) -> Iterator[Branch]:
    match b.part:
        case Chain(parts=parts):
            for i, part in enumerate(parts):
                yield from _walk(
                    Branch(part, (*b.before, *parts[:i]), (*parts[i + 1 :], *b.after), b.factor)
                )
        case Residual(body=body, factor=factor):
            yield from _walk(Branch(body, factor=factor))
        case Scaled(body=body, factor=factor):
            yield from _walk(Branch(body, b.before, b.after, b.factor * factor))
        case Sum(parts=parts):
            for part in parts:
                yield from _walk(Branch(part, b.before, b.after, b.factor))
        case _:
            yield b


def head_counts(model: Model) -> list[int]:
    """How many heads each block has; 0 where it has no attention.

    Raises ConfigError, naming the architecture, for a model without any.
    """
    counts = [0] * model.config.n_layer
    for name in model.activations:
        if name.startswith("blk.") and ".attn_head." in name:
            counts[int(name.split(".")[1])] += 1
    if not any(counts):
        raise ConfigError(f"{model.config.architecture} has no attention heads")
    return counts


def refusal(model: Model, layer: int, fault: str) -> ConfigError:
    """The error that a block is none to which a question can be put."""
    return ConfigError(f"block {layer} of {model.config.architecture} {fault}")


def check_block(model: Model, layer: int) -> None:
    """ConfigError for a block that the model lacks."""
    if not 0 <= layer < model.config.n_layer:
        raise ConfigError(f"there is no block {layer} among the model's {model.config.n_layer}")


def check_head(model: Model, layer: int, head: int) -> None:
    """ConfigError for a block or a head that the model lacks."""
    for name, number in (("layer", layer), ("head", head)):
        if not isinstance(number, int | np.integer):
            raise ConfigError(f"{name} is {number!r:.60}, wanted a whole number")
    counts = head_counts(model)
    check_block(model, layer)
    if not counts[layer]:
        raise refusal(model, layer, "has no attention heads")
    if not 0 <= head < counts[layer]:
        raise ConfigError(f"block {layer} has no head {head} among its {counts[layer]}")


def attention_branch(model: Model, layer: int) -> tuple[Branch, Attention]:
    """Where a block's attention stands, and the part itself.

    Raises ConfigError for attention whose heads have no matrices of their own, such as keys of
    another block or keys that are made of a latent vector.
    """
    for b in branches(model.parts.decoder.blocks[layer]):
        if isinstance(b.part, Attention) and type(b.part) in (Attention, GatedOutput):
            return b, b.part
    raise refusal(model, layer, "has attention whose heads have no matrices of their own")


def refuse_between(model: Model, layer: int) -> None:
    """ConfigError where something stands between the heads and their output matrix."""
    for b in branches(model.parts.decoder.blocks[layer]):
        if isinstance(b.part, Attention):
            gated = type(b.part) not in (Attention, SharedKeys)
            if gated or b.part.out_norm is not None:
                what = f"a {'gate' if gated else 'norm'} between its heads and their output matrix"
                why = "so that what a head adds is no product of it alone"
                raise refusal(model, layer, f"has {what}, {why}")


def refuse_turns(model: Model) -> None:
    """ConfigError for a model whose blocks run again, so that a part adds more than once."""
    if model.parts.decoder.n_turns > 1:
        raise ConfigError(f"{model.config.architecture} runs its blocks more than once")
