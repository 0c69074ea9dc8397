"""Training text: files → rows → documents of tokens → windows → batches.

files     text, JSON Lines, JSON or CSV → rows, every faulty one by its place
corpus    rows → tokens, split into what is trained on and what is held out
windows   tokens → windows → batches
"""

from pyggml.lora.data.corpus import SPECIAL_TOKENS, encode_rows, read_corpus
from pyggml.lora.data.files import read_rows
from pyggml.lora.data.windows import Batch, Corpus, Dataset, Document, pack

__all__ = [
    "SPECIAL_TOKENS",
    "Batch",
    "Corpus",
    "Dataset",
    "Document",
    "encode_rows",
    "pack",
    "read_corpus",
    "read_rows",
]
