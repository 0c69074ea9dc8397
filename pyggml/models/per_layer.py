"""Per-layer embeddings (Gemma 3n's): beside the residual stream each layer has an input of its own,
made of the token and of its embedding."""

from dataclasses import dataclass

from pyggml.graph.tensor import Tensor
from pyggml.models.basics import Basics
from pyggml.models.net import Net
from pyggml.models.norm import Norm, RmsNorm
from pyggml.models.part import Part
from pyggml.models.weights import Tensors, TensorSpec, latent_matrix, matrix, merge_tensors
from pyggml.ops import add, geglu, get_rows, mul_mat, mul_mat_add, narrow, reshape, scale

INPUTS = "per_layer_inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInputs(Part):
    """Leaves the inputs of all layers (T, n_layer, n) for `PerLayerInput`, and gives back x.

    (√n · per_layer_token_embd[token] + norm(per_layer_model_proj x / √n_embd)) / √2

    llama.cpp applies no adapter to the table, which is open to none, nor to the matrix.
    """

    n_vocab: int
    n_embd: int
    n_layer: int
    n: int
    norm: Norm

    branch = ""

    def tensors(self, at: str) -> Tensors:
        width = self.n_layer * self.n
        ours = {f"{at}per_layer_token_embd.weight": TensorSpec((self.n_vocab, width))}
        projection = latent_matrix(f"{at}per_layer_model_proj", width, self.n_embd)
        return merge_tensors([ours, projection, self.norm.tensors(at)])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        table = net.weights[f"{at}per_layer_token_embd.weight"]
        shape = (x.shape[0], self.n_layer, self.n)
        own = scale(reshape(get_rows(table, net.inputs.tokens), shape), self.n**0.5)
        rows = reshape(scale(self._projection(net, at, x), self.n_embd**-0.5), shape)
        net.leave(INPUTS, scale(add(self.norm(net, at, rows), own), 0.5**0.5).named(INPUTS))
        return x

    def _projection(self, net: Net, at: str, x: Tensor) -> Tensor:
        full = f"{at}per_layer_model_proj.weight"
        y = mul_mat(net.weights[full], x)
        for p in net.updates(full):
            down = scale(mul_mat(p.a, p.input(x, net.inputs.draw)), p.scale)
            y = mul_mat_add(y, p.b, down)
        return y


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInput(Part):
    """norm(proj(gelu(inp_gate x) · the layer's input))."""

    layer: int
    n_embd: int
    n: int
    norm: Norm

    branch = "per_layer_out"

    def tensors(self, at: str) -> Tensors:
        gate = matrix(f"{at}inp_gate", self.n, self.n_embd, bias=False)
        proj = matrix(f"{at}proj", self.n_embd, self.n, bias=False)
        return merge_tensors([gate, proj, self.norm.tensors(at)])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        gate = net.linear(f"{at}inp_gate", x)
        own = reshape(narrow(net.earlier(INPUTS), 1, self.layer, 1), gate.shape)
        return self.norm(net, at, net.linear(f"{at}proj", geglu(gate, own)))


def per_layer_inputs(b: Basics, n: int) -> PerLayerInputs:
    """The inputs of all layers of a model, n numbers of each layer and token."""
    c = b.config
    norm = RmsNorm("per_layer_proj_norm", n, b.norm("").eps)
    return PerLayerInputs(n_vocab=c.n_vocab, n_embd=c.n_embd, n_layer=c.n_layer, n=n, norm=norm)
