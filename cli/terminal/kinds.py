"""What a command writes, told from a file that is there: kinds of files by their first bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyggml.errors import PyggmlError
from pyggml.files import open_regular

_CONTROL = "controlvector"


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file: what it is called, with its article, and whether a file is one."""

    name: str
    is_one: Callable[[Path], bool]


def gguf_kind(name: str, *types: str) -> FileKind:
    """GGUF files whose general.type is one of these, or that are control vectors; "" stands for no
    type."""

    def is_one(path: Path) -> bool:
        from pyggml import gguf  # which no help text waits for

        try:
            with gguf.open(path) as file:
                is_control = file.word("general.architecture") == _CONTROL  # which has no type
                kind = _CONTROL if is_control else file.get("general.type", "")
                return isinstance(kind, str) and kind in types
        except PyggmlError:
            return False

    return FileKind(name, is_one)


def written_kind(name: str, first_words: str) -> FileKind:
    """Files that begin with words of ours."""

    def is_one(path: Path) -> bool:
        try:
            with open_regular(path) as file:
                return file.read(len(first_words)) == first_words.encode()
        except (OSError, ValueError):
            return False

    return FileKind(name, is_one)


CONTROL_VECTOR = gguf_kind("a control vector", _CONTROL)
ADAPTER = gguf_kind("an adapter", "adapter")
MODEL_FILE = gguf_kind("a model", "model", "")
TEACHER = gguf_kind("what a teacher said", "teacher")
EMBEDDINGS = written_kind("embeddings as lines of JSON", '{"text": ')
IMPORTANCE = gguf_kind("an importance matrix", "imatrix")
PAGE_WORDS = "<!doctype html><!-- Written by pyggml inspect -->"
PAGE = written_kind("a page of pyggml inspect", PAGE_WORDS)
# A Modelfile is edited by hand, and says not whose it is.
MODELFILE = FileKind("known to be as pyggml wrote it", lambda path: False)
