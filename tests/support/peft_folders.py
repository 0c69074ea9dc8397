"""Folders of PEFT: the golden ones, and folders with given tensors."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import pyggml
from pyggml import gguf
from pyggml.errors import AdapterError
from pyggml.lora.peft import from_peft

from peers.files import GOLDEN as BASES

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = GOLDEN / "adapters/folders"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def base(name, adapter=None):
    return pyggml.load(BASES / f"{name}.gguf", adapter, "f32")


def tensors_of(path):
    with gguf.open(path) as file:
        return {n: np.array(file.data(n)) for n in file.tensors}


def written(folder, arrays, **settings):
    """A folder with these tensors and settings."""
    folder.mkdir()
    usual = {"peft_type": "LORA", "r": 3, "lora_alpha": 5}
    (folder / CONFIG).write_text(json.dumps(usual | settings))
    save_file({n: np.float32(a) for n, a in arrays.items()}, folder / TENSORS)
    return folder


def refusal(folder, model=None):
    """What is said of a folder that is refused, of granite if no model is given."""
    with pytest.raises(AdapterError) as caught:
        from_peft(model or base("granite"), folder, folder / "a.gguf")
    assert not (folder / "a.gguf").exists()
    return str(caught.value)
