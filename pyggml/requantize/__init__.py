"""Models as files of other weight types, and the importance of their columns.

FILE_TYPES has the file types; `mix` chooses the type of each tensor of a file.
"""

from pyggml.requantize.file_types import FILE_TYPES, ModelFacts, check_file_type
from pyggml.requantize.losses import PackingLosses
from pyggml.requantize.mix import mix, needs_importance
from pyggml.requantize.requantize import (
    ROUNDINGS,
    Numbers,
    Progress,
    numbers_in,
    requantize,
    rewrite,
    types_of,
)

__all__ = [
    "FILE_TYPES", "ROUNDINGS", "ModelFacts", "Numbers", "PackingLosses", "Progress",
    "check_file_type", "mix", "needs_importance", "numbers_in", "requantize", "rewrite", "types_of",
]  # fmt: skip
