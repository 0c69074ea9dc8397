"""Training text: files → rows → documents of tokens → windows → batches.

reading      folders, patterns and pipes → files → rows, every faulty one by its place
formats      a file → records: JSON Lines, JSON, CSV, parquet
records      a record → a row, by its names: a text, an answered prompt, a chat, a preference
tokens       a row → its tokens, and which of them are learned; kept for later runs
windows      documents → windows → batches
pipeline     files → a corpus: what is trained on, what is held out; of texts or preferences
report       what is there twice, and what else a run should know of its rows
"""

from pyggml.lora.data.corpus import corpus, encode_rows, read_corpus
from pyggml.lora.data.reading.files import read_rows
from pyggml.lora.data.reading.sources import FileSummary, Source
from pyggml.lora.data.records import Schema
from pyggml.lora.data.records.rows import (
    ChatRow,
    CompletionRow,
    LabelledRow,
    PreferenceRow,
    PromptRow,
    QuestionRow,
    Row,
    RowPlace,
    TextRow,
)
from pyggml.lora.data.tokens.cache import TokenCache
from pyggml.lora.data.tokens.documents import Document, Documents
from pyggml.lora.data.tokens.encode import Encoding, encode
from pyggml.lora.data.windows.batches import Corpus, Dataset, WindowBatch
from pyggml.lora.data.windows.packing import pack

__all__ = [
    "ChatRow", "CompletionRow", "Corpus", "Dataset", "Document", "Documents", "Encoding",
    "FileSummary", "LabelledRow", "PreferenceRow", "PromptRow", "QuestionRow", "Row", "RowPlace",
    "Schema", "Source", "TextRow", "TokenCache", "WindowBatch", "corpus", "encode", "encode_rows",
    "pack", "read_corpus", "read_rows",
]  # fmt: skip
