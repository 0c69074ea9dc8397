"""Training text: files → rows → documents of tokens → windows → batches.

sources      a file, and how often its rows are read
formats      files → records: JSON Lines, JSON, CSV, parquet
names        what columns are called, and what each name means
records      a record → a row, by its names; messages: of such rows
rows         what a record is for training: a text, an answered prompt, a chat, a preference
expand       folders, patterns and pipes → files
files        a file → its rows, every faulty one by its place
encode       a row → its tokens, and which of them are learned
documents    tokens of many rows, in arrays that may be larger than memory
cache        those of earlier runs
packing      documents → windows
lengths      how far windows of single rows are computed
program      rows of a program: a list, a generator, a datasets.Dataset
reader       a file → its documents, kept or read anew
corpus       files → windows, split into what is trained on and what is held out
windows      windows → batches
"""

from pyggml.lora.data.cache import TokenCache
from pyggml.lora.data.corpus import corpus, encode_rows, read_corpus
from pyggml.lora.data.documents import Document, Documents
from pyggml.lora.data.encode import Encoding, encode
from pyggml.lora.data.files import read_rows
from pyggml.lora.data.packing import pack
from pyggml.lora.data.records import Schema
from pyggml.lora.data.rows import (
    ChatRow,
    CompletionRow,
    LabelledRow,
    PreferenceRow,
    QuestionRow,
    Row,
    RowPlace,
    TextRow,
)
from pyggml.lora.data.sources import FileSummary, Source
from pyggml.lora.data.windows import Corpus, Dataset, WindowBatch

__all__ = [
    "ChatRow",
    "CompletionRow",
    "Corpus",
    "Dataset",
    "Document",
    "Documents",
    "Encoding",
    "FileSummary",
    "LabelledRow",
    "PreferenceRow",
    "QuestionRow",
    "Row",
    "RowPlace",
    "Schema",
    "Source",
    "TextRow",
    "TokenCache",
    "WindowBatch",
    "corpus",
    "encode",
    "encode_rows",
    "pack",
    "read_corpus",
    "read_rows",
]
