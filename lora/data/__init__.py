"""Training text: files → documents → token windows → batches.

files     plain text or JSON Lines → documents as text, every faulty line by its number
corpus    documents → tokens, split into what is trained on and what is held out
windows   tokens → windows → batches
"""

from pyggml.lora.data.corpus import SPECIAL_TOKENS, read_corpus, read_documents
from pyggml.lora.data.files import read_text
from pyggml.lora.data.windows import Batch, Corpus, Dataset, pack

__all__ = [
    "SPECIAL_TOKENS",
    "Batch",
    "Corpus",
    "Dataset",
    "pack",
    "read_corpus",
    "read_documents",
    "read_text",
]
