"""Every architecture that is known, by its name in `general.architecture`."""

from pyggml.models.architecture import Architecture
from pyggml.models.architectures.llama import LLAMA
from pyggml.models.architectures.qwen2 import QWEN2
from pyggml.models.architectures.qwen3 import QWEN3

ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        LLAMA,
        QWEN2,
        QWEN3,
    )
}
