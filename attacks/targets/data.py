"""Rows, settings, importances and records of runs."""

import json

import numpy as np

from attacks.targets.target import (
    GGUF_WORDS,
    JSON_WORDS,
    Read,
    Target,
    folder,
    gguf_bytes,
    write_input,
)


def _read_rows(suffix: str) -> Read:
    def read(data: bytes) -> None:
        from pyggml.lora.data.reading.files import read_rows

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


TARGETS = (
    Target("json-lines", "rows", _read_rows(".jsonl"), _lines_seeds, JSON_WORDS),
    Target(
        "json",
        "rows",
        _read_rows(".json"),
        lambda: [json.dumps(_ROWS[:4]).encode(), json.dumps(_ROWS[0]).encode()],
        JSON_WORDS,
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
    Target("imatrix", "importances", _read_importances, _importances_seeds, GGUF_WORDS),
    Target("records", "runs' metrics", _read_records, lambda: [_RECORDS], JSON_WORDS),
)
