"""Training text: files → rows → documents of tokens → windows → batches.

rows      what a record is for training: a text, an answered prompt, a chat, a preference
files     text, JSON Lines, JSON or CSV → rows, every faulty one by its place
encode    a row → its tokens, and which of them are learned
corpus    rows → tokens, split into what is trained on and what is held out
windows   tokens → windows → batches
"""

from pyggml.lora.data.corpus import encode_rows, read_corpus
from pyggml.lora.data.encode import Encoding, encode
from pyggml.lora.data.files import read_rows
from pyggml.lora.data.rows import (
    ChatRow,
    CompletionRow,
    KtoRow,
    Message,
    Messages,
    Place,
    PreferenceRow,
    Row,
    TextRow,
)
from pyggml.lora.data.windows import Batch, Corpus, Dataset, Document, pack

__all__ = [
    "Batch",
    "ChatRow",
    "CompletionRow",
    "Corpus",
    "Dataset",
    "Document",
    "Encoding",
    "KtoRow",
    "Message",
    "Messages",
    "Place",
    "PreferenceRow",
    "Row",
    "TextRow",
    "encode",
    "encode_rows",
    "pack",
    "read_corpus",
    "read_rows",
]
