"""Model files and what lies beside them: vocabularies, adapters, checkpoints, PEFT's folders."""

import functools
from typing import Any

import numpy as np

from attacks.targets.target import GGUF_WORDS, JSON_WORDS, Target, folder, gguf_bytes, write_input
from attacks.targets.templates import TEMPLATE
from pyggml import gguf

# -- GGUF ---------------------------------------------------------------------------------------

_TENSORS = {"a.weight": np.ones((2, 32), np.float32), "b": np.zeros(3, np.float32)}
_VALUES = {
    "general.architecture": "llama",
    "a": np.uint8(1),
    "b": np.float32(0.5),
    "c": True,
    "d": np.arange(5, dtype=np.int16),
    "e": ["x", "", "日本"],
    "general.alignment": np.uint32(32),
}


def _read_gguf(data: bytes) -> None:
    with gguf.open(write_input(data, "file.gguf")) as file:
        for field in file.metadata.values():
            _ = repr(field.value)[:100]
        for name in file.tensors:
            _ = np.array(file.data(name)).sum()


def _gguf_seeds() -> list[bytes]:
    plain = gguf_bytes(_VALUES, _TENSORS)
    return [plain, gguf_bytes({"general.architecture": "x"}, {}), _as_version_2(plain)]


def _as_version_2(data: bytes) -> bytes:
    return data[:4] + (2).to_bytes(4, "little") + data[8:]


def _read_parts(data: bytes) -> None:
    """A model in two files, of which the input holds one after the other, cut in the middle."""
    half = len(data) // 2
    first = write_input(data[:half], "model-00001-of-00002.gguf")
    write_input(data[half:], "model-00002-of-00002.gguf")
    with gguf.open(first) as file:
        for name in file.tensors:
            _ = np.array(file.data(name)).sum()


def _parts_seeds() -> list[bytes]:
    parts = []
    for i, (name, array) in enumerate(_TENSORS.items()):
        numbers = {"split.no": np.uint16(i), "split.count": np.uint16(2)}
        more = {"split.tensors.count": np.int32(2)}
        parts.append(gguf_bytes({"general.architecture": "llama"} | numbers | more, {name: array}))
    longest = max(map(len, parts))
    return [b"".join(part.ljust(longest, b"\0") for part in parts)]


# -- vocabularies, and the texts they meet ------------------------------------------------------


def _vocabulary(kind: str) -> dict[str, Any]:
    letters = [c for c in map(chr, range(33, 127)) if c != "\\"]
    tokens = [*letters, "▁", "Ġ", "th", "the", "<s>", "</s>", "<unk>"]
    n = len(tokens)
    types = [1] * (n - 3) + [3, 3, 2]
    if byte := {"llama": "<0x{:02X}>", "rwkv": "\\x{:02x}"}.get(kind):  # these want all bytes
        tokens += [byte.format(i) for i in range(256)]
        types += [6 if kind == "llama" else 1] * 256
    about = {"model": kind, "pre": "qwen2", "tokens": tokens, "merges": ["t h", "th e"]}
    about |= {"token_type": np.array(types, np.int32), "bos_token_id": n - 3}
    about |= {"eos_token_id": n - 2, "unknown_token_id": n - 1}
    about |= {"seperator_token_id": n - 2}  # as the format spells it
    about |= {"scores": -np.arange(len(tokens), dtype=np.float32)}
    return {f"tokenizer.ggml.{key}": value for key, value in about.items()}


_KINDS = ("gpt2", "llama", "gemma4", "t5", "bert", "rwkv", "whitespace")
_TEXT = "The cat sat.  1234\n\t日本語 the <s> é🙂</s>"


def _read_vocabulary(data: bytes) -> None:
    from pyggml.tokenizer import from_gguf

    tokenizer = from_gguf(write_input(data, "vocabulary.gguf"))
    tokenizer.decode(tokenizer.encode(_TEXT))


def _vocabulary_seeds() -> list[bytes]:
    return [gguf_bytes(_vocabulary(kind), {}) for kind in _KINDS]


@functools.cache
def _tokenizers() -> tuple[Any, ...]:
    from pyggml.tokenizer import from_metadata

    return tuple(from_metadata(_vocabulary(kind)) for kind in _KINDS)


def _read_text(data: bytes) -> None:
    text = data.decode(errors="replace")
    for tokenizer in _tokenizers():
        tokenizer.decode(tokenizer.encode(text))


# -- adapters, checkpoints, PEFT ----------------------------------------------------------------


def small_model(width: int, n_blocks: int) -> bytes:
    """The file of a llama with drawn weights, a vocabulary of letters and a chat template."""
    from pyggml.models import ARCHITECTURES, draw, small_metadata, tensors_of

    sizes = {"context_length": 256, "embedding_length": width, "feed_forward_length": width}
    metadata = small_metadata(ARCHITECTURES["llama"], sizes | {"block_count": n_blocks})
    metadata |= _vocabulary("gpt2") | {"tokenizer.chat_template": TEMPLATE}
    rng = np.random.default_rng(0)
    specs = tensors_of(metadata, len(metadata["tokenizer.ggml.tokens"]))
    arrays = {n: draw(n, s.shape, rng) for n, s in specs.items() if not s.optional}
    return gguf_bytes(metadata, {n: a / np.float32(8) for n, a in arrays.items()})


@functools.cache
def model() -> Any:
    """A small model, loaded."""
    import pyggml

    return pyggml.load(write_input(small_model(width=32, n_blocks=1), "model.gguf"))


@functools.cache
def _adapter() -> Any:
    from pyggml.lora import LoraConfig, attach

    return attach(model(), LoraConfig(rank=2, modules=("attn_q",)))


def _adapter_seeds() -> list[bytes]:
    path = folder() / "adapter.gguf"
    _adapter().save(path)
    return [path.read_bytes()]


def _read_adapter(data: bytes) -> None:
    model().with_adapter_files(write_input(data, "read.gguf"))


def _read_peft_settings(data: bytes) -> None:
    from pyggml.lora.peft import settings

    settings.read(write_input(data, f"peft/{settings.NAME}").parent)


def _read_safetensors(data: bytes) -> None:
    from pyggml.lora.peft import tensors

    tensors.read(write_input(data, f"peft/{tensors.NAME}").parent, 1 << 20)


def _peft_seeds(name: str) -> list[bytes]:
    from pyggml.lora.peft import to_peft

    source, made = folder() / "adapter.gguf", folder() / "peft-made"
    _adapter().save(source)
    if not made.exists():
        to_peft(model(), source, made)
    return [(made / name).read_bytes()]


def _read_checkpoint(data: bytes) -> None:
    from pyggml.lora.trainer import checkpoint

    checkpoint.load(write_input(data, "checkpoint.gguf"), *_run())


@functools.cache
def _run() -> tuple[Any, ...]:
    from pyggml.lora.trainer.arithmetic import RunArithmetic

    return (
        {"parameters": np.zeros(8, np.float32)},
        {"train": {"lr": 1e-3}},
        RunArithmetic.by(model()),
    )


def _checkpoint_seeds() -> list[bytes]:
    from pyggml.lora.trainer import checkpoint
    from pyggml.lora.trainer.reports import History

    buffers, run, arithmetic = _run()
    path = folder() / "saved.gguf"
    progress = checkpoint.Progress(3, 0, 3)
    checkpoint.save(path, buffers, progress, History(), run, arithmetic)
    return [path.read_bytes()]


TARGETS = (
    Target("gguf", "model files", _read_gguf, _gguf_seeds, GGUF_WORDS),
    Target("split", "models in two files", _read_parts, _parts_seeds, GGUF_WORDS),
    Target("vocabulary", "tokenizers", _read_vocabulary, _vocabulary_seeds, GGUF_WORDS),
    Target("text", "texts for tokenizers", _read_text, lambda: [_TEXT.encode()]),
    Target("adapter", "adapters", _read_adapter, _adapter_seeds, GGUF_WORDS),
    Target("checkpoint", "checkpoints", _read_checkpoint, _checkpoint_seeds, GGUF_WORDS),
    Target(
        "peft-settings",
        "adapter_config.json",
        _read_peft_settings,
        functools.partial(_peft_seeds, "adapter_config.json"),
        (*JSON_WORDS, b'"rank_pattern"', b"(a+)+$", b'"modules_to_save"'),
    ),
    Target(
        "safetensors",
        "adapter_model.safetensors",
        _read_safetensors,
        functools.partial(_peft_seeds, "adapter_model.safetensors"),
        (b'"data_offsets"', b'"shape"', b'"dtype"', b"BF16", b"__metadata__"),
    ),
)
