"""Make mixes.json: the types that llama.cpp gives to a small model of every architecture.

    PYTHONPATH=../../support python make_mixes.py        (wants llama_cpp, and pyggml)

As mix.json, but of models with rows of 256 and 512 numbers and most of the optional tensors.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from llama_models import VARIANTS, write
from make import FILE_TYPES, record

HERE = Path(__file__).parent
SIZES = {"embedding_length": 256, "feed_forward_length": 512}
SECTIONS = {"rope.dimension_sections": np.array([3, 3, 2, 0], np.int32)}
MORE: dict[str, dict[str, Any]] = {  # what llama.cpp or the model's sizes want besides
    "gptneox": {"use_parallel_residual": True},
    "qwen35": SECTIONS,
    "qwen35moe": SECTIONS,
    "deepseek2-ocr": {"attention.key_length": 64, "attention.value_length": 64},
    "bailingmoe3": {
        "attention.kv_lora_rank": 256,
        "attention.key_length": 264,
        "attention.value_length": 256,
        "attention.key_length_mla": 72,
        "attention.value_length_mla": 64,
    },
}


def main() -> None:
    choices: dict[str, int] = {}
    models: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (architecture, keys, optional) in VARIANTS.items():
            if name == architecture:
                sizes = SIZES | keys | MORE.get(name, {})
                path = write(Path(folder) / "model.gguf", architecture, sizes, optional)
                models[name] = record(path, choices)
                sys.stdout.write(f"{name}: {len(models[name]['tensors'])} tensors\n")
    golden = {"file_types": list(FILE_TYPES), "choices": list(choices), "models": models}
    text = json.dumps(golden, separators=(",", ":"))
    (HERE / "mixes.json").write_text(text.replace('"blk.', '\n"blk.') + "\n")


if __name__ == "__main__":
    main()
