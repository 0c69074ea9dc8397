"""The parsers of foreign bytes: how each is given an input, its seeds, and what it may raise.

A seed is an input that a parser reads to its end. Each is made by the library's own writers, so
that it follows the formats as they change.
"""

import atexit
import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyggml import gguf
from pyggml.errors import PyggmlError
from pyggml.graph.dtypes import F32

Read = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Target:
    """A parser.

    read       gives it an input
    seeds      makes inputs that it reads whole
    words      parts of its format that mutation puts in
    refusals   what it may raise
    """

    name: str
    about: str
    read: Read
    seeds: Callable[[], list[bytes]]
    words: tuple[bytes, ...] = ()
    refusals: tuple[type[Exception], ...] = (PyggmlError,)


@functools.cache
def folder() -> Path:
    """A folder of this process, in memory where the system has such."""
    memory = Path("/dev/shm")
    made = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
    atexit.register(made.cleanup)
    return Path(made.name)


def write_input(data: bytes, name: str) -> Path:
    """A file with these bytes."""
    path = folder() / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a GGUF file."""
    path = folder() / "written.gguf"
    gguf.write(path, metadata, [(name, F32, a.shape, a) for name, a in tensors.items()])
    return path.read_bytes()


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
_GGUF_WORDS = (b"GGUF", b"general.alignment", b"split.count", b"split.no", b"tensor")


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
    metadata |= _vocabulary("gpt2") | {"tokenizer.chat_template": _TEMPLATE}
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
    from pyggml.lora.trainer.arithmetic import Arithmetic

    return {"parameters": np.zeros(8, np.float32)}, {"train": {"lr": 1e-3}}, Arithmetic.by(model())


def _checkpoint_seeds() -> list[bytes]:
    from pyggml.lora.trainer import checkpoint
    from pyggml.lora.trainer.reports import History

    buffers, run, arithmetic = _run()
    path = folder() / "saved.gguf"
    progress = checkpoint.Progress(3, 0, 3)
    checkpoint.save(path, buffers, progress, History(), run, arithmetic)
    return [path.read_bytes()]


# -- rows, settings, importances, records -------------------------------------------------------


def _read_rows(suffix: str) -> Read:
    def read(data: bytes) -> None:
        from pyggml.lora.data.files import read_rows

        read_rows(write_input(data, f"rows{suffix}"))

    return read


_ROWS = (
    {"text": "one two"},
    {"prompt": "a", "completion": "b", "weight": 0.5},
    {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [{"type": "text", "text": "y"}], "train": True},
        ]
    },
    {"instruction": "i", "input": "", "output": "o"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
)
_NAMES = ("text", "messages", "role", "content", "tool_calls", "weight", "train", "label")
_JSON_WORDS = (
    *(f'"{name}"'.encode() for name in _NAMES),
    b"null",
    b"NaN",
    b"1e999",
    b"[[[[",
    b'{"a":',
    b"\\ud800",
    b"\r\n",
    b"-0",
)


def _lines_seeds() -> list[bytes]:
    return [json.dumps(row).encode() + b"\n" for row in _ROWS]


def _parquet_seeds() -> list[bytes]:
    import pyarrow
    import pyarrow.parquet

    path = folder() / "rows-seed.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), path)
    return [path.read_bytes()]


def _read_settings(data: bytes) -> None:
    from pyggml.cli.commands.finetune import config_file
    from pyggml.cli.commands.finetune.command import command

    config_file.read(write_input(data, "run.yaml"), command.params)


def _read_importances(data: bytes) -> None:
    from pyggml.requantize.imatrix import read_imatrix

    read_imatrix(write_input(data, "imatrix.dat"))


def _importances_seeds() -> list[bytes]:
    name = b"blk.0.attn_q.weight"
    entry = len(name).to_bytes(4, "little") + name + (1).to_bytes(4, "little")
    numbers = np.ones(4, "<f4").tobytes()
    old = (1).to_bytes(4, "little") + entry + (4).to_bytes(4, "little") + numbers
    sums = {"a.in_sum2": np.ones((1, 4), np.float32), "a.counts": np.ones((1, 1), np.float32)}
    return [old, gguf_bytes({"general.type": "imatrix", "imatrix.chunk_count": np.uint32(1)}, sums)]


def _read_records(data: bytes) -> None:
    from pyggml.lora.record.gradients import overview_of
    from pyggml.lora.record.metrics import read_records

    overview_of(read_records(write_input(data, "metrics.jsonl")))


_RECORDS = (
    b'{"event": "step", "step": 1, "loss": 2.5}\n{"event": "validation", "step": 1, "loss": 2}\n'
)

# -- templates ----------------------------------------------------------------------------------

_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson(indent=2) }}{% endif %}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_FILTERS = (
    "{% set ns = namespace(a=0) %}{% for i in range(9) %}{% set ns.a = ns.a + loop.index %}"
    "{% endfor %}{{ ns.a }}{{ 'a'.upper() ~ 'x' * 3 }}{{ messages | length }}"
    "{{ '%s' % 3 }}{{ messages | map(attribute='role') | join(', ') | replace('u', 'U') }}"
    "{% macro f(x) %}{{ x[:3] }}{% endmacro %}{{ f('abcdef') }}{{ messages[-1].content.split() }}"
    "{{ 'a' | indent(4) }}{{ raise_exception('no') if false else '' }}{{ strftime_now('%Y') }}"
)
_TEMPLATE_WORDS = (
    b"{{", b"}}", b"{%", b"%}", b"{% for i in range(999999999) %}", b"|indent(10**11)", b"*10**9",
    b".format(", b"'%9999999d' % 1", b"|tojson(indent=99999)", b"__class__", b"|attr('__init__')",
    b"|batch(3)", b"|groupby('role')", b"|sum", b"**", b"{% set x = [x] %}", b"|center(99999999)",
    b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", b"|replace('', 'aaaaaaaaaa')",
)  # fmt: skip
_MESSAGES = (
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "a <b> & \"c\" 日本"},
    {"role": "assistant", "content": "yes", "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
    {"role": "tool", "content": "{\"t\": 12}"},
)  # fmt: skip


def _read_template(data: bytes) -> None:
    from pyggml.chat.template import ChatTemplate

    template = ChatTemplate(data.decode(errors="replace"), "template", {"bos_token": "<s>"})
    template.render(_MESSAGES, add_generation_prompt=True)


# -- HTTP ---------------------------------------------------------------------------------------


@functools.cache
def _client(command: str) -> Any:
    from starlette.testclient import TestClient

    client = TestClient(_APPS[command](), "http://localhost")
    client.__enter__()  # its life ends with the process
    return client


def serve_app() -> Any:
    """`pyggml serve` of the small model."""
    from pyggml.chat import find_template
    from pyggml.cli.commands.serve.app import make_app
    from pyggml.cli.commands.serve.limits import Limits
    from pyggml.cli.commands.serve.service import Chats, Service
    from pyggml.cli.web.guard import Access
    from pyggml.generation import Batch, Sampling
    from pyggml.generation.serving import Scheduler, Worker

    base, limits = model(), Limits(parallel=2, max_tokens=2)
    worker = Worker(Scheduler(Batch(base, 2, 256)), limits.parallel + limits.queue)
    chats = {"tiny": Chats.of(find_template(base.tokenizer), base.tokenizer)}
    service = Service({"tiny": base}, worker, chats, Sampling(), limits, 256)
    return make_app(service, Access())


def view_app() -> Any:
    """`pyggml view` of the small model."""
    from pyggml.cli.commands.view.app import make_app
    from pyggml.cli.commands.view.source import Source

    model()
    return make_app(Source(folder() / "model.gguf"), None)


_APPS = {"serve": serve_app, "view": view_app}


class ServerError(AssertionError):
    """An answer that blames the server."""


def _post(command: str, *paths: str) -> Read:
    """Send the input as a body; its first byte chooses the path."""

    def read(data: bytes) -> None:
        path, body = paths[data[0] % len(paths) if data else 0], data[1:]
        answer = _client(command).post(path, content=body)
        if answer.status_code >= 500:
            raise ServerError(f"{path} answered {answer.status_code}: {answer.text[:300]}")
        if answer.status_code >= 400:
            raise PyggmlError(answer.text)

    return read


def _bodies(*bodies: object) -> Callable[[], list[bytes]]:
    return lambda: [bytes([i]) + json.dumps(body).encode() for i, body in enumerate(bodies)]


_CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0.5,
         "top_k": 3, "logit_bias": {"3": 1.5}, "stop": ["x"], "n": 1, "logprobs": True, "seed": 1,
         "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}  # fmt: skip
_COMPLETION = {"prompt": "a", "max_tokens": 1, "stream": True, "logprobs": 2, "echo": True}
_HTTP_WORDS = (*_JSON_WORDS, b'"stream":true', b'"n":', b'"repeat_penalty":1e-320', b'"min_p":')


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target("gguf", "model files", _read_gguf, _gguf_seeds, _GGUF_WORDS),
        Target("split", "models in two files", _read_parts, _parts_seeds, _GGUF_WORDS),
        Target("vocabulary", "tokenizers", _read_vocabulary, _vocabulary_seeds, _GGUF_WORDS),
        Target("text", "texts for tokenizers", _read_text, lambda: [_TEXT.encode()]),
        Target("adapter", "adapters", _read_adapter, _adapter_seeds, _GGUF_WORDS),
        Target("checkpoint", "checkpoints", _read_checkpoint, _checkpoint_seeds, _GGUF_WORDS),
        Target(
            "peft-settings",
            "adapter_config.json",
            _read_peft_settings,
            functools.partial(_peft_seeds, "adapter_config.json"),
            (*_JSON_WORDS, b'"rank_pattern"', b"(a+)+$", b'"modules_to_save"'),
        ),
        Target(
            "safetensors",
            "adapter_model.safetensors",
            _read_safetensors,
            functools.partial(_peft_seeds, "adapter_model.safetensors"),
            (b'"data_offsets"', b'"shape"', b'"dtype"', b"BF16", b"__metadata__"),
        ),
        Target("json-lines", "rows", _read_rows(".jsonl"), _lines_seeds, _JSON_WORDS),
        Target(
            "json",
            "rows",
            _read_rows(".json"),
            lambda: [json.dumps(_ROWS[:4]).encode(), json.dumps(_ROWS[0]).encode()],
            _JSON_WORDS,
        ),
        Target(
            "csv",
            "rows",
            _read_rows(".csv"),
            lambda: [b'text\n"a, ""b"""\nc\n', b"prompt;completion\r\na;b\r\n"],
            (b'"', b'""', b"\r", b"\0", b",", b"\xef\xbb\xbf", b";", b"\t"),
        ),
        Target("parquet", "rows", _read_rows(".parquet"), _parquet_seeds, (b"PAR1",)),
        Target(
            "settings",
            "runs' YAML",
            _read_settings,
            lambda: [b"lr: 1e-3\nrank: 8\nfile: [a, b]\n# x\n", b"{lr: 1.0, batch: 2}"],
            (b"&a", b"*a", b"!!python/object:os.system", b"<<:", b"? ", b"- ", b"|", b"%YAML"),
        ),
        Target("imatrix", "importances", _read_importances, _importances_seeds, _GGUF_WORDS),
        Target("records", "runs' metrics", _read_records, lambda: [_RECORDS], _JSON_WORDS),
        Target(
            "template",
            "chat templates",
            _read_template,
            lambda: [_TEMPLATE.encode(), _FILTERS.encode()],
            _TEMPLATE_WORDS,
        ),
        Target(
            "serve",
            "bodies of requests",
            _post("serve", "/v1/chat/completions", "/v1/completions"),
            _bodies(_CHAT, _COMPLETION),
            _HTTP_WORDS,
        ),
        Target(
            "view",
            "bodies of requests",
            _post("view", "/api/losses", "/api/attention"),
            _bodies({"text": "the cat"}, {"text": "the cat", "block": 0, "head": 0}),
            _HTTP_WORDS,
        ),
    )
}
