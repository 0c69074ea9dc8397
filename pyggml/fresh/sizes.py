"""Hyperparameters of a model of about so many parameters.

The width is a multiple of the size of a head, and a layer comes with each head or so: width / depth
is 40 to 96, as in GPT-2 (64), Pythia (64 to 128) and Llama (80 to 128). There are as many layers as
in the architecture's example at least, one of each kind: llama.cpp ends the process over a hybrid
without attention, or without a window. A feed-forward part has about 8 · width² numbers: 4 · width
with two matrices, 8/3 · width with three (Shazeer 2020).

Parts of some architectures follow the head's size h as in the models that brought them:

latent attention   vectors of 4h for keys and values, h/2 rotated features beside h (DeepSeek-V2,
                   arXiv:2405.04434: h is 128, section 3.1.2), 3/10 of the width for queries: 1,536
                   of 5,120 there, 768 of 2,560 in MiniCPM3
gated delta nets   2 · width channels in heads of h, half as many heads of keys (Qwen3-Next-80B: 32
                   and 16 of 128, width 2,048)
rotary sections    time, height and width by turns (Qwen3.5: 11, 11 and 10 pairs)
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pyggml.errors import ConfigError, ModelError, suggestion
from pyggml.fresh import rwkv
from pyggml.models import ARCHITECTURES, small_metadata, tensors_of
from pyggml.models.architecture import Architecture
from pyggml.models.build import compose
from pyggml.models.config import full_key
from pyggml.models.weights import TensorSpec
from pyggml.sizes import round_up

_HEAD, _SMALL_HEAD, _SMALL_WIDTH = 64, 32, 256
_FLATTEST, _DEEPEST = 96, 40  # width / depth
_GATED = "blk.0.ffn_gate.weight"
_OF_A_HEAD = "attention.key_length", "attention.value_length", "rope.dimension_count"
_OUTPUT = "output.weight"
# Optional here, as some files lack them; llama.cpp loads no file without them.
_IN_LLAMA_CPP = dict.fromkeys(
    ("gpt2", "gptneox", "starcoder", "starcoder2", "bloom", "codeshell", "jais", "jais2"),
    r"blk\..*\.bias",
) | {
    "gemma4": r"rope_freqs\.weight",
    "gpt-oss": r"blk\..*attn_\w+\.bias",
    "phi2": r".*\.bias",
    "qwen": r".*attn_qkv\.bias",
    "pangu-embedded": r".*attn_\w+\.bias",
    "phimoe": r"output\.bias|.*attn_output\.bias",
    "rwkv7": r"blk\.0\.time_mix_v[012]\.weight",
}
_UNTIED = ("internlm2",)  # llama.cpp wants an output matrix
_REQUIRED = {"gptneox": {"use_parallel_residual": True}}  # by llama.cpp, which has no default
_DEPTH, _INNER, _RANK = "block_count", "ssm.inner_size", "ssm.time_step_rank"
_LATENT, _LATENT_OF_QUERIES = "attention.kv_lora_rank", "attention.q_lora_rank"
_AS_ONE_HEAD = "attention.key_length_mla"  # the latent vectors are the keys and values of one head
_DELTA_NET, _KDA = "attention.recurrent_layers", "kda.head_dim"
_SECTIONS = "rope.dimension_sections"
_HEADS, _KEY_HEADS = "attention.head_count", "attention.head_count_kv"
_DEPTH_OF_EXAMPLES = 2
_ONLY_DEPTH = {"baichuan": 32}  # by others llama.cpp turns nothing: it has no positions then
_FIRST_MAMBAS = "mamba", "jamba"
_MOST_WIDTH = 1 << 14
_FILE_TYPE = "general.file_type"  # which follows from what is written
Metadata = dict[str, object]


def hyperparameters(
    architecture: str,
    n_params: int,
    n_vocab: int,
    n_ctx: int,
    tied: bool = True,
    keys: Mapping[str, object] | None = None,
) -> Metadata:
    """GGUF keys of a model whose number of parameters is next to n_params.

    n_ctx  tokens of its context
    tied   whether the embedding is the output matrix, where the architecture lets it be
    keys   by their whole names: they are taken as given, and the others fit them

    Raises ConfigError for an unknown architecture, for one that has no sizes by the number of
    parameters alone, for so few parameters that the embedding of n_vocab tokens leaves none for a
    layer, and for keys that nothing reads.
    """
    if architecture not in ARCHITECTURES:
        near = suggestion(architecture, ARCHITECTURES) or f": known are {', '.join(ARCHITECTURES)}"
        raise ConfigError(f"architecture {architecture!r}{near}")
    sizer = _Sizer(ARCHITECTURES[architecture], n_vocab, n_ctx, tied, keys or {})
    sized = sizer.near(n_params)
    best = min(sized, key=lambda of: abs(of[0] - n_params), default=None)
    is_near = best is not None and (sizer.is_sized or abs(best[0] - n_params) <= n_params / 2)
    if best is None or (not is_near and sizer.fault and keys):
        if keys:
            raise ConfigError(f"no {architecture} has these keys: {sizer.fault}")
        raise ConfigError(
            f"{architecture} has no sizes by the number of parameters alone ({sizer.fault}): give "
            "its hyperparameters by their keys"
        )
    if not is_near:
        raise ConfigError(
            f"{n_params:,} parameters are too few or too many: with {n_vocab:,} tokens the nearest "
            f"{architecture} has {best[0]:,}"
        )
    _check_keys(keys or {}, best[1], n_vocab)
    return best[1]


def _check_keys(keys: Mapping[str, object], metadata: Metadata, n_vocab: int) -> None:
    """ConfigError for keys that a model with this metadata does not read, but for what files say of
    themselves, and for a number of tokens that is another."""
    architecture, read = str(metadata["general.architecture"]), set[str]()

    def get(key: str) -> object:
        read.add(key)
        return metadata.get(key)

    compose(get, {"token_embd.weight": (n_vocab, 0)}, "metadata")
    own = f"{architecture}.vocab_size"
    if keys.get(own, n_vocab) != n_vocab:
        raise ConfigError(f"{own} is {keys[own]}, but the vocabulary has {n_vocab} tokens")
    free = read | {own} | {k for k in keys if k.startswith("general.") and k != _FILE_TYPE}
    for key in keys.keys() - free:
        near = "" if key == _FILE_TYPE else suggestion(key, read)
        raise ConfigError(f"{key} is no hyperparameter that {architecture} reads{near}")


def count(metadata: Mapping[str, object], n_vocab: int, tied: bool = True) -> int:
    """The number of parameters of a fresh model with these keys."""
    tensors, name = tensors_of(metadata, n_vocab), str(metadata["general.architecture"])
    return sum(math.prod(s.shape) for full, s in tensors.items() if is_there(name, full, s, tied))


def is_there(architecture: str, name: str, spec: TensorSpec, tied: bool) -> bool:
    """Whether a fresh model has this tensor: all that are required, here or in llama.cpp, and no
    other but an output matrix of its own."""
    if not spec.optional:
        return True
    required_there = re.fullmatch(_IN_LLAMA_CPP.get(architecture, ""), name) is not None
    return required_there or (name == _OUTPUT and not (tied and architecture not in _UNTIED))


class _Sizer:
    """The models of one architecture by width and depth."""

    def __init__(
        self, of: Architecture, n_vocab: int, n_ctx: int, tied: bool, keys: Mapping[str, object]
    ) -> None:
        self._of, self._n_vocab, self._n_ctx = of, n_vocab, n_ctx
        self._tied, self._keys = tied, dict(keys)
        self._n_example: Any = of.example.get(_DEPTH, _DEPTH_OF_EXAMPLES)
        self.fault = ""

    @property
    def is_sized(self) -> bool:
        """Whether the keys name the width or the depth themselves."""
        return not self._keys.keys().isdisjoint(map(self._full, ("embedding_length", _DEPTH)))

    def _full(self, key: str) -> str:
        return full_key(self._of.name, key)

    def near(self, n_params: int) -> list[tuple[int, Metadata]]:
        """Numbers of parameters, and keys, of models of about so many: of the narrowest width whose
        flattest model has more, and of the two before it, with all depths that go with them."""
        last: list[int] = []
        for width in self._widths():
            flattest = self._sized(width, self._depths(width)[0])
            last = [*last[-2:], width]
            if flattest[0][0] >= n_params if flattest else width > _SMALL_WIDTH:
                break
        return [of for width in last for n in self._depths(width) for of in self._sized(width, n)]

    def _widths(self) -> Iterator[int]:
        """The widths to try, in rising order, that the keys' heads share; that of the keys alone,
        if they name one."""
        own = self._keys.get(self._full("embedding_length"))
        if isinstance(own, int):
            yield own
            return
        width, n = _SMALL_HEAD, self._keys.get(self._full("attention.head_count"))
        n_heads = max(n, 1) if isinstance(n, int) else 1
        while width <= _MOST_WIDTH:
            if width % n_heads == 0:
                yield width
            width += _SMALL_HEAD if width < _SMALL_WIDTH else round_up(width // 16, _HEAD)

    def _sized(self, width: int, n_layer: int) -> list[tuple[int, Metadata]]:
        """The number of parameters, and the keys; [] if the architecture has no such model."""
        try:
            metadata = self._metadata(width, n_layer)
            return [(count(metadata, self._n_vocab, self._tied), metadata)]
        except ModelError as error:
            self.fault = str(error)
            return []

    def _metadata(self, width: int, n_layer: int) -> Metadata:
        head = _HEAD if width >= _SMALL_WIDTH else _SMALL_HEAD
        example, heads = self._of.example, self._heads(width, head)
        sizes: Metadata = {
            "context_length": self._n_ctx,
            "embedding_length": width,
            _DEPTH: n_layer,
            _HEADS: heads,
            _KEY_HEADS: heads,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "attention.layer_norm_epsilon": 1e-5,
        }
        sizes |= _latent(example, width, head) or {k: head for k in _OF_A_HEAD if k in example}
        if _INNER in example:
            sizes |= {_INNER: 2 * width, _RANK: _rank(self._of.name, width)}
        if _DELTA_NET in example:
            n_values = 2 * width // head
            sizes |= {"ssm.state_size": head, _RANK: n_values, "ssm.group_count": n_values // 2}
        if _SECTIONS in example and _OF_A_HEAD[2] in example:
            by_turns = [len(range(of, head // 2, 3)) for of in range(3)]
            sizes[_SECTIONS] = np.array([*by_turns, 0], np.int32)
        if "attention.sliding_window" in example:
            sizes["attention.sliding_window"] = max(1, self._n_ctx // 4)
        n_ff = 4 * width
        sizes["feed_forward_length"] = n_ff
        if _GATED in tensors_of(self._with(sizes), self._n_vocab):
            n_ff = round_up(8 * width // 3, _SMALL_HEAD)
        sizes["feed_forward_length"] = n_ff
        if "expert_feed_forward_length" in example:
            sizes["expert_feed_forward_length"] = round_up(n_ff // 2, _SMALL_HEAD)
        if self._of.name in (rwkv.SIX, rwkv.SEVEN):
            sizes |= rwkv.sizes(self._of.name, width)
        return self._with(sizes)

    def _depths(self, width: int) -> range:
        """The numbers of layers that go with a width; that of the keys alone, if they name one."""
        own = self._keys.get(self._full(_DEPTH))
        if type(own) is int and own > 0:
            return range(own, own + 1)
        if only := _ONLY_DEPTH.get(self._of.name):
            return range(only, only + 1)
        width, least = min(width, _MOST_WIDTH), self._n_example
        return range(max(least, width // _FLATTEST), max(least, width // _DEEPEST) + 1)

    def _heads(self, width: int, head: int) -> int:
        """Their number: that of the keys, or as many of this size as the width has. ModelError if
        they share it unevenly and have no size of their own."""
        n, own = (self._keys.get(self._full(k)) for k in ("attention.head_count", _OF_A_HEAD[0]))
        if not isinstance(n, int):
            return width // head
        if own is None and _OF_A_HEAD[0] not in self._of.example and width % max(n, 1):
            raise ModelError(f"{n} heads cannot share embedding_length {width} evenly")
        return n

    def _with(self, sizes: Mapping[str, Any]) -> Metadata:
        """Keys of these sizes. What the architecture's example has by layer goes on as there, but
        layers with key heads, or with a feed-forward part, have as many as the sizes say."""
        by_layer = {
            k: np.resize(v, sizes[_DEPTH])
            for k, v in self._of.example.items()
            if isinstance(v, np.ndarray) and v.shape == (self._n_example,)
        }
        for key in {_KEY_HEADS, "feed_forward_length"} & by_layer.keys():
            if key in sizes and _HEADS not in by_layer:
                by_layer[key] = np.sign(by_layer[key]) * np.int32(sizes[key])
        required = _REQUIRED.get(self._of.name, {})
        return small_metadata(self._of, {**required, **sizes, **by_layer}) | self._keys


def _latent(example: Mapping[str, object], width: int, head: int) -> Metadata:
    """The sizes of latent attention with heads of these; {} for an architecture without it."""
    if _LATENT not in example:
        return {}
    rank, rotated, of_queries = 4 * head, head // 2, round_up(3 * width // 10, _SMALL_HEAD)
    sizes: Metadata = {_LATENT: rank, "rope.dimension_count": rotated}
    sizes |= {"attention.key_length": head + rotated, "attention.value_length": head}
    if _AS_ONE_HEAD in example:
        own = {"attention.key_length": rank + rotated, "attention.value_length": rank}
        mla = {f"{key}_mla": sizes[key] for key in own}
        sizes |= {**own, **mla, _KEY_HEADS: 1}
    if _LATENT_OF_QUERIES in example:
        sizes[_LATENT_OF_QUERIES] = of_queries
    return sizes | ({_KDA: head} if _KDA in example else {})


def _rank(architecture: str, width: int) -> int:
    """ssm.time_step_rank: in Mamba a sixteenth of the width (Gu, Dao 2023), after Mamba 2 the
    number of heads of 64 channels (Dao, Gu 2024)."""
    return -(-width // 16) if architecture in _FIRST_MAMBAS else max(1, 2 * width // 64)
