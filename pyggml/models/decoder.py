"""A decoder: token embedding, blocks, last norm and output matrix."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

from pyggml.errors import ConfigError, ModelError
from pyggml.graph.op import Spec
from pyggml.graph.tensor import Tensor
from pyggml.models.classifier import Classifier
from pyggml.models.config import ModelConfig
from pyggml.models.net import Net
from pyggml.models.part import Part
from pyggml.models.weights import Tensors, TensorSpec, merge_tensors
from pyggml.ops import add, get_rows, scale, tanh, uniform_noise


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps its list of tensors
class Decoder:
    """A model without its weights: an architecture's parts with a file's hyperparameters.

    norm              what follows the last block, or None: a norm, most often
    prelude           what follows the embedding, before the blocks, or None: a norm, most often
    n_turns           times that all blocks run, each time with keys of their own
    between           what follows the last block before the first runs again, or None
    embedding_scale   factor of the token embeddings
    n_positions       rows of the learned position embedding, added to the tokens'; 0 for none
    tied              the token embedding may serve as the output matrix
    logit_scale       factor of the logits
    logit_softcap     logits become cap · tanh(logits / cap); 0 for none
    adapts_output     llama.cpp applies an adapter's update of the output matrix
    has_output        it predicts tokens; an encoder embeds texts and does not
    classifier        what scores the vector of a text, or None
    dense             what follows the pooling of a text, or None
    unread            tensors that llama.cpp loads and does not use; those of all blocks by what
                      follows a dot
    """

    config: ModelConfig
    blocks: tuple[Part, ...]
    norm: Part | None
    prelude: Part | None = None
    n_turns: int = 1
    between: Part | None = None
    embedding_scale: float = 1.0
    n_positions: int = 0
    tied: bool = True
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    adapts_output: bool = True
    has_output: bool = True
    classifier: Classifier | None = None
    dense: Part | None = None
    unread: tuple[str, ...] = ()

    def tensors(self) -> Tensors:
        """Every tensor of a model file, required or optional."""
        return self._tensors

    @cached_property
    def _tensors(self) -> Tensors:
        c = self.config
        outer = {"token_embd.weight": TensorSpec((c.n_vocab, c.n_embd), table=True)}
        if self.n_positions:
            outer["position_embd.weight"] = TensorSpec((self.n_positions, c.n_embd))
        blocks = (block.tensors(f"blk.{i}.") for i, block in enumerate(self.blocks))
        tensors = merge_tensors(
            [
                outer,
                self.prelude.tensors("") if self.prelude else {},
                *blocks,
                self.norm.tensors("") if self.norm else {},
                self._output() if self.has_output else {},
                *(part.tensors("") for part in (self.classifier, self.dense) if part),
            ]
        )
        return {name: spec for name, spec in tensors.items() if not self._is_passed_over(name)}

    def _output(self) -> Tensors:
        shape = self.config.n_vocab, self.config.n_embd
        return {
            "output.weight": TensorSpec(
                shape, optional=self.tied, linear=True, applied=self.adapts_output
            ),
            "output.bias": TensorSpec(shape[:1], optional=True),
        }

    def parts(self) -> Iterator[Part]:
        """All parts of the blocks, each before those that it is made of."""
        waiting = [*reversed(self.blocks)]
        while waiting:
            yield (part := waiting.pop())
            waiting += reversed(part.inner)

    def is_unread(self, name: str) -> bool:
        """Whether a tensor is passed over: it belongs to a block for the prediction of further
        tokens, one of the file's last, or is one of `unread`."""
        c = self.config
        further = tuple(f"blk.{i}." for i in range(c.n_layer, c.n_blocks))
        return name.startswith(further) or self._is_passed_over(name)

    def _is_passed_over(self, name: str) -> bool:
        return name in self.unread or name.endswith(tuple(f".{end}" for end in self.unread))

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the blocks' linear modules, in order of use. Adapters can target these."""
        return self._modules(lambda spec: spec.linear)

    @property
    def usual_modules(self) -> tuple[str, ...]:
        """The modules that adapters target by default: all but routers and experts."""
        return self._modules(lambda spec: spec.linear and spec.usual)

    def _modules(self, chooses: Callable[[TensorSpec], bool]) -> tuple[str, ...]:
        names = (n for n, spec in self.tensors().items() if chooses(spec) and n.startswith("blk."))
        modules = (name.split(".", 2)[2].removesuffix(".weight") for name in names)
        return tuple(dict.fromkeys(modules))

    def rows(self) -> Mapping[str, tuple[int, int]]:
        """What a cache keeps of each token, such as its keys: name -> heads, numbers of a head."""
        blocks = [block.rows(f"blk.{i}.") for i, block in enumerate(self.blocks)]
        rows = [row for rows in blocks for row in rows.items()]
        return {f"{turn}{name}": heads for turn in self._turns for name, heads in rows}

    def state(self) -> Mapping[str, Spec]:
        """What recurrent parts keep of all earlier tokens together: name -> shape and type."""
        blocks = (block.state(f"blk.{i}.") for i, block in enumerate(self.blocks))
        return dict(one for state in blocks for one in state.items())

    def shift(self, net: Net) -> tuple[Tensor, ...]:
        """What moves rows of all blocks in the cache."""
        moved: list[Tensor] = []
        for net.turn in self._turns:
            for i, block in enumerate(self.blocks):
                moved += block.shift(net, f"blk.{i}.")
        return tuple(moved)

    @property
    def _turns(self) -> tuple[str, ...]:
        """What precedes names each time that the blocks run."""
        return "", *(f"turn.{i}." for i in range(1, self.n_turns))

    def hidden(self, net: Net, scaled: bool = True) -> Tensor:
        """Hidden states (T, n_embd) after the last norm, scaled by logit_scale: the input of the
        output matrix. Texts are embedded by those that are not scaled."""
        x = net.boundary(self._embed(net))
        for net.turn in self._turns:
            x = self.between(net, "", x) if net.turn and self.between else x
            for i, block in enumerate(self.blocks):
                x = net.tap(f"blk.{i}.out", block(net, f"blk.{i}.", x).named(f"blk.{i}.out"))
                x = net.boundary(x)
        net.turn = ""
        return self.last(net, x, scaled)

    def last(self, net: Net, x: Tensor, scaled: bool = True) -> Tensor:
        """The residual stream x (T, n_embd) after the last norm, times logit_scale if scaled."""
        if self.norm:
            x = self.norm(net, "", x)
        return scale(x, self.logit_scale) if scaled and self.logit_scale != 1 else x

    def _embed(self, net: Net) -> Tensor:
        x = net.rows("token_embd", net.inputs.tokens)
        if net.inputs.noise is not None and net.inputs.draw is not None:
            x = uniform_noise(x, net.inputs.noise, net.inputs.draw, crc32(b"token_embd"))
        if self.embedding_scale != 1:
            x = scale(x, self.embedding_scale)
        if self.n_positions:
            if net.n_ctx > self.n_positions:
                raise ConfigError(
                    f"a context of {net.n_ctx} tokens, wanted at most {self.n_positions}: the "
                    "model has learned no further positions"
                )
            x = add(x, get_rows(net.weights["position_embd.weight"], net.inputs.positions))
        return self.prelude(net, "", x) if self.prelude else x

    def logits(self, net: Net, h: Tensor) -> Tensor:
        """Logits (T, n_vocab) of hidden states. The bias is output.bias, even if the matrix is
        the token embedding. Raises ModelError for an encoder, which has none."""
        if not self.has_output:
            raise ModelError(
                f"{self.config.architecture} is an encoder: it embeds texts (`embed`) and predicts "
                "no token"
            )
        name = output_name(net.weights)
        z = net.linear(name, h, tap="output")
        bias = net.weights.get("output.bias") if name != "output" else None
        z = z if bias is None else add(z, bias)
        cap = self.logit_softcap
        return net.tap("logits", scale(tanh(scale(z, 1 / cap)), cap) if cap else z)


def output_name(weights: Mapping[str, Tensor]) -> str:
    """Name of the output matrix: "output", or "token_embd" where the two are tied."""
    return "output" if "output.weight" in weights else "token_embd"
