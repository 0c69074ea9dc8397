"""Adapters of PEFT (a folder of safetensors) ↔ adapters in llama.cpp's format, for the same model.

For a module W (n_out, n_in) of transformers and a tensor that is its rows p and columns q, in that
order, the update BA becomes B[p] A[:, q].
"""

from pyggml.lora.peft.exporting import to_peft
from pyggml.lora.peft.importing import from_peft

__all__ = ["from_peft", "to_peft"]
